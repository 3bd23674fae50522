"""Evidence that counts only once a log has ended: few lines of a paste, warnings before a traceback
that is cut off, the stack of a crash."""

from __future__ import annotations

import time

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.evidence import LogEvidence
from gateway.diagnosis.log_reader import LogReader
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures


def read(*lines: str) -> Failure:
    return diagnose([("\n".join(lines) + "\n").encode()], SIGNATURES)[0]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        # A known text, and words of a field, where nothing says that it is an error.
        ("RPC call to execute_model timed out", "hang"),
        ("NVSHMEM API called before NVSHMEM initialization has completed", "nccl"),
        # Python's words about a fault, without its exception.
        ("name 'check_frob' is not defined", "engine_bug"),
        ("cannot import name 'Frob' from 'transformers'", "package"),
        ("'Frob' object has no attribute 'frob'", "unknown"),
        ("EngineCore encountered an issue. See stack trace above", "unknown"),
        ("It says `Model FrobForCausalLM does not support LoRA` and that is all", "lora"),
        # A program calls it an error, and no more is known of it.
        (
            "[ERROR] 2026-03-11-06:48:29 (PID:14, Device:-1, RankID:-1) FROB99999 unknown frob",
            "unknown",
        ),
        ("CRITICAL: frob", "none"),
    ],
)
def test_a_single_pasted_line_counts_as_the_cause(line: str, kind: str) -> None:
    assert read(line).kind == kind


def test_the_parts_of_a_pasted_line_have_its_number() -> None:
    failure = read(
        "(EngineCore_0 pid=77) ERROR 11-28 10:00:09 [core.py:700] ValueError: To serve at least one"
        " request with the model's max seq len (40960), 5.6 GiB KV cache is needed, which is larger"
        " than the available KV cache memory (2.1 GiB)."
    )
    assert failure.kind == "kv_too_small"
    assert failure.line_number == 1


def test_an_empty_log_is_called_empty() -> None:
    assert diagnose([b""], SIGNATURES)[0].message == "The log is empty."


def test_a_weak_line_among_many_is_no_cause() -> None:
    assert (
        read(*["frob"] * 5, "NVSHMEM API called before NVSHMEM initialization has completed").kind
        == "none"
    )
    assert read(*["frob"] * 5, "name 'check_frob' is not defined").kind == "none"


def test_a_record_that_a_terminal_broke_off_is_no_failure() -> None:
    record = (
        "[2026-03-14 10:22:05] Using default MoE kernel config. Config file not found at"
        " /opt/fused_moe_triton/E=384,N=14336,device_name=NVIDIA_"
    )
    assert (
        read(
            record,
            "RTX_PRO_6000.json, you can create them with"
            " https://github.com/sgl-project/fused_moe_triton",
        ).kind
        == "none"
    )


def test_a_fatal_line_counts_at_any_level() -> None:
    line = (
        "INFO 03-14 10:22:05 [__init__.py:252] No platform detected, vLLM is running on"
        " UnspecifiedPlatform"
    )
    assert (
        read('Defaulted container "vllm" out of: vllm, routing-proxy (init)', line).kind
        == "no_device"
    )
    none_left = (
        "INFO 03-14 10:22:05 worker.py:267] model weights take 5.20GiB; the rest of the memory"
        " reserved for KV Cache is -1.05GiB."
    )
    assert (
        read(*["INFO 03-14 10:22:05 model_runner.py:1115] hello"] * 5, none_left).kind == "gpu_oom"
    )


