"""Logs of several lines, pastes and processes, read to one cause."""

from typing import Any

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.log_reader import LogReader
from gateway.profiles.profiles import Profiles
from tests.support.paths import LOGS
from tests.support.yaml_file import read_yaml

SIGNATURES = Profiles().signatures
EXCERPTS = read_yaml(LOGS / "excerpts.yaml")


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda excerpt: excerpt["shows"])
def test_several_lines_are_read_together(excerpt: dict[str, Any]) -> None:
    data = excerpt["log"].encode()
    assert diagnose([data], SIGNATURES, excerpt["engine"])[0].kind == excerpt["kind"]


@pytest.mark.parametrize(
    ("log", "before", "allocation_line", "warm"),
    [
        (
            "healthy-vllm-0.18.0-serving",
            "GPU KV cache size",
            "Capturing CUDA graphs",
            "init engine",
        ),
        ("healthy-llama-3.1-8b-tp2", "GPU KV cache size", "Capturing CUDA graphs", "init engine"),
        ("healthy-qwen3.5-9b", "GPU KV cache size", "Capturing CUDA graphs", "init engine"),
        ("healthy-a2-tiny-llama-eager-again", "GPU KV cache size", "init engine", "init engine"),
        (
            "healthy-sglang-0.5.10.post1-serving",
            "KV Cache is allocated",
            "Memory pool end",
            "Prefill batch",
        ),
        (
            "healthy-sglang-0.5.23-serving",
            "KV Cache is allocated",
            "Memory pool end",
            "Prefill batch",
        ),
    ],
)
def test_the_log_shows_when_the_kv_cache_is_allocated(
    log: str, before: str, allocation_line: str, warm: str
) -> None:
    reader = LogReader(SIGNATURES)
    states: list[tuple[bool, bool, str]] = []
    for line in (LOGS / f"{log}.log").read_bytes().splitlines():
        reader.read(line)
        states.append(
            (
                reader.progress.is_kv_cache_made,
                reader.progress.are_graphs_made,
                line.decode(errors="replace"),
            )
        )
    assert not any(stands for stands, _, line in states if before in line)
    assert allocation_line in next(line for stands, _, line in states if stands)
    assert warm in next(line for _, has_settled, line in states if has_settled)


OOM = """\
(EngineCore_DP0 pid=42) ERROR 03-14 10:22:05 [core.py:718] Traceback (most recent call last):
(EngineCore_DP0 pid=42) ERROR 03-14 10:22:05 [core.py:718]   File "vllm/v1/worker/gpu_worker.py", line 180, in init_device
(EngineCore_DP0 pid=42) ERROR 03-14 10:22:05 [core.py:718] ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than \
desired GPU memory utilization (0.9, 3.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
"""  # noqa: E501


@pytest.mark.parametrize(
    "pasted",
    [
        OOM.replace("\n", " "),
        OOM.replace("\n", "\\n"),
        OOM.replace("\n", "\r"),
        OOM.replace("\n", "\r\n"),
        OOM.replace(" ERROR", "\u00a0ERROR").replace("] ", "]\u00a0"),
        "".join(f"│ {line:<400} │\n" for line in OOM.splitlines()),
        "".join(f"w-7[error] {line}\\n\n" for line in OOM.splitlines()),
        "".join(f"\x1b[1;36m{line[:24]}\x1b[0;0m{line[24:]}\x1b[0m\n" for line in OOM.splitlines()),
        "".join(
            f"Apr  3 10:22:05 host vllm[41]: #033[1;36m{line[:24]}#033[0;0m{line[24:]}\n"
            for line in OOM.splitlines()
        ),
        "".join(f"Mar 18 11:23:46 vllm-serve[41]: {line}\n" for line in OOM.splitlines()),
        "".join(f"2026-03-14T10:22:05.363544040 +08:00 CST {line}\n" for line in OOM.splitlines()),
        "\0\ufffd" * 500 + "\n" + OOM,
    ],
    ids=[
        "one-line",
        "ends-written-out",
        "mac",
        "windows",
        "page-spaces",
        "frame",
        "console",
        "colours",
        "rsyslog",
        "journal",
        "zone",
        "binary",
    ],
)
def test_a_paste_is_read_however_it_was_carried(pasted: str) -> None:
    failure = diagnose([pasted.encode()], SIGNATURES)[0]
    assert (failure.kind, failure.culprit["wanted_bytes"]) == ("gpu_shared", int(3.6 * 2**30))


