"""The environment variables that operators may give engines, with their values. Pure.

Used by the planner, the settings, the agent that trusts no gateway (`planner/command.py`), the
inquiry that makes profiles, and the process host. The profile of each version lists vLLM's own
variables (`user_env`, by `user_variables`). Patterns decide over variables of libraries. A variable
that no table opens is closed.

Read in: vllm/envs.py of 0.33.0, sglang/srt/environ.py of 0.5.23, triton/knobs.py of 3.6, flashinfer
0.6, the names in libnccl 2.28.9 and libnvshmem 3.4.5, os.environ in torch 2.11.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from gateway.domain import Engine
from gateway.errors import BadFlag

# Variables of the gateway's own environment that engines as processes inherit: no key, no token.
INHERITED_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_HOME", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
)  # fmt: skip

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
NO_PROXY = ("NO_PROXY", "no_proxy")
# An engine calls itself over loopback (as SGLang's warm-up), and never through a proxy.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_MAX_NAME_CHARACTERS = 128
_MAX_VALUE_CHARACTERS = 2048
_LAYERS = re.compile(r"[1-9]\d{0,3}(,[1-9]\d{0,3}){1,31}", re.ASCII)
# Numbers, words and lists of them; a slash is in none, so no value names a file or an address.
_PLAIN_VALUE = re.compile(r"[\w.,:;=^+%{}|-]*", re.ASCII)
_SWITCH = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?|true|false|yes|no|on|off|", re.IGNORECASE | re.ASCII)
_ARCHITECTURES = re.compile(r"[0-9a-zA-Z.+; ]*")
_PROXY = re.compile(r"((https?|socks5h?)://)?([\w.-]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?/?|", re.ASCII)
_NO_PROXY = re.compile(r"[\w.,:*/\[\] -]*", re.ASCII)
# Programs and folders of the system, where no file of a model can lie. torch writes CXX into files
# of ninja, so it must not hold shell syntax.
_COMPILER = re.compile(
    r"(/usr(/local)?/bin/|/opt(/[\w.+-]+)*/bin/)?([\w.]+-)*"
    r"(gcc|g\+\+|clang|clang\+\+|cc|c\+\+)(-\d+(\.\d+)*)?",
    re.ASCII,
)
_SYSTEM = re.compile(r"/(usr|opt)(/[\w.+-]+)+/?", re.ASCII)

# Open by name, before all patterns: names -> pattern of the values, and the same in words.
_OPEN_VARIABLES: dict[str, tuple[re.Pattern[str], str]] = {
    "CC CXX CUDAHOSTCXX": (_COMPILER, "a C or C++ compiler, by its name or below /usr and /opt"),
    "CUDA_HOME CUDA_PATH": (_SYSTEM, "a folder below /usr or /opt"),
    "TORCH_CUDA_ARCH_LIST FLASHINFER_CUDA_ARCH_LIST": (
        _ARCHITECTURES,
        "GPU architectures, such as 9.0a 10.0+PTX",
    ),
    " ".join(PROXIES): (_PROXY, "the address of a proxy, without a user or a password"),
    " ".join(NO_PROXY): (_NO_PROXY, "names and addresses with commas between"),
    "SGLANG_PP_LAYER_PARTITION": (_LAYERS, "the layers of each stage with commas between"),
    "HF_HUB_DISABLE_XET HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_DISABLE_SYMLINKS_WARNING"
    " HF_HUB_ENABLE_HF_TRANSFER HF_HUB_ETAG_TIMEOUT HF_HUB_DOWNLOAD_TIMEOUT NVIDIA_TF32_OVERRIDE"
    " USE_TRITON_W8A8_FP8_KERNEL": (
        _SWITCH,
        "a number or a switch",
    ),
    "CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS"
    " CUDA_DEVICE_MAX_COPY_CONNECTIONS CUDA_SCALE_LAUNCH_QUEUES"
    " CUDA_ENABLE_COREDUMP_ON_EXCEPTION CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE"
    " PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING"
    " PYTORCH_NVML_BASED_CUDA_CHECK MAX_JOBS NVCC_THREADS TOKENIZERS_PARALLELISM"
    " RAYON_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_MAX_THREADS"
    " MALLOC_ARENA_MAX SAFETENSORS_FAST_GPU GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME"
    " TORCH_NCCL_TRACE_BUFFER_SIZE": (
        _PLAIN_VALUE,
        "numbers and words",
    ),
}
# Open by pattern, where no pattern of `CLOSED_VARIABLES` holds.
_OPEN_PATTERNS = (
    "NCCL_* NVSHMEM_* TORCH_* TORCHINDUCTOR_* TORCHDYNAMO_* FLASHINFER_* TRITON_* OMP_* KMP_*"
    " GOMP_* DG_JIT_* DG_* UCX_* CUDNN_*"
)

# Closed for every library: the reason -> patterns of names.
CLOSED_VARIABLES = {
    "it loads code, or opens the engine for code": (
        "LD_* DYLD_* PYTHON* BASH_ENV ENV *_PLUGIN *_PLUGINS *_PLUGIN_* *_INJECTION* OMP_TOOL*"
        " TRITON_CACHE_MANAGER TRITON_*BACKEND* TRITON_KERNEL_OVERRIDE TORCH_FORCE_*"
        " TORCH_DEVICE_BACKEND_AUTOLOAD TORCHINDUCTOR_*CONFIG_MODULE* VLLM_ALLOW_* *_INSECURE_*"
        " *_CHECKSUM_* NCCL_ENV* *_RESOLVER* GLIBC_TUNABLES"
    ),
    "it decides what a compiler runs, and so what runs on the GPU": (
        "*CFLAGS *CXXFLAGS *CPPFLAGS *CUDAFLAGS *LDFLAGS *_FLAGS *_OPTIONS *_LAUNCHER *_NVCC"
        " *_COMPILER CPATH *INCLUDE_PATH LIBRARY_PATH *_NVCC_* TRITON_MOCK_* DG_JIT_PTXAS_*"
    ),
    "it holds a secret, and variables of engines are shown in plans and stored": (
        "*_TOKEN *_TOKENS_FILE *_KEY *_KEYS *SECRET* *PASSW* *CREDENTIAL* *_AUTH"
    ),
    "the gateway sets it": (
        "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES"
        " HIP_VISIBLE_DEVICES HOME PATH TMPDIR USER XDG_* *_CACHE_DIR *_CACHE_PATH *_CACHE_ROOT"
        " HF_HOME HF_*_CACHE HF_HUB_OFFLINE TRANSFORMERS_* DO_NOT_TRACK LOCAL_RANK RANK WORLD_SIZE"
    ),
    "it opens a port or endpoints, or speaks to another machine": (
        "*_PORT *_PORT_* *_PORTS *REMOTE* *REDIS* *_RPC *_RPC_* *GRPC* MASTER_* NCCL_COMM_ID"
        " NCCL_RAS* VLLM_SERVER_DEV_MODE *_SERVER *_SERVER_* NVSHMEM_BOOTSTRAP* NVSHMEM_*HOST*"
        " UCX_*LISTEN* *_CUBINS_REPOSITORY"
    ),
    "it names a file, a folder or an address": (
        "*_PATH *_PATHS *_DIR *_DIRS *_FILE *_FILE_* *_FOLDER *_ROOT *_HOME *_BASE *_URL *_URLS"
        " *_URI *_HOST *_HOSTS *_ADDR *_ADDRESS *_ENDPOINT *_REPOSITORY *_LOGDEST *_OUT *_LIB"
        " *_LIBRARY *_LIBRARIES"
    ),
    "it writes what the engine computes, or floods the log that the gateway reads": (
        "*DUMP* *_TRACE *_TRACE_* TORCH_TRACE *PROFILE* *PROFILING* TORCH_LOGS* TORCH_COMPILE_DEBUG"
        " TORCHINDUCTOR_*DEBUG* *_LOGGING* *_LOGLEVEL TRITON_DEBUG TRITON_*_DEBUGGING"
        " TRITON_PRINT_* DG_*DEBUG DG_*PRINT*"
    ),
}

# Words in an engine's own variables (VLLM_*, SGLANG_*) that do more than choose kernels or
# behaviour: their effect -> the words.
_CLOSED_WORDS = {
    "it names a file, a folder or an address": (
        "PATH|DIR|DIRS|FILE|FOLDER|ROOT|URL|HOST|IP|IPS|PORT|ADDR|SERVER|KEY|NAME|BASE"
    ),
    "it loads code, or opens the engine for code": (
        "PLUGINS|RESOLVER|ALLOW|INSECURE|DEV|RUNTIME|RUST|API|VALIDATION"
    ),
    "it speaks to another machine": (
        "RPC|S3|HTTP|RAY|NIXL|MOONCAKE|MORIIO|P2P|EC|DP|ELASTIC|NIC|MODELSCOPE"
    ),
    "it decides what is fetched, stored or reported": "MEDIA|FETCH|ASSETS|STORE|USAGE|TRACK",
    "it removes a protection against clients or against a dead engine": (
        "REGEX|CHAT_TEMPLATE|OUTLINES_CACHE|KEEP_ALIVE"
    ),
    "it changes the log, or is for the engine's developers": (
        "LOG|LOGGING|TRACE|DEBUG|PROFILING|SCOPES|CI"
    ),
    "it is for building the engine, or for other hardware": (
        "BUILD|PRECOMPILED|DOCKER|TARGET|VERSION|ROCM|XPU|TPU|XLA|ZENTORCH"
    ),
}
# SGLang has hundreds of variables, mostly switches. Words of those for tests, other machines and
# endpoints.
_SGLANG_WORDS = {
    "it is for SGLang's own tests, or makes it wrong or slow": (
        "TEST|TESTS|SIMULATE|SIMULATED|CANARY|PERTURB|POISON|CRASH|FORCE_SHUTDOWN|CHECKER|SANITY"
        "|DIAG|BYPASS|VERIFY_REAL|IN_CI|RADIX_FORCE_MISS|"
        "PATCH_TOKENIZER|KILLPG|SKIP_COMPUTE_HASH|IN_DEEPGEMM_PRECOMPILE_STAGE"
    ),
    "it opens SGLang to clients or to other machines": (
        "EXPOSE|EXTERNAL|PICKLE|OVERRIDES|DECOMPRESSION|GRPC|TCP|ZMQ|DISAGG|DISAGGREGATION|MORI"
        "|ENCODER|EXA|FORWARD|MODEL|REMOTE|SESSION|HEALTHCHECK|"
        "HEALTH|OTLP|EXPORTER|UVICORN|KV_EVENTS"
    ),
    "it writes what the engine computes": (
        "DUMP|COREDUMP|PYSPY|PROFILE|PROFILER|RECORD|NVTX|E2E|HEATMAP"
    ),
    "it contradicts the plan": (
        "OVERWRITE_LONGER_CONTEXT_LEN|VISIBLE_DEVICE|FIRST_RANK|QUANTIZATION|INT4_WEIGHT"
        "|COLOCATED|MAX_NEW"
    ),
    "it is for other hardware": "NPU|AMD|AITER|MUSA|MLX|HIP|ASCEND|GFX\\d+|XPU|CPU_QUANTIZATION",
}
# Exceptions after a review: texts that only choose, and names that only look dangerous.
_REVIEWED_VARIABLES = (
    "VLLM_DISABLED_KERNELS VLLM_NVFP4_GEMM_BACKEND VLLM_PP_LAYER_PARTITION"
    " VLLM_CPU_OMP_THREADS_BIND VLLM_SKIP_P2P_CHECK"
)
_SGLANG_REVIEWED_VARIABLES = (
    "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION SGLANG_CUTLASS_MOE"
    " SGLANG_ENABLE_JIT_DEEPGEMM SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    " SGLANG_FLASHINFER_WORKSPACE_SIZE SGLANG_FORCE_FP8_MARLIN SGLANG_IMAGE_MAX_PIXELS"
    " SGLANG_INIT_NEW_TOKEN_RATIO SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR"
    " SGLANG_MOE_NVFP4_DISPATCH SGLANG_MOE_PADDING SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS"
    " SGLANG_PER_TOKEN_GROUP_QUANT_8BIT_V2 SGLANG_RETRACT_DECODE_STEPS"
    " SGLANG_RETURN_ORIGINAL_LOGPROB SGLANG_VIT_ENABLE_CUDA_GRAPH SGLANG_VLM_CACHE_SIZE_MB"
    " USE_TRITON_W8A8_FP8_KERNEL"
)
_OTHER_DEVICE = {
    "cuda": re.compile("VLLM_CPU_"),
    "cpu": re.compile("VLLM_.*(CUDA|NCCL|FLASHINFER|DEEP_?GEMM|DEEPEP|MARLIN|HUMMING)"),
}
_LIBRARIES = {
    "cuda": (
        "NCCL_P2P_DISABLE",
        "NCCL_IB_DISABLE",
        "NCCL_CUMEM_ENABLE",
        "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
    ),
    "cpu": ("OMP_NUM_THREADS",),
}
# Limits on requests of clients.
_LIMITS = re.compile("VLLM_MAX_(?!TOKENS_PER)")


def user_variables(environment: Mapping[str, bool], device: str) -> list[str]:
    """The variables of an engine version that users may set, sorted.

    environment: its names, and whether the declared type allows only numbers, switches and listed
    words.
    """
    names = {name for name, typed in environment.items() if typed and name.startswith("VLLM_")}
    names = {
        name
        for name in names
        if _closed_word(name, _CLOSED_WORDS) is None and not _LIMITS.match(name)
    }
    names |= set(f"{_REVIEWED_VARIABLES} {_SGLANG_REVIEWED_VARIABLES}".split()) & set(environment)
    return sorted(
        {name for name in names if not _OTHER_DEVICE[device].match(name)} | set(_LIBRARIES[device])
    )


def engine_env(
    engine: Engine, model_env: Mapping[str, str], global_env: Mapping[str, str]
) -> dict[str, str]:
    """The variables for an engine: `model_env`, and the part of `global_env` that is open for it.

    Raises BadFlag for a variable of `model_env` that is closed for this engine version.
    """
    for name, value in model_env.items():
        check(engine, name, value)
    env = {
        name: value for name, value in global_env.items() if refusal(engine, name, value) is None
    } | dict(model_env)
    if any(name in env for name in PROXIES):
        for name in [name for name in NO_PROXY if name in env] or NO_PROXY[:1]:
            hosts = [part.strip() for part in env.get(name, "").split(",") if part.strip()]
            env[name] = ",".join(dict.fromkeys([*hosts, *_LOOPBACK]))
    return env


class VariableRefusal(NamedTuple):
    """The words on a closed variable, or on a closed value of an open one."""

    message: str
    hint: str


def unprintable_value(name: str, max_characters: int) -> VariableRefusal:
    """The refusal of a value that would forge lines of a log, or is too long."""
    return VariableRefusal(
        f"The value of {name} is too long or has characters that cannot be printed.",
        f"Give a plain value of at most {max_characters} characters.",
    )


def check(engine: Engine | None, name: str, value: str) -> None:
    """Raise BadFlag if the variable or its value is closed for this version; None: for all."""
    if (reason := refusal(engine, name, value)) is not None:
        raise BadFlag(reason.message, hint=reason.hint, param="env")


def refusal(engine: Engine | None, name: str, value: str) -> VariableRefusal | None:
    """The refusal of a closed variable, without its value; None: the variable is open."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > _MAX_NAME_CHARACTERS:
        return VariableRefusal(f"{name[:80]!r} is not a name of a variable.", "Give NAME=VALUE.")
    if not value.isprintable() or len(value) > _MAX_VALUE_CHARACTERS:
        return unprintable_value(name, _MAX_VALUE_CHARACTERS)
    refusal_beginning = f"The variable {name} cannot be given to engines: "
    if engine is not None and name in engine.user_env:
        return None
    if engine is not None and (name in engine.env or name == engine.key_env):
        return VariableRefusal(f"{refusal_beginning}the gateway sets it.", "Leave it out.")
    form = next((form for names, form in _OPEN_VARIABLES.items() if name in names.split()), None)
    if form is None and (reason := _closing_reason(name)):
        return VariableRefusal(f"{refusal_beginning}{reason}.", "Leave it out.")
    if form is None and re.match("VLLM_|SGLANG_|SGL_", name):
        return _refuse_engine_variable(engine, name, value)
    if form is None and _names_pattern(_OPEN_PATTERNS).fullmatch(name):
        form = _PLAIN_VALUE, "numbers and words"
    if form is None:
        return _suggest_name(engine, name)
    pattern, text = form
    if pattern.fullmatch(value) and ".." not in value:
        return None
    if name in PROXIES and "@" in value:
        return VariableRefusal(
            f"{refusal_beginning}its address has a password, which would be shown in plans and"
            " stored.",
            "Give a proxy without a password.",
        )
    return VariableRefusal(f"{name} takes {text}.", "Correct the value.")


