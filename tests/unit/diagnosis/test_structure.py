"""Diagnosis by structure: facts of failures in the form of engines, and facts from them."""

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.signature import StructuralSignature
from gateway.diagnosis.structure import ExceptionShape, Structure
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles
from tests.support.engine_logs import log_of_row
from tests.support.paths import LOGS
from tests.support.reports import OWN, judge, score
from tests.support.yaml_file import read_yaml

SIGNATURES = Profiles().signatures
FACTS = read_yaml(LOGS / "failures.yaml")
TRACED = "Traceback (most recent call last):"
SITE = "/opt/venv/lib/python3.12/site-packages"


def read(*lines: str) -> Failure:
    return diagnose(["\n".join(lines).encode()], SIGNATURES)[0]


def failure_with_frame(frame: str, function: str, error: str) -> Failure:
    """A failure of which only the frame and the exception are known."""
    return read(
        "Traceback (most recent call last):",
        f'  File "{SITE}/{frame}", line 7, in {function}',
        error,
    )


@pytest.mark.parametrize(
    ("split", "reports", "measured"),
    [
        ("fourteenth", 108, 102),
        ("fifteenth", 89, 84),
        ("sixteenth", 112, 105),
        ("seventeenth", 97, 84),
        ("eighteenth", 83, 81),
    ],
)
def test_no_fewer_late_reports_are_named_than_were_measured(
    split: str, reports: int, measured: int
) -> None:
    rows = score(OWN, SIGNATURES, split)
    assert len(rows) == reports
    assert sum(column == "right" for _, _, column in rows) >= measured, [
        (case["file"], failure) for case, failure, column in rows if column != "right"
    ]
    assert all(column == "right" for case, _, column in rows if case["kinds"] == ["none"])


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("managers/cache.py", "engine_bug"),
        ("layers/attention/x_backend.py", "kernel_runtime"),
        ("models/x.py", "no_backend"),
    ],
)
def test_an_assertion_of_a_scheduler_that_serves_is_of_no_field(file: str, kind: str) -> None:
    failure = read(
        "Scheduler hit an exception: Traceback (most recent call last):",
        f'  File "{SITE}/sglang/srt/managers/scheduler.py", line 9, in event_loop_overlap',
        "    self.step()",
        f'  File "{SITE}/sglang/srt/{file}", line 7, in free',
        "    assert len(indices) % self.page_size == 0",
        "AssertionError",
    )
    assert failure.kind == kind


@pytest.mark.parametrize(
    ("function", "file", "kind"),
    [
        ("forward", "layers/moe/topk.py", "kernel_runtime"),
        ("__init__", "layers/moe/topk.py", "unsupported_architecture"),
        ("forward", "models/y.py", "unsupported_architecture"),
        ("forward", "utils.py", "unknown"),
    ],
)
def test_a_model_that_computes_has_been_built(function: str, file: str, kind: str) -> None:
    failure = read(
        "Scheduler hit an exception: Traceback (most recent call last):",
        f'  File "{SITE}/sglang/srt/models/x.py", line 9, in {function}',
        "    y()",
        f'  File "{SITE}/sglang/srt/{file}", line 7, in select',
        "ValueError: boom",
    )
    assert failure.kind == kind


@pytest.mark.parametrize(
    ("phase_line", "error", "kind"),
    [
        (
            "Load weight begin. avail mem=78.50 GB",
            "The size of tensor a (4) must match the size of tensor b (8)",
            "weights_corrupt",
        ),
        ("", "The size of tensor a (4) must match the size of tensor b (8)", "kernel_runtime"),
        ("", "size mismatch for lm_head.weight: copying a param with shape", "weights_corrupt"),
    ],
)
def test_shapes_are_those_of_weights_where_weights_are_read(
    phase_line: str, error: str, kind: str
) -> None:
    assert read(phase_line, f"RuntimeError: {error}").kind == kind


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact['kind']}: {fact['raises'][:60]}")
def test_a_failure_is_named_by_its_facts(fact: dict[str, Any]) -> None:
    assert diagnose([log_of_row(fact)], SIGNATURES, fact["engine"])[0].kind == fact["kind"]