def test_a_request_that_holds_a_traceback_stays_one_line() -> None:
    prompt = (
        "INFO 03-14 10:22:05 [logger.py:1] Received request r: prompt: 'why? "
        + OOM.replace("\n", "\\n")
        + "'\n"
    )
    assert (
        diagnose([("INFO 03-14 10:22:05 [x.py:1] Starting\n" + prompt).encode()], SIGNATURES)[
            0
        ].kind
        == "none"
    )


def test_a_message_broken_by_a_terminal_is_joined_for_its_name() -> None:
    diagnosis = diagnose(
        [
            b"pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            b"  Value error, User-specified max_model_len (100000) is greater than the deriv\n"
            b"ed max_model_len (max_position_embeddings=2048 or model_max_length=None in model\n"
        ],
        SIGNATURES,
    )[0]
    assert (diagnosis.kind, diagnosis.culprit["engine_max_model_len"]) == (
        "context_beyond_model",
        2048,
    )


VLLM = 'INFO:     10.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
SGLANG = "[2026-03-14 10:22:05 TP0] Decode batch. #running-req: 1, gen throughput (token/s): 30"
V0 = "ERROR 03-14 10:22:05 async_llm_engine.py:65] "
V1 = "(EngineCore pid=1) ERROR 03-14 10:22:05 [core.py:1586] "
WORKER = "(Worker_TP0 pid=7) ERROR 03-14 10:22:05 [multiproc_executor.py:856] "
TRACE = "Traceback (most recent call last):"
SITE = "/usr/lib/python3/site-packages"
NAN = (
    "RuntimeError: shape mismatch: value tensor of shape [211] cannot be broadcast to indexing"
    " result of shape [212]"
)


def verdict_after_service(*lines: str) -> tuple[str, str | None]:
    """The kind and the cited line for an engine that served before it printed these lines."""
    diagnosis = diagnose(["\n".join(lines).encode()], SIGNATURES)[0]
    return diagnosis.kind, diagnosis.line


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ((VLLM, f"{V0}Engine background task failed", V0 + TRACE, V0 + NAN), "kernel_runtime"),
        (
            (
                VLLM,
                (
                    "CRITICAL 03-14 10:22:05 launcher.py:99] MQLLMEngine is already dead,"
                    " terminating server process"
                ),
            ),
            "unknown",
        ),
        (
            (
                VLLM,
                "ERROR 03-14 10:22:05 x.py:116] Worker VllmWorkerProcess pid 42 died, exit code: 1",
            ),
            "killed",
        ),
        ((VLLM, f"{V1}EngineCore hit an exception: {TRACE}", V1 + NAN), "kernel_runtime"),
        (
            (
                VLLM,
                V1 + TRACE,
                f'{V1}  File "{SITE}/vllm/v1/engine/core.py", line 7, in run_busy_loop',
                V1 + NAN,
            ),
            "kernel_runtime",
        ),
        (
            (VLLM, WORKER + TRACE, WORKER + NAN, f"{V1}Worker proc VllmWorker-0 died unexpectedly"),
            "kernel_runtime",
        ),
        (
            (
                SGLANG,
                "Exception in thread Thread-5 (forward_thread_func):",
                TRACE,
                (
                    f'  File "{SITE}/sglang/srt/managers/tp_worker_overlap_thread.py", line 7, in'
                    " forward_thread_func"
                ),
                NAN,
            ),
            "kernel_runtime",
        ),
        (
            (
                SGLANG,
                f"[2026-03-14 10:22:05 TP1] TpModelWorkerClient hit an exception: {TRACE}",
                NAN,
            ),
            "kernel_runtime",
        ),
        (
            (
                SGLANG,
                "[2026-03-14 10:22:05] Subprocess scheduler_0 (pid=12) crashed with exit code -6.",
            ),
            "exited",
        ),
        (
            (
                SGLANG,
                "[2026-03-14 10:22:05] Subprocess scheduler_0 (pid=12) crashed with exit code -9.",
            ),
            "killed",
        ),
        ((SGLANG, "Fatal Python error: Segmentation fault"), "exited"),
        (
            (
                VLLM,
                (
                    "python3: /frob/Frob.cpp:43: std::pair<int, int> frob(int): Assertion `a &&"
                    ' "frob"\' failed.'
                ),
            ),
            "kernel_runtime",
        ),
        (
            (
                VLLM,
                (
                    "[rank0]:[E1121 02:22:46.357 ProcessGroupNCCL.cpp:1896] [PG ID 2 PG GUID 3 Rank"
                    " 0] Process group watchdog thread terminated with exception: CUDA error: an"
                    " illegal memory access was encountered"
                ),
            ),
            "kernel_runtime",
        ),
    ],
)
def test_an_engine_that_served_and_is_over_has_its_cause(lines: tuple[str, ...], kind: str) -> None:
    assert verdict_after_service(*lines)[0] == kind
    assert (
        verdict_after_service(*lines, VLLM.replace("200 OK", "500 Internal Server Error"))[0]
        == kind
    )