@pytest.mark.parametrize(
    "line",
    [
        (
            "2026-03-14 10:22:05,014 - INFO - flashinfer.jit: Loading JIT ops:"
            " batch_prefill_with_kv_cache_dtype_q_bf16"
        ),
        "Some attention backends are not valid for cuda with AttentionSelectorConfig(head_size=64)",
        "INFO 03-14 10:22:05 [cuda.py:10] Using FlashAttention with nccl and gptq",
        "[2026-03-14 10:22:05 TP0] nccl, triton and gptq are there",
        "Loading the tokenizer",
        "2026-03-14T10:22:05Z  INFO dynamo_llm::engines::worker: waiting for nccl",
        (
            "[2026-03-14 10:22:05,123] LMCache DEBUG: Failed to allocate memory, no memory is"
            " available (gds.py:5:lmcache)"
        ),
    ],
)
def test_a_single_informational_line_is_no_failure(line: str) -> None:
    assert read(line).kind == "none"


def test_the_last_warning_counts_if_a_traceback_only_begins() -> None:
    warning = (
        "WARNING 03-14 10:22:05 [_custom_ops.py:20] Failed to import from vllm._C: libcuda.so.1:"
        " cannot open shared object file"
    )
    line = "Traceback (most recent call last):"
    failure = read("INFO 03-14 10:22:05 [a.py:1] hello", warning, *["frob"] * 4, line)
    assert (failure.kind, failure.line_number) == ("no_device", 2)
    frame = '  File "/opt/vllm/v1/engine/core.py", line 7, in __init__'
    assert (
        read(
            "INFO 03-14 10:22:05 [a.py:1] hello",
            warning,
            *["frob"] * 4,
            line,
            frame,
            "RuntimeError: frob",
        ).kind
        != "no_device"
    )


STACK = (
    "Thread 0x00007f01 (most recent call first):",
    '  File "/usr/lib/python3.12/threading.py", line 355 in wait',
    "",
    "Current thread 0x00007f02 (most recent call first):",
    '  File "/opt/torch/distributed/distributed_c10d.py", line 2501 in all_reduce',
    '  File "/opt/sglang/srt/distributed/parallel_state.py", line 414 in _all_reduce_in_place',
    '  File "/opt/sglang/srt/models/llama.py", line 183 in forward',
)


def test_the_place_of_a_crash_shows_the_likely_cause() -> None:
    failure = read("Fatal Python error: Segmentation fault", "", *STACK)
    assert (failure.kind, failure.line_number) == ("nccl", 6)
    assert failure.message.startswith("Likely: ")
    assert read("Fatal Python error: Segmentation fault", "", *STACK[:4]).kind == "exited"


def test_the_symbols_of_a_native_stack_show_the_likely_cause() -> None:
    failure = read(
        "(RayWorkerWrapper pid=7) *** SIGSEGV received at time=1773483725 on cpu 11 ***",
        "(RayWorkerWrapper pid=7) PC: @     0x7fcfcd849b8a  (unknown)  addProxyOpIfNeeded()",
        "(RayWorkerWrapper pid=7)     @     0x7ffff7c9e520  267994832  (unknown)",
    )
    assert failure.kind == "nccl"
    assert (
        failure.line
        == "(RayWorkerWrapper pid=7) PC: @     0x7fcfcd849b8a  (unknown)  addProxyOpIfNeeded()"
    )


def test_the_place_of_a_crash_changes_no_plan() -> None:
    reader = LogReader(SIGNATURES)
    reader.feed("\n".join(["Fatal Python error: Segmentation fault", "", *STACK]).encode())
    reader.close()
    assert reader.verdict is not None
    assert reader.verdict.kind == "exited"


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_log_joined_to_one_line_is_split_again(end: str) -> None:
    line = (
        'File "/opt/vllm/quantization/fp8_utils.py", line 1151, in validate_fp8_block_shape'
        " (Worker_TP4 pid=13) ERROR 03-14 10:22:05 [multiproc_executor.py:888] raise ValueError("
        " (Worker_TP4 pid=13) ERROR 03-14 10:22:05 [multiproc_executor.py:888] ValueError: Weight"
        " input_size_per_partition = 192 is not divisible by weight quantization block_k = 128."
        " (Worker_TP0 pid=14) ERROR 03-14 10:22:05 [multiproc_executor.py:888] frob"
    )
    assert diagnose([(line + end).encode()], SIGNATURES)[0].kind == "no_kernel"
    sentence = "Rope scaling fails in `rope_scaling`, KeyError: 'type'."
    assert diagnose([(sentence + end).encode()], SIGNATURES)[0].line_number == 1


