"""Flags of an engine that users may set.

The engine lists its flags and their values; these tables list the closed flags with reasons. A flag
with a free text value is closed until it was reviewed, so a new version's flags stay closed.
"""

from __future__ import annotations

import fnmatch
from typing import Any

# Closed flags: reason -> names or patterns. A flag must not let an admin call read or write files,
# load code, open ports, or reach other machines. It must not contradict settings of the gateway and
# the plan.
GATEWAY_REASONS = {
    "the gateway sets it: what is served, under which name, where and on which devices": (
        "host port uds model tokenizer served-model-name device-ids device base-gpu-id gpu-id-step"
        " skip-tokenizer-init is-embedding"
    ),
    "it names a file, a folder or an address to read, write or fetch": (
        "*-path *-paths *-dir *-file *-folder *-url *-urls *-uri config chat-template hf-token"
        " lora-modules log-config* watchdog-config revision *-revision profiler-config"
        " speculative-* spec-model kt-* modelopt-* quantize-and-serve export-metrics-*"
        " debug-tensor-dump-* delete-ckpt-after-loading enable-response-store enable-lmcache"
        " enable-flexkv hicache-storage-* weight-cache-* ple-offload-*"
        " expert-distribution-recorder-* enable-watermark rl-*"
    ),
    "it loads code": (
        "trust-* middleware logits-processors *-plugin *-cls model-class-overrides"
        " compilation-config structured-outputs-config additional-config"
        " enable-custom-logit-processor sidecar*"
    ),
    "it opens a port or endpoint, or speaks to another machine": (
        "*-port *-ports *-addr *-address *-endpoint *-ip grpc* tool-server kv-transfer-config"
        " kv-events-config ec-transfer-config weight-transfer-config headless tokens-only nnodes"
        " node-rank master-* ray-* *-elastic-ep elastic-ep-* enable-fault-tolerance"
        " enable-scale-out enable-*-endpoint enable-server-load* enable-offline-docs"
        " distributed-executor-backend smg-* use-ray http2-* enable-http2 enable-http-*"
        " disaggregation-* decoupled-spec-* enable-pd* pdmux-* sm-group-num encoder-*"
        " enable-adaptive-dispatch-to-encoder remote-instance-* mooncake-* checkpoint-engine-*"
        " enable-trace enable-forward-pass-metrics forward-pass-metrics-*"
        " unified-cache-external-linker-* enable-unified-cache-external-linker nnodes dist-timeout"
        " gated-launch-* language-only enable-mm-global-cache mm-global-cache-*"
        " enable-elastic-expert-backup"
    ),
    "it takes GPUs, or divides them in a way, that the plan does not count": (
        "data-parallel-* dp-* prefill-context-parallel-size attn-dp-size attn-cp-size"
        " attention-context-parallel-size attention-data-parallel-size moe-dp-size"
        " moe-data-parallel-size moe-dense-tp-size dcp-size dwdp-size enable-dp-* max-ep-size"
        " shared-experts-tp-size enable-*context-parallel enable-prefill-cp cp-strategy"
    ),
    "clients reach the gateway, never the engine": (
        "*api-key root-path ssl-* enable-ssl-* allow-credentials allowed-origins allowed-methods"
        " allowed-headers"
    ),
    "the watcher reads the log for evidence: it needs the engine's words, and none of a client's": (
        "log-level* log-requests* enable-log-requests enable-log-outputs enable-log-deltas"
    ),
    "this command line ignores it (only `vllm serve` reads it)": "api-server-count",
}

# Flags with free text or JSON that a review found harmless, and the flags of rank groups, which
# plans count. Other flags with open values are reserved: new ones stay closed until a review.
REVIEWED_FLAGS = (
    "allowed-media-domains attention-config attn-dp-size aux-output-config cohere-format"
    " cpu-offload-params data-parallel-size default-chat-template-kwargs diffusion-config"
    " disable-access-log-for-endpoints eplb-config fingerprint-value hf-overrides ignore-patterns"
    " ir-op-priority kernel-config kv-cache-dtype-skip-layers limit-mm-data-per-request"
    " limit-mm-per-prompt lora-target-modules media-io-kwargs mm-processor-kwargs numa-bind-cpus"
    " offload-params override-attention-dtype override-generation-config pooler-config"
    " quantization-config reasoning-config reasoning-effort-map response-role"
    " show-hidden-metrics-for-version"
)

# Flags of which only these values are safe: the others name a folder, a server or a package of
# somebody else.
NARROWED_FLAGS = {
    "generation-config": "auto vllm",
    "kv-offloading-backend": "native",
    "load-format": (
        "auto bitsandbytes dummy fastsafetensors gguf hf instanttensor mistral pt safetensors"
        " sharded_state"
    ),
}

# Flags whose JSON object may have only these keys: others of config.json name code, or a tower to
# fetch.
NARROWED_OBJECTS = {
    "json-model-override-args": ("max_position_embeddings", "rope_parameters", "rope_scaling"),
}


# Hints for flags that have an option of fitserve.
SUBSTITUTES = {
    "--chat-template": "chat-template",
    "--lora NAME=SOURCE": "lora-modules lora-paths",
    "--revision": "revision *-revision",
    "--alias, which gives a model more names": "served-model-name",
    "--gpu, or --gpus": "device-ids device base-gpu-id gpu-id-step",
    "--replicas, or for groups that share the experts attn-dp-size": "dp-size",
    "--drafter, or --speculative": "speculative-*",
    "--allow-remote-code": "trust-remote-code",
    "`fitserve keys`": "*api-key",
    "FITSERVE_ORIGINS": "allowed-origins",
}


def closing_reason(name: str) -> tuple[str, str]:
    """Why users may not give a flag that is closed, and its equal here ("": none)."""
    result = (
        reason for reason, patterns in GATEWAY_REASONS.items() if _matches_pattern(name, patterns)
    )
    reason = next(
        result, "it takes any text, and nobody has looked yet at what that reaches in this version"
    )
    option = next(
        (option for option, patterns in SUBSTITUTES.items() if _matches_pattern(name, patterns)), ""
    )
    return reason, f"Use {option}." if option else ""


def _matches_pattern(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())


def flag(name: str, question: dict[str, Any]) -> dict[str, Any]:
    """The profile's entry for one flag. An alias is closed together with its flag
    (gateway/planner/flags.py)."""
    if "same_as" in question:
        return question
    if name in NARROWED_OBJECTS:
        return {"type": "json", "keys": [*NARROWED_OBJECTS[name]]}
    choices = question["choices"]
    if name in NARROWED_FLAGS:
        allowed_choices = NARROWED_FLAGS[name].split()
        choices = [choice for choice in choices or allowed_choices if choice in allowed_choices]
    is_reviewed = name in REVIEWED_FLAGS.split() or name in NARROWED_FLAGS
    has_open_value = question["type"] in ("str", "json") and not choices
    is_ours = _matches_pattern(name, " ".join(GATEWAY_REASONS.values()))
    if not is_reviewed and (has_open_value or is_ours):
        return {"type": question["type"], "ours": True}
    if question["type"] == "bool" and not question["negatable"]:
        choices = ["True"]
    description = {"type": question["type"], "choices": choices, "default": question["default"]}
    return {key: value for key, value in description.items() if value is not None}