@pytest.mark.parametrize(
    "lines",
    [
        (
            "ERROR:    Exception in ASGI application",
            TRACE,
            f'  File "{SITE}/starlette/routing.py", line 7, in app',
            NAN,
        ),
        (
            V0 + TRACE,
            f'{V0}  File "{SITE}/vllm/entrypoints/openai/serving_chat.py", line 7, in create',
            V0 + NAN,
        ),
        (
            TRACE,
            f'  File "{SITE}/starlette/routing.py", line 7, in app',
            f'  File "{SITE}/vllm/engine/async_llm_engine.py", line 7, in run_engine_loop',
            NAN,
        ),
        (
            f"{V1}Invocation of add_lora method failed",
            V1 + TRACE,
            f'{V1}  File "{SITE}/vllm/v1/engine/core.py", line 7, in f',
            V1 + NAN,
        ),
        (
            TRACE,
            f'  File "{SITE}/sglang/srt/managers/scheduler.py", line 7, in event_loop_overlap',
            "KeyboardInterrupt",
        ),
        (
            (
                "ERROR 03-14 10:22:05 multiproc_worker_utils.py:116] Worker VllmWorkerProcess pid"
                " 29 died, exit code: -15"
            ),
        ),
    ],
)
def test_a_request_that_fails_by_itself_ends_no_engine(lines: tuple[str, ...]) -> None:
    assert verdict_after_service(VLLM, *lines)[0] == "none"
    assert verdict_after_service(VLLM, *lines, VLLM)[0] == "none"


def test_a_survived_error_is_not_the_cause_of_a_later_end() -> None:
    death = "ERROR 03-14 10:22:05 x.py:116] Worker VllmWorkerProcess pid 42 died, exit code: 1"
    info = WORKER.replace("ERROR", "INFO")
    assert verdict_after_service(VLLM, WORKER + TRACE, WORKER + NAN, death) == (
        "kernel_runtime",
        WORKER + NAN,
    )
    assert (
        verdict_after_service(VLLM, WORKER + TRACE, WORKER + NAN, f"{info}goes on", death)[0]
        == "killed"
    )


def test_a_wait_that_is_over_is_named_by_its_effect() -> None:
    frame = f'{V1}  File "{SITE}/vllm/distributed/parallel_state.py", line 7, in recv_object'
    first = f"{V1}EngineCore encountered a fatal error.", V1 + TRACE, frame, f"{V1}TimeoutError"
    assert verdict_after_service(VLLM, *first)[0] == "nccl"
    cause = f"{V1}The above exception was the direct cause of the following exception:", V1 + TRACE
    assert (
        verdict_after_service(
            VLLM, *first, *cause, f"{V1}TimeoutError: RPC call to execute_model timed out."
        )[0]
        == "hang"
    )