@pytest.mark.parametrize("file", ["arg_groups/serving_hook.py", "server_args.py"])
def test_settings_of_serving_are_read_before_it(file: str) -> None:
    failure = read(
        TRACED,
        f'  File "{SITE}/sglang/srt/server_args.py", line 9, in __post_init__',
        f'  File "{SITE}/sglang/srt/{file}", line 7, in check',
        "ValueError: boom",
    )
    assert failure.kind == "config_refused"


def test_a_report_is_judged_by_the_kinds_that_are_right() -> None:
    case = {"kinds": ["nccl"], "gap": "toolchain"}
    assert [judge(kind, case) for kind in ("nccl", "toolchain", "shm", "unknown", "none")] == [
        "right",
        "right",
        "wrong",
        "unknown",
        "not told",
    ]


@pytest.mark.parametrize(
    ("frame", "function", "error", "kind"),
    [
        ("flashinfer/jit/core.py", "build", "RuntimeError: boom", "toolchain"),
        ("vllm/lora/worker_manager.py", "_load_adapter", "RuntimeError: boom", "lora"),
        ("vllm/multimodal/processing.py", "apply", "ValueError: boom", "multimodal"),
        ("vllm/transformers_utils/tokenizer.py", "get_tokenizer", "ValueError: boom", "tokenizer"),
        (
            "vllm/model_executor/models/llama.py",
            "load_weights",
            "AssertionError",
            "weights_corrupt",
        ),
        ("vllm/distributed/parallel_state.py", "all_reduce", "RuntimeError: boom", "nccl"),
        (
            "vllm/distributed/utils.py",
            "ensure_divisibility",
            "AssertionError: boom",
            "illegal_parallelism",
        ),
        ("torch/_ops.py", "__call__", "RuntimeError: boom", "kernel_runtime"),
        (
            "torch/_inductor/graph.py",
            "codegen",
            "torch._inductor.exc.InductorError: boom",
            "kernel_runtime",
        ),
        ("sglang/srt/server_args.py", "__post_init__", "AssertionError: boom", "config_refused"),
        ("sglang/srt/speculative/eagle_worker.py", "__init__", "AssertionError", "config_refused"),
        ("sglang/srt/managers/scheduler.py", "__init__", "RuntimeError: boom", "unknown"),
        (
            "vllm/model_executor/models/phi3v.py",
            "forward",
            "TypeError: only integer tensors can be an index",
            "engine_bug",
        ),
        (
            "vllm/model_executor/models/phi3v.py",
            "__init__",
            "TypeError: boom",
            "unsupported_architecture",
        ),
        (
            "vllm/model_executor/models/x.py",
            "f",
            "ValueError: Attempted to assign 776 image tokens to 826 placeholders",
            "multimodal",
        ),
        (
            "vllm/x.py",
            "f",
            "FileNotFoundError: [Errno 2] No such file or directory: 'org/m/adapter_config.json'",
            "lora",
        ),
        (
            "vllm/x.py",
            "f",
            "FileNotFoundError: [Errno 2] No such file or directory: 'org/m/model.safetensors'",
            "weights_missing",
        ),
        (
            "vllm/x.py",
            "f",
            "TypeError: argument 'tokens': 'NoneType' object cannot be converted to 'PyString'",
            "engine_bug",
        ),
        (
            "vllm/entrypoints/openai/protocol.py",
            "check",
            "AttributeError: 'bytes' object has no attribute 'get'",
            "engine_bug",
        ),
        (
            "huggingface_hub/hf_api.py",
            "__init__",
            "TypeError: X() got an unexpected keyword argument 'y'",
            "package",
        ),
        ("huggingface_hub/hf_api.py", "model_info", "OSError: boom", "weights_missing"),
        (
            "vllm/v1/core/kv_cache_utils.py",
            "unify_hybrid_kv_cache_specs",
            "ValueError: boom",
            "config_refused",
        ),
        (
            "vllm/distributed/kv_transfer/kv_connector/factory.py",
            "create_connector_v0",
            "AssertionError",
            "config_refused",
        ),
        (
            "vllm/distributed/device_communicators/shm_broadcast.py",
            "acquire_read",
            "TimeoutError",
            "hang",
        ),
        # Figures of the engine for requests: words of a field in them (an image's placeholders, a
        # page's size) are not a cause.
        (
            "vllm/v1/core/kv_cache_utils.py",
            "popleft",
            "ValueError: no free blocks, block size 16",
            "engine_bug",
        ),
        (
            "vllm/v1/core/sched/async_scheduler.py",
            "_update_request_with_output",
            "AssertionError: image placeholders",
            "engine_bug",
        ),
        (
            "vllm/v1/worker/gpu_model_runner.py",
            "_bookkeeping_sync",
            "AssertionError: exceed the max model length",
            "engine_bug",
        ),
        ("vllm/v1/spec_decode/eagle.py", "propose", "AssertionError", "engine_bug"),
        ("torch/nn/functional.py", "conv2d", "RuntimeError: boom", "kernel_runtime"),
        ("torch/nn/modules/module.py", "__getattr__", "RuntimeError: boom", "unknown"),
        ("triton/runtime/cache.py", "get_file", "FileNotFoundError: boom", "toolchain"),
        (
            "triton/backends/nvidia/compiler.py",
            "make_llir",
            "RuntimeError: PassManager::run failed",
            "kernel_runtime",
        ),
        (
            "vllm/platforms/interface.py",
            "get_device_capability",
            "NotImplementedError",
            "no_device",
        ),
        (
            "pynvml.py",
            "nvmlDeviceGetName",
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xf8",
            "platform",
        ),
        (
            "transformers/configuration_utils.py",
            "_dict_from_json_file",
            "UnicodeDecodeError: 'utf-8' codec",
            "weights_corrupt",
        ),
        (
            "vllm/attention/backends/flashinfer.py",
            "begin_forward",
            "TypeError: 'NoneType' object is not callable",
            "package",
        ),
        (
            "vllm/distributed/parallel_state.py",
            "__init__",
            "ZeroDivisionError: division by zero",
            "engine_bug",
        ),
        (
            "vllm/executor/ray_utils.py",
            "run",
            "AttributeError: 'SpecDecodeWorker' object has no attribute 'x'",
            "engine_bug",
        ),
        (
            "vllm/model_executor/models/x.py",
            "f",
            "UnboundLocalError: cannot access local variable 'x'",
            "engine_bug",
        ),
        (
            "setuptools/command.py",
            "copy_file",
            "distutils.errors.DistutilsFileError: can't copy 'x'",
            "unknown",
        ),
        (
            "torch/_ops.py",
            "__call__",
            "RuntimeError: prob_m = 1216 is not divisible by thread_m = 512",
            "no_kernel",
        ),
        ("PIL/Image.py", "new", "TypeError: color must be int", "multimodal"),
        (
            "sglang/srt/models/llava.py",
            "pad_input_ids",
            "ValueError: 32000 is not in list",
            "multimodal",
        ),
        (
            "sglang/srt/layers/attention/vision.py",
            "_determine_attention_backend",
            "ValueError: The 'frob' backend is not supported on Frob GPUs",
            "no_backend",
        ),
        (
            "transformers/configuration_utils.py",
            "__init_subclass__",
            "TypeError: non-default argument 'x' follows default argument 'y'",
            "package",
        ),
        # Wherever it is said that a package is to be installed.
        (
            "vllm/v1/attention/ops/x.py",
            "f",
            "RuntimeError: FrobDSL sibling kernel failed to import",
            "package",
        ),
        (
            "sglang/srt/layers/moe/x.py",
            "f",
            "RuntimeError: frob runner backend requires frobinfer to be installed.",
            "package",
        ),
        (
            "vllm/distributed/x.py",
            "f",
            "RuntimeError: Frob is not available. Please install the `frob` package.",
            "package",
        ),
        (
            "vllm/attention/x.py",
            "f",
            "RuntimeError: The installed frob-infer lacks frob",
            "package",
        ),
        (
            "vllm/attention/x.py",
            "f",
            "RuntimeError: the weights of the installed model are odd",
            "kernel_runtime",
        ),
        (
            "sglang/srt/mem_cache/x.py",
            "f",
            "ValueError: Not enough host memory for the frob pool",
            "host_oom",
        ),
        (
            "sglang/srt/utils/network.py",
            "f",
            "OSError: Could not bind port 7 on any address",
            "port_in_use",
        ),
        (
            "vllm/v1/engine/utils.py",
            "f",
            "ValueError: Not enough resources to allocate 4 DP ranks",
            "illegal_parallelism",
        ),
        (
            "vllm/attention/backends/abstract.py",
            "get_state_cls",
            "NotImplementedError",
            "no_backend",
        ),
        (
            "sglang/srt/layers/attention/vision.py",
            "__init__",
            "Exception: FrobAttention is only available for cuda",
            "no_backend",
        ),
        (
            "vllm/v1/attention/backends/x.py",
            "forward",
            "AssertionError: frob requires gfx950 (CDNA4), got gfx942",
            "no_backend",
        ),
        (
            "sglang/srt/models/x.py",
            "load_weights",
            "RuntimeError: Assertion error (/x/csrc/apis/layout.hpp:63): frob",
            "kernel_runtime",
        ),
        (
            "sglang/srt/model_loader/weight_utils.py",
            "pt_weights_iterator",
            'RuntimeError: x INTERNAL ASSERT FAILED at "a.cpp":7, frob',
            "kernel_runtime",
        ),
        (
            "vllm/multimodal/x.py",
            "f",
            "RuntimeError: Expected 1 prompt updates, but found 0: see the chat template",
            "multimodal",
        ),
        ("vllm/v1/engine/x.py", "f", "ValueError: Token id 7 is out of vocabulary", "tokenizer"),
        ("sglang/srt/utils.py", "get_nvgpu_memory_capacity", "ValueError: frob", "no_device"),
        (
            "transformers/configuration_utils.py",
            "__getattribute__",
            "AttributeError: 'FrobConfig' object has no attribute 'pad_token_id'",
            "unsupported_architecture",
        ),
        (
            "vllm/entrypoints/x.py",
            "f",
            "KeyError: 'invalid tool call parser: frob (chose from { a,b })'",
            "bad_flag",
        ),
        (
            "sglang/srt/layers/quantization/x.py",
            "f",
            "ValueError: Frob is not installed. Please install it.",
            "package",
        ),
        (
            "vllm/model_executor/models/x.py",
            "__init__",
            "AssertionError: Frob does not support pipeline parallel",
            "illegal_parallelism",
        ),
        (
            "vllm/model_executor/models/x.py",
            "get_placeholder_str",
            "ValueError: Only image modality is there",
            "multimodal",
        ),
        (
            "vllm/model_executor/models/x.py",
            "__init__",
            "ValueError: Only image modality is there",
            "unsupported_architecture",
        ),
        ("nixl/_api.py", "register_memory", "KeyError: 'FROB'", "package"),
        ("nixl/_api.py", "register_memory", "RuntimeError: frob", "nccl"),
    ],
)
def test_frames_decide_a_text_that_nobody_knows(
    frame: str, function: str, error: str, kind: str
) -> None:
    failure = failure_with_frame(frame, function, error)
    assert (failure.kind, failure.proven_subject) == (kind, "plan")


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (
            "RuntimeError: BLOCK_SIZE_K // group_size must be one of [1, 2, 4, 8]",
            "Use vLLM 0.33 or newer",
        ),
        (
            "AssertionError: the last dimension of `x` 2112 must be divisible by `group_size` 128",
            "Use a tensor parallel size with which each rank has a multiple of 128 inputs.",
        ),
    ],
)
def test_known_failures_of_0_26_are_named_with_their_cure(error: str, step: str) -> None:
    failure = failure_with_frame(
        "vllm/model_executor/layers/fused_moe/fused_moe.py",
        "invoke_fused_moe_wna16_cuda_kernel",
        error,
    )
    assert failure.kind == "kernel_runtime"
    assert failure.steps[0].startswith(step)


