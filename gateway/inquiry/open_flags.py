"""What an admin call may reach of an engine: which of its flags and environment variables users may set.

The engine says which flags there are and what they take; these tables say which are closed, and why. Any flag with an open value is
closed until somebody has looked, so that a new version's flags open no door.
"""

from __future__ import annotations

import fnmatch
import re
from typing import Any

# Flags that users may not give: reason -> names or patterns. Through a flag, an admin call must not read or write files,
# load code, open ports, reach other machines, or contradict what the gateway and the plan have set themselves.
OURS = {
    "the gateway sets it: what is served, under which name, where and on which devices": (
        "host port uds model tokenizer served-model-name device-ids device base-gpu-id gpu-id-step skip-tokenizer-init is-embedding"
    ),
    "it names a file, a folder or an address to read, write or fetch": (
        "*-path *-paths *-dir *-file *-folder *-url *-urls *-uri config chat-template hf-token lora-modules log-config* "
        "watchdog-config revision *-revision profiler-config speculative-* spec-model kt-* modelopt-* quantize-and-serve "
        "export-metrics-* debug-tensor-dump-* delete-ckpt-after-loading enable-response-store enable-lmcache enable-flexkv "
        "hicache-storage-* weight-cache-* ple-offload-* expert-distribution-recorder-* enable-watermark rl-*"
    ),
    "it loads code": (
        "trust-* middleware logits-processors *-plugin *-cls model-class-overrides compilation-config "
        "structured-outputs-config additional-config enable-custom-logit-processor sidecar*"
    ),
    "it opens a port or endpoint, or speaks to another machine": (
        "*-port *-ports *-addr *-address *-endpoint *-ip grpc* tool-server kv-transfer-config kv-events-config ec-transfer-config "
        "weight-transfer-config headless tokens-only nnodes node-rank master-* ray-* *-elastic-ep elastic-ep-* "
        "enable-fault-tolerance enable-scale-out enable-*-endpoint enable-server-load* enable-offline-docs "
        "distributed-executor-backend smg-* use-ray http2-* enable-http2 enable-http-* disaggregation-* decoupled-spec-* "
        "enable-pd* pdmux-* sm-group-num encoder-* enable-adaptive-dispatch-to-encoder remote-instance-* mooncake-* "
        "checkpoint-engine-* enable-trace enable-forward-pass-metrics forward-pass-metrics-* unified-cache-external-linker-* "
        "enable-unified-cache-external-linker nnodes dist-timeout gated-launch-* language-only enable-mm-global-cache mm-global-cache-* "
        "enable-elastic-expert-backup"
    ),
    "it takes GPUs, or divides them in a way, that the plan does not count": (
        "data-parallel-* dp-* prefill-context-parallel-size attn-dp-size attn-cp-size attention-context-parallel-size "
        "attention-data-parallel-size moe-dp-size moe-data-parallel-size moe-dense-tp-size dcp-size dwdp-size enable-dp-* "
        "max-ep-size shared-experts-tp-size enable-*context-parallel enable-prefill-cp cp-strategy"
    ),
    "clients reach the gateway, never the engine": (
        "*api-key root-path ssl-* enable-ssl-* allow-credentials allowed-origins allowed-methods allowed-headers"
    ),
    "the watcher reads the log for evidence: it needs the engine's words, and none of a client's": (
        "log-level* log-requests* enable-log-requests enable-log-outputs enable-log-deltas"
    ),
    "this command line ignores it (only `vllm serve` reads it)": "api-server-count",
}

# Flags that take free text or JSON and were read: they only tune. Any other flag with an open value is ours, so that a new
# version's flags stay closed until somebody has looked.
REVIEWED = (
    "allowed-media-domains attention-config aux-output-config cohere-format cpu-offload-params default-chat-template-kwargs "
    "diffusion-config disable-access-log-for-endpoints eplb-config fingerprint-value hf-overrides ignore-patterns ir-op-priority "
    "limit-mm-data-per-request "
    "kernel-config kv-cache-dtype-skip-layers limit-mm-per-prompt lora-target-modules media-io-kwargs mm-processor-kwargs "
    "numa-bind-cpus offload-params override-attention-dtype override-generation-config pooler-config quantization-config "
    "reasoning-config reasoning-effort-map response-role show-hidden-metrics-for-version"
)

# Flags of which only these values are safe: the others name a folder, a server or a package of somebody else.
NARROWED = {
    "generation-config": "auto vllm",
    "kv-offloading-backend": "native",
    "load-format": "auto bitsandbytes dummy fastsafetensors gguf hf instanttensor mistral pt safetensors sharded_state",
}