def test_the_error_that_a_process_quotes_of_a_worker_is_the_cause() -> None:
    error = (
        "RuntimeError: Worker failed with error ''RMSNormGated' object has no attribute 'x'',"
        " please check the stack trace above for the root cause"
    )
    death = f"{V1}Worker proc VllmWorker-0 died unexpectedly, shutting down executor."
    assert verdict_after_service(V1 + error, death) == ("unsupported_architecture", V1 + error)
    assert verdict_after_service(death)[0] == "killed"


def test_state_that_an_engine_prints_beside_an_error_is_not_the_error() -> None:
    """vLLM prints its configuration and its scheduler, at the level of errors, before it tells of
    the failure."""
    log = """\
ERROR 03-14 10:22:05 [dump_input.py:70] V1 LLM engine (v0.9.0) with config: model='m', quantization=None, enable_prefix_caching=True, tokenizer='m',
ERROR 03-14 10:22:05 [dump_input.py:78] Dumping scheduler output for model execution:
ERROR 03-14 10:22:05 [dump_input.py:81] SchedulerStats(num_running_reqs=7, prefix_cache_stats=PrefixCacheStats(reset=False), spec_decoding_stats=None)
ERROR 03-14 10:22:05 [core.py:502] EngineCore encountered a fatal error.
ERROR 03-14 10:22:05 [core.py:502] TimeoutError: RPC call to execute_model timed out.
"""  # noqa: E501
    assert diagnose([log.encode()], SIGNATURES)[0].kind == "hang"


def test_the_end_of_a_main_loop_is_a_failure_also_where_the_start_is_not_in_the_log() -> None:
    log = """\
Exception in thread Thread-3 (forward_thread_func):
Traceback (most recent call last):
  File "/opt/venv/sglang/srt/managers/tp_worker_overlap_thread.py", line 99, in forward_thread_func
    self.forward_thread_func_()
RuntimeError: CUDA error: device-side assert triggered
"""
    assert diagnose([log.encode()], SIGNATURES)[0].kind == "kernel_runtime"


FORWARD = (
    "Traceback (most recent call last):",
    '  File "/opt/site-packages/sglang/srt/models/x.py", line 7, in forward',
)


@pytest.mark.parametrize(
    "typed",
    [
        (
            "command: `python3 -m sglang.launch_server --model-path=/models/m --trust-remote-code"
            " --enable-lora`"
        ),
        "$ HF_HOME=/x vllm serve org/m --trust-remote-code",
        "docker run --gpus all vllm/vllm-openai --trust-remote-code",
        "    --trust-remote-code \\",
        "llm = LLM(model='m', trust_remote_code=True)",
        "│   173 │   │   raise ValueError('please set trust_remote_code=True')",
        "--trust-remote-code",
    ],
)
def test_words_of_a_user_after_an_error_are_no_part_of_the_error(typed: str) -> None:
    error = "TypeError: M.forward() missing 1 required positional argument: 'metadata'"
    assert diagnose(["\n".join((*FORWARD, error, typed)).encode()], SIGNATURES)[0].kind == "package"
    assert (
        diagnose(["\n".join((*FORWARD, "RuntimeError: boom", typed)).encode()], SIGNATURES)[0].kind
        == "unknown"
    )


@pytest.mark.parametrize(
    "last_line",
    [
        (
            "[W1121 02:22:46.357000000 ProcessGroupNCCL.cpp:1496] Warning: WARNING:"
            " destroy_process_group() was not called before program exit, which can leak"
        ),
        (
            "/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning:"
            " resource_tracker: There appear to be 1 leaked shared_memory objects"
        ),
        (
            "W1104 22:57:20.399000 14042 torch/_inductor/compile_worker/subproc_pool.py:126]"
            " SubprocPool unclean exit"
        ),
    ],
)
def test_the_last_lines_of_an_ending_process_neither_survive_nor_explain(last_line: str) -> None:
    failure = diagnose(
        ["\n".join((*FORWARD, "RuntimeError: boom", last_line)).encode()], SIGNATURES
    )[0]
    assert (failure.kind, failure.line) == ("unknown", "RuntimeError: boom")


