"""Variables of engines: open ones have values that cannot do harm, and closed ones say why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import variables
from gateway.domain import Engine
from gateway.errors import BadFlag
from gateway.profiles.profiles import Profiles
from gateway.variables import CLOSED_VARIABLES, NO_PROXY, PROXIES, check, engine_env, refusal
from tests.support.makers import engine
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
VLLM, SGLANG = PROFILES.engine(VLLM_REF), PROFILES.engine(SGLANG_REF)
SMALL = engine()

OPEN = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
    "NCCL_IB_ADDR_FAMILY": "AF_INET",
    "NCCL_SOCKET_IFNAME": "^docker0,lo",
    "NVSHMEM_SYMMETRIC_SIZE": "1G",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_CUDA_ARCH_LIST": "9.0a 10.0+PTX;12.0",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "0",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "TRITON_INTERPRET": "0",
    "OMP_NUM_THREADS": "8",
    "OMP_PLACES": "{0:4}",
    "PYTORCH_CUDA_ALLOC_CONF": "backend:native,expandable_segments:True",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_LAUNCH_BLOCKING": "1",
    "HF_HUB_DISABLE_XET": "1",
    "CC": "gcc-12",
    "CXX": "/usr/bin/x86_64-linux-gnu-g++-13",
    "CUDA_HOME": "/usr/local/cuda-13.0",
    "HTTPS_PROXY": "http://proxy.example.com:3128",
    "http_proxy": "socks5h://[fd00::1]:1080",
    "NO_PROXY": "10.0.0.0/8,.example.com",
}
DANGEROUS = [
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LD_AUDIT",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "PYTHONINSPECT",
    "VLLM_PLUGINS",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_CACHE_ROOT",
    "VLLM_RPC_BASE_PATH",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    "NCCL_ENV_PLUGIN",
    "NCCL_TOPO_FILE",
    "NCCL_CONF_FILE",
    "NCCL_DEBUG_FILE",
    "NCCL_COMM_ID",
    "NCCL_RAS_ADDR",
    "NVSHMEM_BOOTSTRAP_PLUGIN",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_HOME",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_REDIS_URL",
    "TORCHINDUCTOR_REDIS_HOST",
    "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_CUBIN_DIR",
    "FLASHINFER_CUBINS_REPOSITORY",
    "FLASHINFER_NVCC",
    "FLASHINFER_EXTRA_CFLAGS",
    "FLASHINFER_CXX_LAUNCHER",
    "FLASHINFER_CUBIN_CHECKSUM_DISABLED",
    "TRITON_CACHE_MANAGER",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "TRITON_REMOTE_CACHE_BACKEND",
    "TRITON_KERNEL_OVERRIDE",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "CFLAGS",
    "CPATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_INJECTION64_PATH",
    "HOME",
    "PATH",
    "HF_TOKEN",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_TOOL_LIBRARIES",
    "DG_JIT_CACHE_DIR",
    "DG_JIT_NVCC_COMPILER",
    "GLIBC_TUNABLES",
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "AWS_SECRET_ACCESS_KEY",
    "SGLANG_EXPOSE_OWN_ENV_VARS",
    "SGLANG_USE_PICKLE_IPC",
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES",
    "SGLANG_PORT",
    "IFS",
    "nccl_debug",
    "VLLM_API_KEY",
]


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize(
    "engine_", [VLLM, SGLANG, SMALL, None], ids=["vllm", "sglang", "small", "none"]
)
def test_variables_that_operators_need_are_open(name: str, engine_: Engine | None) -> None:
    check(engine_, name, OPEN[name])


@pytest.mark.parametrize("ref", sorted(PROFILES.engine_files))
def test_dangerous_variables_are_closed_on_every_engine(ref: str) -> None:
    on = PROFILES.engine(ref)
    assert [name for name in DANGEROUS if refusal(on, name, "1") is None] == []
    assert [name for name in DANGEROUS if refusal(None, name, "1") is None] == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LD_PRELOAD", "loads code"),
        ("VLLM_PLUGINS", "loads code"),
        ("VLLM_SERVER_DEV_MODE", "opens a port or endpoints"),
        ("HF_TOKEN", "holds a secret"),
        ("TRITON_CACHE_DIR", "the gateway sets it"),
        ("CUDA_VISIBLE_DEVICES", "the gateway sets it"),
        ("NCCL_TOPO_FILE", "names a file"),
        ("NVCC_APPEND_FLAGS", "what a compiler runs"),
        ("SGLANG_USE_PICKLE_IPC", "opens SGLang"),
    ],
)
def test_a_refusal_says_why(name: str, reason: str) -> None:
    for on in (VLLM, SGLANG, None):
        with pytest.raises(BadFlag, match=reason):
            check(on, name, "1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "INFO\nLD_PRELOAD=x"),
        ("NCCL_DEBUG", "a\0b"),
        ("NCCL_NET", "/tmp/evil"),
        ("NCCL_NET", "x" * 3000),
        ("NCCL_DEBUG", "$(id)"),
        ("CC", "/tmp/gcc"),
        ("CC", "gcc; id"),
        ("CXX", "/opt/../tmp/bin/g++"),
        ("CXX", "g++ -B/tmp"),
        ("CUDA_HOME", "/models/cuda"),
        ("CUDA_HOME", "/usr/../models/cuda"),
        ("CUDA_HOME", "cuda"),
        ("TORCH_CUDA_ARCH_LIST", "9.0;$(id)"),
        ("HF_HUB_DISABLE_XET", "https://x"),
        ("HTTP_PROXY", "file:///etc/passwd"),
        ("NO_PROXY", "a;b"),
        ("SGLANG_USE_DEEPGEMM_BMM", "x.py"),
        ("SGLANG_PP_LAYER_PARTITION", "a,b"),
        ("SGLANG_PP_LAYER_PARTITION", "64"),
    ],
)
def test_values_do_no_more_than_choose(name: str, value: str) -> None:
    for on in (SGLANG, None):
        with pytest.raises(BadFlag):
            check(on, name, value)


def test_no_refusal_repeats_a_value() -> None:
    """It may be a secret."""
    for name in (*DANGEROUS, *OPEN, "HTTP_PROXY", "NONSENSE", "MY_PASSWORD"):
        for value in ("http://me:hunter2@proxy:1", "hunter2 /x"):
            reason = refusal(VLLM, name, value)
            assert reason is None or "hunter2" not in " ".join(reason)


def test_a_proxy_with_a_password_is_refused_and_says_why() -> None:
    with pytest.raises(BadFlag, match="has a password"):
        check(VLLM, "HTTPS_PROXY", "http://me:hunter2@proxy:3128")


def test_an_engine_asks_itself_past_the_proxy() -> None:
    proxy = {"HTTP_PROXY": "http://proxy:1"}
    assert engine_env(SGLANG, proxy, {}) == {**proxy, "NO_PROXY": "localhost,127.0.0.1,::1"}
    assert (
        engine_env(SGLANG, {}, {**proxy, "no_proxy": ".corp, 127.0.0.1"})["no_proxy"]
        == ".corp,127.0.0.1,localhost,::1"
    )
    assert engine_env(SGLANG, {"NO_PROXY": ".corp"}, {}) == {"NO_PROXY": ".corp"}


def test_variables_of_a_model_win_over_those_of_all_engines() -> None:
    variables = {
        "NCCL_DEBUG": "WARN",
        "VLLM_USE_DEEP_GEMM": "0",
        "SGLANG_MOE_PADDING": "1",
        "VLLM_NO_SUCH_VARIABLE": "1",
    }
    assert engine_env(VLLM, {"NCCL_DEBUG": "INFO"}, variables) == {
        "NCCL_DEBUG": "INFO",
        "VLLM_USE_DEEP_GEMM": "0",
    }
    assert engine_env(SGLANG, {}, variables) == {"NCCL_DEBUG": "WARN", "SGLANG_MOE_PADDING": "1"}
    with pytest.raises(BadFlag):
        engine_env(SGLANG, {"VLLM_USE_DEEP_GEMM": "0"}, {})


def test_a_variable_that_the_profile_sets_is_not_the_users() -> None:
    with pytest.raises(BadFlag, match="the gateway sets it"):
        check(engine(env={"NCCL_IB_DISABLE": "1"}), "NCCL_IB_DISABLE", "0")


def test_the_nearest_name_is_proposed() -> None:
    with pytest.raises(BadFlag, match="did you mean VLLM_USE_DEEP_GEMM"):
        check(VLLM, "VLLM_USE_DEEPGEMM", "1")


@given(
    st.sampled_from(
        sorted(
            name for names in CLOSED_VARIABLES.values() for name in names.split() if "*" not in name
        )
    ),
    st.text(max_size=9),
)
def test_a_closed_name_is_closed_with_any_value(name: str, value: str) -> None:
    assert refusal(SMALL, name, value) is not None or name in variables._OPEN_VARIABLES


@given(st.text(max_size=20), st.text(max_size=40))
def test_any_variable_is_refused_in_plain_words_or_plain(name: str, value: str) -> None:
    reason = refusal(SMALL, name, value)
    if reason is None:
        assert name.isidentifier()
        assert value.isprintable()
        assert "/" not in value or name in (
            *PROXIES,
            *NO_PROXY,
            "CC",
            "CXX",
            "CUDAHOSTCXX",
            "CUDA_HOME",
            "CUDA_PATH",
        )
    else:
        assert reason[0].isprintable()