def test_the_lines_come_in_pieces_as_they_will() -> None:
    log = b"RuntimeError: frob\nValueError: the c10d frobnicator lost the other ranks\n"
    failures = [diagnose([log[:cut], log[cut:]], SIGNATURES)[0] for cut in range(len(log))]
    assert {(failure.kind, failure.line_number) for failure in failures} == {
        (failures[0].kind, failures[0].line_number)
    }


WAITS = (
    "(EngineCore pid=1) INFO 06-27 19:5{}:58 [shm_broadcast.py:705] No available shared memory"
    " broadcast block found in 60 seconds."
)
GOES_ON = "(EngineCore pid=1) INFO 03-14 10:22:05 [core.py:1] init engine took 9 s"


def test_an_engine_that_repeats_its_wait_stands_still() -> None:
    start = ["INFO 03-14 10:22:05 [a.py:1] hello"] * 5
    assert read(*start, WAITS.format(0), WAITS.format(1)).kind == "hang"
    assert read(*start, WAITS.format(0)).kind == "none"
    assert read(*start, WAITS.format(0), WAITS.format(1), GOES_ON).kind == "none"
    assert read(*start, WAITS.format(0), GOES_ON, WAITS.format(1)).kind == "none"


def test_an_engine_whose_core_does_not_come_up_stands_still() -> None:
    start = ["(APIServer pid=1) INFO 03-14 10:22:05 [a.py:1] hello"] * 5
    waits = [
        f"(APIServer pid=1) DEBUG 06-27 19:41:{at}1 [utils.py:773] Waiting for 1 local, 0 remote"
        " core engine proc(s) to start."
        for at in range(5)
    ]
    assert read(*start, *waits).kind == "hang"
    assert read(*start, *waits[1:]).kind == "none"
    long = ["(EngineCore pid=9) frob goes on"] * 20_000
    assert read(*start, *long, *waits).kind == "hang"
    assert read(*start, *long, *waits, *long).kind == "none"
    loads = (
        "(EngineCore pid=9) Loading safetensors checkpoint shards:  25% Completed | 1/4"
        " [00:20<01:00, 20.1s/it]"
    )
    assert read(*start, *waits[:2], loads, *waits[2:]).kind == "none"


def test_an_engine_that_compose_saw_killed_was_killed() -> None:
    death = (
        "sglang  | [2026-03-14 10:22:05] Received sigquit from a child process. It usually means"
        " the child failed."
    )
    assert (
        read(
            *["sglang  | [2026-03-14 10:22:05 TP0] hello"] * 5, death, "sglang exited with code 137"
        ).kind
        == "killed"
    )
    assert (
        read(
            *["sglang  | [2026-03-14 10:22:05 TP0] hello"] * 5, death, "sglang exited with code 1"
        ).kind
        == "unknown"
    )


def test_an_engine_that_ends_in_a_dump_of_its_threads_stands_still() -> None:
    log_of_service = [
        "[2026-03-14 10:22:05] The server is fired up and ready to roll!",
        '[2026-03-14 10:22:05] INFO: "POST /generate HTTP/1.1" 200 OK',
    ]
    dump = [
        "[2026-03-14 10:22:05] Pyspy dump for PID 499:",
        'Thread 499 (idle): "MainThread"',
        "    replay (graph_runner.py:82)",
    ]
    assert read(*log_of_service, *dump).kind == "hang"
    batch = "[2026-03-14 10:22:05 TP0] Decode batch. #running-req: 1, gen throughput (token/s): 90"
    assert read(*log_of_service, *dump, batch).kind == "none"
    assert read(*log_of_service, *dump, *["x"] * 100, batch).kind == "none"