def env_line(env: Mapping[str, str]) -> str:
    """The variables in one line, for the scope of a fact."""
    return " ".join(f"{name}={value}" for name, value in sorted(env.items()))


def _refuse_engine_variable(engine: Engine | None, name: str, value: str) -> VariableRefusal | None:
    """The refusal of an engine's own variable that no profile lists; None: the variable is open.

    Profiles list all open variables of vLLM. Of SGLang all switches are open, with exceptions.
    """
    is_sglang = not name.startswith("VLLM_")
    is_reviewed = name in f"{_REVIEWED_VARIABLES} {_SGLANG_REVIEWED_VARIABLES}".split()
    reason = (
        None
        if is_reviewed
        else _closed_word(name, _CLOSED_WORDS)
        or (_closed_word(name, _SGLANG_WORDS) if is_sglang else None)
    )
    if reason is None and not is_sglang and _LIMITS.match(name):
        reason = "it is a limit on requests of clients"
    if reason is not None:
        return VariableRefusal(
            f"The variable {name} cannot be given to engines: {reason}.", "Leave it out."
        )
    if engine is not None and not name.startswith(engine.open_switches):
        return _suggest_name(engine, name)
    if is_sglang and not _SWITCH.fullmatch(value):
        return VariableRefusal(f"{name} takes a number or a switch.", "Correct the value.")
    return None