def test_structure_teaches_no_more_than_that_the_plan_failed() -> None:
    assert {row.proves for row in SIGNATURES.rows.structures} == {"plan"}
    with pytest.raises(ValidationError):
        StructuralSignature.model_validate({"kind": "x", "proves": "engine"})


def test_all_conditions_of_a_row_must_hold() -> None:
    row = StructuralSignature(
        kind="x",
        exception="KeyError",
        frames="/a/",
        phases=("load",),
        pattern="b",
        engines=("vllm",),
    )
    shape = ExceptionShape("KeyError", "b", ("/a/x.py:f",), "load")
    structure = Structure((row,))
    assert structure.match(shape, "vllm") is not None
    assert structure.match(shape, None) is not None
    for other_text in (
        shape._replace(exception="ValueError"),
        shape._replace(message="c"),
        shape._replace(frames=()),
        shape._replace(phase="kv"),
        shape._replace(frames=("/a/x.py:f", *("/z/x.py:f",) * 20)),
    ):
        assert structure.match(other_text, "vllm") is None
    assert structure.match(shape, "sglang") is None


def test_a_bare_exception_without_a_sign_of_survival_is_a_failure() -> None:
    assert read("RuntimeError: boom").kind == "unknown"
    assert read("ValueError: boom", "INFO 11-22 03:04:05 [core.py:9] It goes on.").kind == "none"


