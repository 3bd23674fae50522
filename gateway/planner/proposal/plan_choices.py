"""The choices of a plan, each with reason and source. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.diagnosis.facts.peers import CUSTOM, P2P
from gateway.domain import Choice, Fact, bool_choice, int_choice, str_choice
from gateway.domain.units import format_bytes
from gateway.engines.common import sleep_mode
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.chat.parsers import NO_PARSER, REASONING_FLAG, TOOLS_FLAG
from gateway.engines.common.lora.adapter_flags import supported_rank
from gateway.planner.sizes import Sizes

_DECLARED_CACHE = "what the checkpoint says of its cache"


def pipeline_parallel(candidate: Candidate) -> Choice[int]:
    reason = _reason_and_source(candidate, "pp", "pipeline-parallel-size", "one stage is enough")
    return int_choice(candidate.variant.pp, *reason)


def data_parallel(candidate: Candidate, sizes: Sizes) -> Choice[int]:
    dp = candidate.variant.dp
    tp = candidate.variant.tp
    if candidate.inputs.wish.data_parallel or "data-parallel-size" in candidate.args:
        return int_choice(dp, "set by the user", "user")
    if dp == 1:
        return int_choice(1, "all ranks work on the same requests", "planner")
    rank_words = "each GPU" if tp == 1 else f"each group of {tp} GPUs"
    tokens = f"{sizes.memory.kv_tokens * dp:,} tokens in all"
    return int_choice(
        dp, f"{rank_words} keeps the KV cache of its own requests, {tokens}", "memory model"
    )


def expert_parallel(candidate: Candidate) -> Choice[bool]:
    whole_words = (
        "experts are cut like other layers" if candidate.inputs.spec.experts else "no experts"
    )
    if candidate.variant.dp > 1 and candidate.variant.ep:
        whole_words = "whole experts on each GPU, with separate attention"
    return bool_choice(
        candidate.variant.ep,
        *_reason_and_source(candidate, "ep", "enable-expert-parallel", whole_words),
    )


def kv_cache_dtype(candidate: Candidate) -> Choice[str]:
    value = candidate.variant.kv_dtype
    spec = candidate.inputs.spec
    engine = candidate.engine
    plain_reason = "the dtype of the activations" if value == "auto" else _DECLARED_CACHE
    reason, source = _reason_and_source(candidate, "kv_dtype", "kv-cache-dtype", plain_reason)
    if reason != _DECLARED_CACHE:
        return str_choice(value, reason, source)
    for row in engine.cache_defaults:
        if spec.architecture in row.architectures and row.dtype == value:
            reason = f"what {engine.ref} gives {spec.architecture} on this GPU"
            return str_choice(value, reason, row.source)
    return str_choice(value, reason, spec.quant.file if spec.quant else source)


def _reason_and_source(
    candidate: Candidate, name: str, flag: str, plain_reason: str
) -> tuple[str, str]:
    """Reason and source of a value that a variant may change by `name`, and a user by `flag`."""
    if flag in candidate.args:
        return "set by the user", "user"
    return candidate.variant.reasons.get(name, (plain_reason, "planner"))


def tensor_parallel(candidate: Candidate) -> Choice[int]:
    tp = candidate.variant.tp
    if candidate.inputs.wish.tensor_parallel or "tensor-parallel-size" in candidate.args:
        return int_choice(tp, "set by the user", "user")
    if candidate.engine.device == "cpu":
        return int_choice(1, "the engine runs on the CPU", candidate.source)
    if tp == 1 and candidate.variant.dp > 1:
        return int_choice(1, "attention is whole on each GPU", "planner")
    if tp == 1:
        fits = "the model fits one GPU" if candidate.variant.pp == 1 else "each stage fits one GPU"
        return int_choice(1, fits, "memory model")
    heads = "/".join(
        str(group.heads)
        for group in candidate.built_model.attention
        if group.kind not in ("vision", "recurrent")
    )
    reason = f"{heads} attention heads and the weights divide by {tp}"
    return int_choice(tp, reason, candidate.inputs.spec.sources.get("heads", "planner"))


def _loaded_as(candidate: Candidate, named_method: str) -> str:
    method = candidate.evidence.method
    loaded_words = (
        f"; {candidate.engine.ref} loads it as {method}" if method not in ("", named_method) else ""
    )
    return f"what the checkpoint says of itself{loaded_words}"


def quantization(candidate: Candidate) -> Choice[str]:
    quant = candidate.inputs.spec.quant
    variant = candidate.variant
    if "quantization" in candidate.args:
        return str_choice(variant.quantization, "set by the user", "user")
    if variant.quantization:
        reason, source = variant.reasons["quantization"]
        return str_choice(variant.quantization, reason, source)
    if quant is None:
        return str_choice("none", "the weights are not quantized", "config.json")
    return str_choice(quant.method, _loaded_as(candidate, quant.method), quant.file)


def parsers(candidate: Candidate) -> tuple[Choice[str], Choice[str]]:
    """The parser of tool calls, and that of thoughts."""
    writing = candidate.inputs.writing
    engine = candidate.engine
    if writing is None:
        tools = reasoning = str_choice(NO_PARSER, "no table of parsers is at hand", "planner")
    else:
        tools = writing.tool_parser(engine)
        reasoning = writing.reasoning_parser(engine)
    chosen_parsers = {TOOLS_FLAG: tools, REASONING_FLAG: reasoning}
    for flag in chosen_parsers.keys() & candidate.args.keys():
        chosen_parsers[flag] = str_choice(str(candidate.args[flag]), "set by the user", "user")
    return chosen_parsers[TOOLS_FLAG], chosen_parsers[REASONING_FLAG]


def sleep_choice(candidate: Candidate, sizes: Sizes, env: Mapping[str, str]) -> Choice[bool]:
    inputs = candidate.inputs
    ranks = max(1, len(candidate.gpus))
    evidence = (inputs.facts, sizes.scope, sizes.memory, ranks, inputs.hardware.ram_total_bytes)
    return sleep_mode.choose_sleep_mode(
        candidate.engine,
        inputs.sharing.leave_reason,
        candidate.args,
        env,
        *evidence,
        has_adapters=bool(inputs.adapters),
    )


_NO_OVERRIDES = str_choice("none", "the engine's own choice of kernels is sound", "planner")


def loras(candidate: Candidate) -> Choice[str]:
    """The adapters, with their bytes on each rank."""
    adapters = candidate.inputs.adapters
    engine = candidate.engine
    if not adapters:
        return str_choice("none", "none was requested", "user")
    adapter_bytes = candidate.adapter_bytes
    rank = supported_rank(engine, adapters)
    reason = f"room for rank {rank} in every layer: {format_bytes(adapter_bytes)} on each rank"
    return str_choice(
        ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in adapters), reason, "user"
    )


def overrides(candidate: Candidate) -> Choice[str]:
    """The flags that keep the engine from a kernel of its own choice."""
    variant = candidate.variant
    texts = [f"without {name}" for name in variant.disabled] + [
        f"--{flag}={value}" for flag, value in variant.backends
    ]
    reasons = [
        variant.reasons[name] for name in ("disabled", "backends") if name in variant.reasons
    ]
    if not texts:
        return _NO_OVERRIDES
    reason = "; ".join(reason for reason, _ in reasons) or "set by the user"
    return str_choice(", ".join(texts), reason, reasons[0][1] if reasons else "user")


def all_reduce(candidate: Candidate, link_failures: Mapping[str, Fact]) -> Choice[bool]:
    """Whether ranks sum up by the engine's own kernel, with the reason."""
    if "disable-custom-all-reduce" in candidate.args:
        return bool_choice(
            not candidate.args["disable-custom-all-reduce"], "set by the user", "user"
        )
    span = candidate.inputs.span
    gpus = candidate.gpus
    if span and candidate.variant.tp > span.gpus_each:
        return bool_choice(False, "GPUs of several nodes sum up over the network", "planner")
    # Ranks that share a layer are on one node.
    peers = gpus[: candidate.variant.tp] if span else gpus
    pair = candidate.inputs.unlinked_pair(peers)
    fact = link_failures.get(CUSTOM) or link_failures.get(P2P)
    if pair is None and fact is not None:
        return bool_choice(
            False, f"with it, the GPUs could not talk to each other here: {fact.source}", "fact"
        )
    if pair is None:
        reason = "every pair has NVLink or working peer-to-peer access"
        if candidate.variant.tp * candidate.variant.dp == 1:
            reason = "one GPU" if gpus else "the CPU is one rank"
        return bool_choice(True, reason, "probe")
    reason = f"GPUs {pair[0]} and {pair[1]} have neither NVLink nor proven peer-to-peer access"
    return bool_choice(False, reason, "probe")