def _closing_reason(name: str) -> str | None:
    return next(
        (
            reason
            for reason, names in CLOSED_VARIABLES.items()
            if _names_pattern(names).fullmatch(name)
        ),
        None,
    )


@cache
def _names_pattern(names: str) -> re.Pattern[str]:
    """A pattern for any of these names; `*` is any text."""
    return re.compile("|".join(name.replace("*", ".*") for name in names.split()))


def _closed_word(name: str, table: Mapping[str, str]) -> str | None:
    """The effect of a variable, by the words in its name."""
    return next(
        (
            reason
            for reason, listed_words in table.items()
            if re.search(rf"_({listed_words})(?=_|$)", name)
        ),
        None,
    )


def _suggest_name(engine: Engine | None, name: str) -> VariableRefusal:
    names: Iterable[str] = (
        *(engine.user_env if engine is not None else ()),
        *(open_name for names in _OPEN_VARIABLES for open_name in names.split()),
    )
    near_names = difflib.get_close_matches(name[:80], list(names), n=1, cutoff=0.7)
    owner = engine.ref if engine is not None else "No engine"
    message = f"{owner} has no environment variable {name[:80]!r} that may be set"
    return VariableRefusal(
        f"{message}; did you mean {near_names[0]}?" if near_names else f"{message}.",
        "docs/settings.md lists the variables that may be set.",
    )