def test_names_that_a_resource_tracker_misses_are_not_the_failure() -> None:
    tracker = (
        FORWARD[0],
        '  File "/usr/lib/python3.12/multiprocessing/resource_tracker.py", line 209, in main',
    )
    lines = (*FORWARD, "RuntimeError: boom", *tracker, "KeyError: '/mp-0je2dy8c'")
    assert diagnose(["\n".join(lines).encode()], SIGNATURES)[0].line == "RuntimeError: boom"
    assert diagnose(["\n".join(lines[3:]).encode()], SIGNATURES)[0].kind == "none"


def test_the_fault_of_one_request_stands_in_more_lines() -> None:
    lines = (
        "ValidationError: 2 validation errors for ChatCompletionRequest",
        "messages.0.role",
        "  Input should be 'user' [type=literal_error, input_value='x',",
    )
    assert diagnose(["\n".join(lines).encode()], SIGNATURES)[0].kind == "none"
    assert (
        diagnose(
            ["\n".join(lines).replace("ChatCompletionRequest", "VllmConfig").encode()], SIGNATURES
        )[0].kind
        == "bad_flag"
    )


def test_a_pipe_to_a_dead_process_reveals_the_death() -> None:
    recv = (
        FORWARD[0],
        '  File "/usr/lib/python3.12/multiprocessing/connection.py", line 383, in _recv',
        "EOFError",
    )
    failure = diagnose(["\n".join(recv).encode()], SIGNATURES)[0]
    assert failure.kind == "unknown"
    assert "further up" in failure.message
    assert diagnose(["\n".join(recv[1:]).encode()], SIGNATURES)[0].kind == "unknown"
    other_lines = (
        FORWARD[0],
        '  File "/usr/lib/python3.12/asyncio/streams.py", line 9, in read',
        "EOFError",
    )
    assert diagnose(["\n".join(other_lines).encode()], SIGNATURES)[0].kind == "none"


def test_an_assertion_is_named_by_its_code_before_any_text() -> None:
    assertion = (*FORWARD, "    assert self.quant_method is not None", "AssertionError")
    for after in ((), ("", "Process Process-1:1:", "and more prose about it")):
        assert (
            diagnose(["\n".join((*assertion, *after)).encode()], SIGNATURES)[0].kind
            == "unsupported_quantization"
        )


@pytest.mark.parametrize("frame", ["_wait_and_warmup", "_execute_server_warmup"])
@pytest.mark.parametrize(
    "error",
    [
        (
            "requests.exceptions.ConnectionError: HTTPConnectionPool(host='0.0.0.0', port=30000):"
            " Max retries exceeded with url: /get_model_info"
        ),
        "AssertionError: res=<Response [403]>, res.text='<h1>403 Forbidden</h1> 401 Client Error'",
        "requests.exceptions.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    ],
)
def test_an_engine_that_did_not_reach_itself_lacks_no_file(frame: str, error: str) -> None:
    lines = (
        "[2026-03-14 10:22:05] INFO:     Application startup complete.",
        (
            "[2026-03-14 10:22:05] Initialization failed. warmup error: Traceback (most recent call"
            " last):"
        ),
        f'  File "/opt/sglang/srt/entrypoints/http_server.py", line 562, in {frame}',
        error,
    )
    failure = diagnose(["\n".join(lines).encode()], SIGNATURES)[0]
    assert failure.kind == "unknown"
    assert "no_proxy" in failure.steps[0]


def test_the_errors_of_an_engines_own_request_are_known_without_their_traceback() -> None:
    error = (
        "requests.exceptions.ConnectionError: HTTPConnectionPool(host='127.0.0.1', port=30000): Max"
        " retries exceeded with url: /health"
    )
    assert diagnose([error.encode()], SIGNATURES)[0].kind == "unknown"
    assert (
        diagnose([error.replace("127.0.0.1", "huggingface.co").encode()], SIGNATURES)[0].kind
        == "download"
    )


def test_the_loops_of_old_engines_end_them_too() -> None:
    line = "[gpu=0] Prefill batch. #new-seq: 1, #new-token: 7"
    trace = (
        "Exception in ModelTpServer:",
        FORWARD[0],
        '  File "/opt/sglang/srt/managers/tp_worker.py", line 9, in {}',
        "RuntimeError: CUDA out of memory",
    )
    for function, kind in (("exposed_step", "gpu_oom"), ("handle", "none")):
        assert (
            diagnose(["\n".join((line, *trace)).format(function).encode()], SIGNATURES)[0].kind
            == kind
        )


@pytest.mark.parametrize("level", ["W", "I"])
def test_output_of_compiled_libraries_is_no_sign_of_life(
    level: str,
) -> None:
    native = (
        f"[rank0]:[{level}307 09:43:03.196837779 ProcessGroupNCCL.cpp:1250] Warning: process group"
        " has NOT been destroyed"
    )
    trace = (
        "[rank0]: " + TRACE,
        '[rank0]:   File "vllm/x.py", line 7, in f',
        "[rank0]: FooError: boom",
    )
    assert verdict_after_service(*trace, native) == ("unknown", trace[-1])
    assert verdict_after_service(*trace, "[rank0]: INFO 03-14 10:22:05 x.py:65] It goes on.") == (
        "none",
        None,
    )


REQUEST = (
    TRACE,
    f'  File "{SITE}/starlette/routing.py", line 7, in app',
    f'  File "{SITE}/transformers/x.py", line 7, in f',
)
START = (
    TRACE,
    f'  File "{SITE}/vllm/entrypoints/openai/serving_chat.py", line 7, in __init__',
    REQUEST[2],
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            "weights_corrupt",
        ),
        ("NotImplementedError: this is not supported", "config_refused"),
    ],
)
def test_an_answer_to_a_request_reads_no_files_of_the_model(error: str, kind: str) -> None:
    assert verdict_after_service(*START, error)[0] == kind
    assert verdict_after_service(*REQUEST, error)[0] == "unknown"