def test_an_engine_whose_threads_somebody_dumped_stands_still() -> None:
    log_of_service = [
        '[2026-03-14 10:22:05] INFO: "POST /generate HTTP/1.1" 200 OK',
        "[2026-03-14 10:22:05] frob",
    ]
    dump = [
        "$ py-spy dump --pid 7",
        "Process 7: frob",
        'Thread 7 (active+gil): "MainThread"',
        "    frob (frob.py:7)",
    ]
    assert read(*log_of_service, *dump).kind == "hang"
    assert read(*log_of_service, *dump, log_of_service[1]).kind == "none"


def test_an_ignored_error_counts_before_a_truncated_traceback() -> None:
    line = (
        "ERROR 03-14 10:22:05 [parallel_state.py:2575] Error ignored in is_in_the_same_node:"
        " [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 1800000ms for send operation"
        " to complete"
    )
    cut = [
        "ERROR 03-14 10:22:05 [multiproc_executor.py:946] Traceback (most recent call last):",
        (
            "ERROR 03-14 10:22:05 [multiproc_executor.py:946]   File"
            ' "/opt/vllm/v1/executor/multiproc_executor.py", line 913, in worker_main'
        ),
        "ERROR 03-14 10:22:05 [multiproc_executor.py:946]     worker = WorkerProc(*args, **kwargs)",
    ]
    assert read(*["INFO 03-14 10:22:05 [a.py:1] hello"] * 5, line, *cut).kind == "nccl"
    # A whole traceback says more.
    assert (
        read(
            *["INFO 03-14 10:22:05 [a.py:1] hello"] * 5,
            line,
            *cut,
            "ERROR 03-14 10:22:05 [x.py:1] ImportError: frob",
        ).kind
        == "package"
    )


def test_a_stack_without_its_beginning_is_read_but_not_those_of_other_threads() -> None:
    assert read(*STACK[4:], "Extension modules: frob").kind == "nccl"
    assert read("Fatal Python error: Aborted", "", STACK[0], *STACK[4:]).kind == "exited"


def test_a_traceback_of_one_request_that_is_cut_off_is_no_failure() -> None:
    line = "ERROR 03-14 10:22:05 [hermes_tool_parser.py:157] Traceback (most recent call last):"
    frame = (
        "ERROR 03-14 10:22:05 [hermes_tool_parser.py:157]   File"
        ' "/opt/vllm/entrypoints/openai/tool_parsers/hermes_tool_parser.py", line 134, in'
        " extract_tool_calls"
    )
    assert (
        read(
            *["INFO 03-14 10:22:05 [a.py:1] hello"] * 5,
            line,
            frame,
            frame.replace("extract_tool_calls", "<listcomp>"),
        ).kind
        == "none"
    )


@pytest.mark.parametrize(
    ("line", "is_advice"),
    [
        ("To avoid this, start with --enforce-eager", True),
        ("Consider one of: (1) fewer requests (2) a larger --mem-fraction-static.", True),
        ("--enforce-eager is set: try again", False),
        ("Please use key--value", False),
    ],
)
def test_a_line_with_a_flag_behind_words_of_advice_is_advice(line: str, is_advice: bool) -> None:
    evidence = LogEvidence(SIGNATURES, None)
    evidence.read_advice(line, 1)
    assert evidence.advice_near(2) == ((line,) if is_advice else ())


def test_a_line_full_of_words_of_advice_costs_no_more_than_its_length() -> None:
    """In CPU time, the best of several: a cost by the square would be 256 times as large."""

    def cost(words: int) -> float:
        line, evidence = "try " * words + "--1", LogEvidence(SIGNATURES, None)
        seconds = []
        for _ in range(5):
            began = time.process_time()
            for number in range(20):
                evidence.read_advice(line, number)
            seconds.append(time.process_time() - began)
        return min(seconds)

    assert cost(16 * 60) < 64 * cost(60)