def test_a_traceback_that_is_cut_off_tells_by_its_frames() -> None:
    failure = read(
        "Traceback (most recent call last):",
        f'  File "{SITE}/flashinfer/jit/core.py", line 7, in build',
        "    raise Ru",
    )
    assert failure.kind == "toolchain"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_line_that_a_terminal_breaks_is_read_as_one(columns: int) -> None:
    whole = (
        "(EngineCore_DP0 pid=1094) ERROR 11-22 03:04:05 [core.py:1094] ValueError: To serve at"
        " least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed,"
        " which is larger than the available KV cache memory (3.18 GiB). Based on the available"
        " memory, the estimated maximum model length is 34736."
    )
    failure = read(*(whole[start : start + columns] for start in range(0, len(whole), columns)))
    assert (failure.kind, failure.culprit["engine_max_model_len"]) == ("kv_too_small", 34736)


@pytest.mark.parametrize(
    "before",
    [
        "> ",
        "> > ",
        "vllm-1  | ",
        "[llm]        | ",
        "[VLLM LOG] ",
        "Nov 22 03:04:05 host vllm[123]: ",
        "2026-11-22T03:04:05+0100 host vllm[123]: ",
        "2026-11-22T03:04:05.123456789Z stdout F ",
        "[pod/vllm-0/vllm] ",
        "ERROR 11-22 03:04:05 [engine.py:448] ",
        "ERROR 11-22 03:04:05 engine.py:448] ",
        "(EngineCore_DP0 pid=123) ERROR 11-22 03:04:05 [core.py:9] ",
        "(Worker_TP0 pid=123) ",
        "[rank0]: ",
        "[2026-11-22 03:04:05 TP0] ",
        "2026-11-22 03:04:05 | ERROR | sglang.srt.x | ",
        "2026-11-22 03:04:05,123 - ERROR - x.py:9 - ",
        "\x1b[36m(WorkerDict pid=9)\x1b[0m ",
        "```",
        "**",
        "[2026-03-14T10:22:05.486750Z] [rank3]:",
        "[2026-03-14T10:22:05Z] ERROR:    ",
        "2026-03-14 10:22:05,930 - INFO - vLLM: ERROR 03-14 10:22:05 engine.py:53] ",
    ],
)
def test_the_carrier_of_a_line_is_left_out(before: str) -> None:
    failure = read(f"{before}RuntimeError: UVA is not available")
    assert failure.kind == "platform"
    assert (
        read(f"{before}KeyError: &#x27;layers.0.mlp.down_proj.weight&#x27;").kind
        == "weights_corrupt"
    )