# Environment variables that users may set: those of the engine whose declared type leaves only numbers, switches and listed
# words, except where a word of the name says that it does more than choose kernels or behaviour...
ENV_CLOSED = re.compile(
    r"^VLLM_MAX_(?!TOKENS_PER)|"  # limits on what clients may send
    r"_(PATH|DIR|DIRS|FILE|FOLDER|ROOT|URL|HOST|IP|IPS|PORT|ADDR|SERVER|KEY|NAME|BASE|"  # places
    r"PLUGINS|RESOLVER|ALLOW|INSECURE|DEV|RUNTIME|RUST|API|VALIDATION|"  # code, and doors
    r"RPC|S3|HTTP|RAY|NIXL|MOONCAKE|MORIIO|P2P|EC|DP|ELASTIC|NIC|MODELSCOPE|"  # other machines
    r"MEDIA|FETCH|ASSETS|STORE|USAGE|TRACK|"  # what is fetched, kept or told
    r"REGEX|CHAT_TEMPLATE|OUTLINES_CACHE|KEEP_ALIVE|"  # guards against clients, and against a dead engine
    r"LOG|LOGGING|TRACE|DEBUG|PROFILING|SCOPES|CI|"  # the log, and debugging aids
    r"BUILD|PRECOMPILED|DOCKER|TARGET|VERSION|ROCM|XPU|TPU|XLA|ZENTORCH)(?=_|$)"  # building it, other hardware
)
# ...and these, which were read: text that only chooses, and names that only look as if they did more.
ENV_REVIEWED = (
    "VLLM_DISABLED_KERNELS VLLM_NVFP4_GEMM_BACKEND VLLM_PP_LAYER_PARTITION VLLM_CPU_OMP_THREADS_BIND VLLM_SKIP_P2P_CHECK"
)
# SGLang has hundreds, most of them for its own tests and for one model or another: only these, which were read.
ENV_SGLANG = (
    "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION SGLANG_CUTLASS_MOE "
    "SGLANG_ENABLE_JIT_DEEPGEMM SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK SGLANG_FLASHINFER_WORKSPACE_SIZE SGLANG_FORCE_FP8_MARLIN "
    "SGLANG_IMAGE_MAX_PIXELS SGLANG_INIT_NEW_TOKEN_RATIO SGLANG_JIT_DEEPGEMM_PRECOMPILE SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR "
    "SGLANG_MOE_NVFP4_DISPATCH SGLANG_MOE_PADDING SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS SGLANG_PER_TOKEN_GROUP_QUANT_8BIT_V2 "
    "SGLANG_RETRACT_DECODE_STEPS SGLANG_RETURN_ORIGINAL_LOGPROB SGLANG_VIT_ENABLE_CUDA_GRAPH SGLANG_VLM_CACHE_SIZE_MB "
    "USE_TRITON_W8A8_FP8_KERNEL"
)
ENV_OTHER_DEVICE = {
    "cuda": re.compile("VLLM_CPU_"),
    "cpu": re.compile("VLLM_.*(CUDA|NCCL|FLASHINFER|DEEP_?GEMM|DEEPEP|MARLIN|HUMMING)"),
}
ENV_LIBRARIES = {
    "cuda": ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_CUMEM_ENABLE", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"),
    "cpu": ("OMP_NUM_THREADS",),
}


def flag(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What the profile says of one flag. Another name of a flag is closed where that flag is (gateway/core/planner/flags.py)."""
    if "same_as" in asked:
        return asked
    choices = asked["choices"]
    if name in NARROWED:
        allowed = NARROWED[name].split()
        choices = [choice for choice in choices or allowed if choice in allowed]
    reviewed = name in REVIEWED.split() or name in NARROWED
    open_value = asked["type"] in ("str", "json") and not choices
    named = any(fnmatch.fnmatchcase(name, pattern) for pattern in " ".join(OURS.values()).split())
    if not reviewed and (open_value or named):
        return {"type": asked["type"], "ours": True}
    if asked["type"] == "bool" and not asked["negatable"]:
        choices = ["True"]
    said = {"type": asked["type"], "choices": choices, "default": asked["default"]}
    return {key: value for key, value in said.items() if value is not None}


def user_env(environment: dict[str, bool], device: str) -> list[str]:
    """The environment variables a user may set, sorted."""
    names = {name for name, typed in environment.items() if typed and name.startswith("VLLM_")}
    names = {name for name in names if not ENV_CLOSED.search(name)}
    names |= set(f"{ENV_REVIEWED} {ENV_SGLANG}".split()) & set(environment)
    return sorted({name for name in names if not ENV_OTHER_DEVICE[device].match(name)} | set(ENV_LIBRARIES[device]))