def test_the_wrapper_of_an_error_shows_when_it_was_raised() -> None:
    traceback = (
        V0 + TRACE,
        f'{V0}  File "{SITE}/vllm/worker/model_runner.py", line 7, in execute_model',
    )
    error = f"{V0}NotImplementedError: this is not supported"
    cause = f"{V0}The above exception was the direct cause of the following exception:"
    for frame, kind in (("profile_run", "config_refused"), ("engine_step", "unknown")):
        wrapper = (
            V0 + TRACE,
            f'{V0}  File "{SITE}/vllm/worker/x.py", line 7, in {frame}',
            f"{V0}FooError: boom",
        )
        assert verdict_after_service(*traceback, error, cause, *wrapper)[0] == kind
    assert verdict_after_service(*traceback, error)[0] == "unknown"


def test_a_traceback_may_begin_behind_other_words() -> None:
    text = (
        f"{V0}Exception in worker VllmWorkerProcess while processing method load_model: boom,"
        f" {TRACE}"
    )
    frame = f'{V0}  File "{SITE}/vllm/model_executor/models/x.py", line 7, in load_weights'
    assert verdict_after_service(text, frame, f"{V0}RuntimeError: boom")[0] == "weights_corrupt"
    log = text.replace(
        "boom",
        "The model's max seq len (9) is larger than the maximum number of tokens that can be stored"
        " in KV cache (8)",
    )
    assert verdict_after_service(log, frame)[0] == "kv_too_small"


def test_a_task_whose_exception_nobody_asked_for_names_nothing() -> None:
    ignored_lines = (
        "Task exception was never retrieved",
        "future: <Task finished exception=ZMQError('rocm, cuda and torch.compile failed')>",
    )
    assert (
        verdict_after_service(
            *ignored_lines,
            TRACE,
            '  File "zmq/_future.py", line 7, in poll',
            "zmq.error.ZMQError: boom",
        )[0]
        == "none"
    )


def test_an_error_that_another_program_logs_as_information_is_read_as_an_error() -> None:
    carrier = "2026-03-14 10:22:05,839 - __main__ - INFO - "
    traceback = (
        *FORWARD,
        "    x()",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    )
    assert (
        diagnose(["\n".join(f"{carrier}{line}" for line in traceback).encode()], SIGNATURES)[0].kind
        == "no_kernel_image"
    )
    text = f"{carrier}It goes on."
    assert (
        diagnose(["\n".join(("RuntimeError: boom", text)).encode()], SIGNATURES)[0].kind == "none"
    )