def test_a_traceback_that_is_indented_as_a_whole_has_its_exception() -> None:
    failure = read(
        "2026-03-14 10:22:05 1 uvicorn.error ERROR:    Traceback (most recent call last):",
        '    File "/kserve/model_server.py", line 297, in _serve',
        "      await asyncio.gather(*self.servers)",
        "  TypeError: OpenAIServingChat.__init__() got an unexpected keyword argument"
        " 'enable_reasoning'",
    )
    assert (failure.kind, failure.culprit["exception"]) == ("package", "TypeError")


CUT = (
    'ers/integrations/hub_kernels.py", line 89, in <module>',
    f'  File "{SITE}/vllm/model_executor/models/llama.py", line 302, in __init__',
    "**TypeError: LlamaModel.<lambda>() got an unexpected keyword argument 'idx'**",
)
KILLED = "[1]    40574 killed     python -m sglang.launch_server"


def test_a_raised_error_goes_before_the_death_that_followed() -> None:
    assert read(*CUT, KILLED).kind == "package"
    assert read(KILLED, *CUT).kind == "killed"
    assert (
        read(CUT[2].replace("TypeError", "FooError").replace("unexpected", "odd"), KILLED).kind
        == "killed"
    )


def test_a_quote_that_begins_in_the_middle_of_a_frame_has_its_frames() -> None:
    assert (
        read(
            CUT[0].replace("ers/", "transformers/"),
            'kernels/layer.py", line 76, in __init__',
            "ValueError: boom",
        ).kind
        == "package"
    )


@pytest.mark.parametrize(
    "line",
    [
        (
            "[2026-03-14 10:22:05 TP0] max_total_tokens=131072 is larger than the profiled value"
            " 56198. Use the profiled value instead."
        ),
        (
            "[W514 08:15:22.118264501 socket.cpp:460] [c10d] waitForInput: poll for socket"
            " SocketImpl(fd=100) returned 0, likely a timeout"
        ),
        "INFO 11-22 03:04:05 [x.py:9] layers.0.mlp.down_proj.weight",
        (
            "ERROR 03-14 10:22:05 worker_base.py:467] Error executing method init_device. This"
            " might cause deadlock in distributed execution."
        ),
    ],
)
def test_lookalikes_of_failures_of_0_26_are_no_failures(line: str) -> None:
    assert read(line).kind == "none"


def test_a_log_that_tells_only_of_a_death_says_that_the_cause_is_not_in_it() -> None:
    failure = read(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core"
        " proc(s): {}"
    )
    assert failure.kind == "unknown"
    assert "further up" in failure.message
    assert "\n" not in "".join(failure.steps)


def test_an_error_while_a_layer_is_built_or_looked_for_is_named_by_its_message() -> None:
    layer = "vllm/model_executor/layers/fused_moe/layer.py"
    quote = [
        f'> File "{SITE}/{layer}", line 372, in __init__',
        ">     assert self.quant_method is not None",
        "> AssertionError",
    ]
    assert read(*quote).kind == "unsupported_quantization"
    assert failure_with_frame(layer, "forward", "AssertionError").kind == "kernel_runtime"
    file = "vllm/config/vllm.py"
    assert (
        failure_with_frame(
            file, "get_layers_from_vllm_config", "KeyError: 'model.layers.20.self_attn.attn'"
        ).kind
        == "engine_bug"
    )
    assert read("KeyError: 'model.layers.20.mlp.experts.w2_weight'").kind == "weights_corrupt"


def test_a_broken_message_between_processes_is_no_weight_file() -> None:
    error = "_pickle.UnpicklingError: invalid load key, '\\x11'."
    assert failure_with_frame("zmq/_future.py", "_chain", error).kind == "unknown"
    assert (
        failure_with_frame("torch/serialization.py", "_legacy_load", error).kind
        == "weights_corrupt"
    )
    assert (
        read(
            "ERROR serialization.py:462 -- Can't deserialize object: ObjectRef(00ff), metadata:"
            " b'7'"
        ).kind
        != "weights_corrupt"
    )


def test_an_operator_that_a_build_lacks_is_a_package() -> None:
    missing = (
        "NotImplementedError: Could not run '_C_cache_ops::reshape_and_cache' with arguments from"
        " the 'CPU' backend."
    )
    failure = failure_with_frame("torch/_ops.py", "__call__", missing)
    assert (failure.kind, failure.message) == (
        "package",
        (
            "The installed engine has no _C_cache_ops::reshape_and_cache for CPU: it was built"
            " for another platform."
        ),
    )


def test_a_fault_in_the_input_of_a_request_is_named_by_the_function_that_takes_it() -> None:
    model = "vllm/model_executor/models/llava_onevision.py"
    error = "AttributeError: 'list' object has no attribute 'shape'"
    assert failure_with_frame(model, "_process_video_pixels", error).kind == "multimodal"
    assert failure_with_frame(model, "__init__", error).kind != "multimodal"


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("scale_fmt", "unsupported_quantization"),
        ("w2_weight", "weights_corrupt"),
        ("layers.1.weight_scale", "weights_corrupt"),
    ],
)
def test_a_key_of_the_quantization_is_no_name_of_a_weight(key: str, kind: str) -> None:
    assert read(f"KeyError: '{key}'").kind == kind