def test_stamps_with_tabs_are_left_out() -> None:
    stamp = "1779264164797\t2026-03-14T10:22:05.797Z\t"
    traceback = (*FORWARD, "    x()", "RuntimeError: CUDA out of memory")
    assert (
        diagnose(["\n\n".join(f"{stamp}{line}" for line in traceback).encode()], SIGNATURES)[0].kind
        == "gpu_oom"
    )


def test_a_thread_that_ends_is_the_failure_where_nothing_else_is() -> None:
    thread = ("Exception in thread Thread-3 (work):", *FORWARD, "RuntimeError: CUDA out of memory")
    line_of_service = "[2026-03-14 10:22:05] Prefill batch. #new-seq: 1, #new-token: 7"
    assert diagnose(["\n".join(thread).encode()], SIGNATURES)[0].kind == "gpu_oom"
    assert diagnose(["\n".join((line_of_service, *thread)).encode()], SIGNATURES)[0].kind == "none"
    assert (
        diagnose(
            ["\n".join((line_of_service, *thread)).replace("forward", "transfer_worker").encode()],
            SIGNATURES,
        )[0].kind
        == "gpu_oom"
    )
    assert (
        diagnose(["\n".join((*thread, "RuntimeError: UVA is not available")).encode()], SIGNATURES)[
            0
        ].kind
        == "platform"
    )
    line = "Exception ignored in: <function f>"
    assert diagnose(["\n".join((line, *thread[1:])).encode()], SIGNATURES)[0].kind == "none"


def test_a_thread_is_the_cause_where_the_engine_ends_next() -> None:
    line_of_service = "[2026-03-14 10:22:05] Prefill batch. #new-seq: 1, #new-token: 7"
    thread = (
        "Exception in thread Thread-3 (work):",
        *FORWARD,
        "RuntimeError: UVA is not available",
    )
    end = "[2026-03-14 10:22:06] Received sigquit from a child process. It usually means the child"
    log = "\n".join((line_of_service, *thread, f"{end} failed."))
    gone_on = "\n".join((line_of_service, *thread, line_of_service, f"{end} failed."))
    assert diagnose([log.encode()], SIGNATURES)[0].kind == "platform"
    assert diagnose([gone_on.encode()], SIGNATURES)[0].kind == "unknown"


def test_an_assertion_of_a_kernel_is_believed_of_an_engine_that_serves() -> None:
    line_of_service = (
        "[2026-03-14 10:22:05 TP2] Decode batch, #running-req: 1, gen throughput (token/s): 21.39"
    )
    for text in (
        "`probability tensor contains either `inf`, `nan` or element < 0`",
        "`srcIndex < srcSelectDimSize`",
    ):
        assertion = (
            "/pytorch/aten/src/ATen/native/cuda/X.cu:112: f: block: [0,0,0], thread: [0,0,0]"
            f" Assertion {text} failed."
        )
        assert (
            diagnose(["\n".join((line_of_service, assertion)).encode()], SIGNATURES)[0].kind
            == "kernel_runtime"
        )


def test_caches_that_are_not_handed_over_are_a_failure_between_engines() -> None:
    line = (
        "[2026-03-14 10:22:05] Prefill transfer failed for request rank=0 with exception"
        " KVTransferError(bootstrap_room=8): Failed to send"
    )
    assert diagnose([line.encode()], SIGNATURES)[0].kind == "nccl"
    death = "RuntimeError: CUDA out of memory"
    assert diagnose(["\n".join((line, *FORWARD, death)).encode()], SIGNATURES)[0].kind == "gpu_oom"


def test_a_port_is_found_to_be_taken_after_the_start() -> None:
    line = (
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8080): address"
        " already in use"
    )
    assert verdict_after_service(
        "INFO:     Application startup complete.", line, "INFO:     Application shutdown complete."
    ) == ("port_in_use", line)


@pytest.mark.parametrize(
    "line",
    [
        (
            "ERROR 03-14 10:22:05 [backend_xgrammar.py:167] Failed to advance FSM for request"
            " chatcmpl-8f2e for tokens 271. Please file an issue."
        ),
        "scheduler.py: Unexpected: grammar rejected tokens [4754]. Terminating request.",
        (
            'vllm-0 proxy E1027 22:25:32.427556 1 proxy.go:268] "waiting for vLLM to be ready"'
            ' err="dial tcp [::1]:8200: connect: connection refused"'
        ),
        (
            'Warning  Unhealthy  Readiness probe failed: Get "http://10.0.0.1:8000/health": dial'
            " tcp 10.0.0.1:8000: connect: connection refused"
        ),
    ],
)
def test_a_fault_of_a_request_or_of_a_waiting_program_is_no_failure_of_the_engine(
    line: str,
) -> None:
    assert diagnose([line.encode()], SIGNATURES)[0].kind == "none"


def test_a_worker_that_says_that_others_may_wait_for_it_says_no_more() -> None:
    line = (
        "ERROR 03-14 10:22:05 [worker_base.py:619] Error executing method 'init_device'. This might"
        " cause deadlock in distributed execution."
    )
    assert diagnose([line.encode()], SIGNATURES)[0].kind == "unknown"
    trace = (
        f'{TRACE}\n  File "{SITE}/x.py", line 7, in f\nRuntimeError: CUDA error: an illegal memory'
        " access was encountered"
    )
    assert diagnose([f"{line}\n{trace}".encode()], SIGNATURES)[0].kind == "kernel_runtime"


def test_a_wait_between_processes_is_told_where_nothing_else_is() -> None:
    """vLLM prints it as information while it loads, too: only a user that pastes it alone means
    it."""
    line = (
        "No available shared memory broadcast block found in 60 seconds. This typically happens"
        " when some processes are hanging"
    )
    assert diagnose([line.encode()], SIGNATURES)[0].kind == "hang"
    assert (
        diagnose([f"INFO 03-14 10:22:05 [shm_broadcast.py:548] {line}".encode()], SIGNATURES)[
            0
        ].kind
        == "none"
    )
    assert (
        diagnose([f"{line}\nRuntimeError: CUDA out of memory".encode()], SIGNATURES)[0].kind
        == "gpu_oom"
    )


def test_an_error_answered_to_a_client_is_no_failure_of_the_engine() -> None:
    error = "{'object': 'error', 'message': 'The model `m-GPTQ-Int8` does not exist.', 'code': 404}"
    assert (
        verdict_after_service(error)[0]
        == verdict_after_service(f"openai.BadRequestError: Error code: 400 - {error}")[0]
        == "none"
    )


def test_no_word_of_prose_beside_an_error_counts() -> None:
    prose = (
        "I tried two models, org/m-AWQ and org/m-GPTQ, and it does not work with either, also not"
        " quantized by bitsandbytes."
    )
    assert verdict_after_service(prose)[0] == "unsupported_quantization"
    assert verdict_after_service(prose, "FooError: boom")[0] == "unknown"


@pytest.mark.parametrize("api", ["CUDA", "HIP"])
def test_amd_words_its_errors_as_nvidia_does(api: str) -> None:
    for error, kind in (
        ("invalid device ordinal", "no_device"),
        ("invalid device function", "no_kernel_image"),
        ("out of memory", "gpu_oom"),
    ):
        assert verdict_after_service(f"RuntimeError: {api} error: {error}")[0] == kind


def test_memory_of_the_host_that_ray_ran_out_of_is_no_gpus() -> None:
    assert (
        verdict_after_service(
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on"
            " memory."
        )[0]
        == "host_oom"
    )


@pytest.mark.parametrize(
    ("sentence", "kind"),
    [
        (
            (
                "With speculative decoding of my AWQ model I get **ValueError: not enough values to"
                " unpack (expected 3, got 2)**"
            ),
            "engine_bug",
        ),
        (
            (
                "With speculative decoding I get `RuntimeError: could not broadcast input array"
                " from shape (513,)`"
            ),
            "kernel_runtime",
        ),
        ("With rope_scaling in config.json I get `KeyError: 'type'`", "config_refused"),
    ],
)
def test_a_quote_wins_over_the_sentence_around_it(sentence: str, kind: str) -> None:
    assert verdict_after_service(sentence)[0] == kind
