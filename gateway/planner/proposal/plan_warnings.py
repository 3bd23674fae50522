"""The warnings of a plan about kernels, guesses, loading and memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.diagnosis.facts.peers import P2P, P2P_SWITCH
from gateway.domain import Fact, Memory
from gateway.domain.units import GIB, gib, sentence
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.kernels.compiled_kernels import binary_support
from gateway.engines.common.kernels.linear import DISABLED_REASON
from gateway.engines.common.planning_input import host_reserve_bytes
from gateway.planner.flags import CACHE_BYTES
from gateway.planner.sizes import Sizes

# The largest file that transformers 4 writes, which an engine maps as it reads its weights.
_SHARD_BYTES = 5 * GIB


def plan_warnings(
    candidate: Candidate, sizes: Sizes, link_failures: Mapping[str, Fact]
) -> tuple[str, ...]:
    return (
        *sizes.warnings,
        *_wish_warnings(candidate),
        *_kernel_warnings(candidate),
        *_rule_warnings(candidate),
        *_load_warnings(candidate),
        *_host_transfer_warnings(link_failures),
        *_host_memory_warnings(candidate, sizes.memory),
        *_variable_warnings(candidate),
        *_unfollowed_variables(candidate),
        *_answer_limit_warnings(candidate, sizes),
    )


def _wish_warnings(candidate: Candidate) -> list[str]:
    """The wishes that change nothing without a GPU."""
    count = candidate.inputs.wish.gpus
    if candidate.gpus or not isinstance(count, int):
        return []
    return [f"`--gpus {count}` changes nothing: this machine has no GPU, and the CPU serves."]


def _host_transfer_warnings(link_failures: Mapping[str, Fact]) -> list[str]:
    if P2P not in link_failures:
        return []
    name, value = P2P_SWITCH
    return [
        f"The GPUs talk through the host's memory ({name}={value}), which is slower:"
        f" {link_failures[P2P].source}"
    ]


def _host_memory_warnings(candidate: Candidate, memory: Memory) -> list[str]:
    """The warning with the figures of memory that GPU and host share."""
    if not candidate.has_unified_memory:
        return []
    total = min(gpu.total_bytes or 0 for gpu in candidate.gpus)
    free_bytes = min(candidate.inputs.available[gpu.uuid] for gpu in candidate.gpus)
    share = candidate.args.get("gpu-memory-utilization")
    counted_gpus = (
        [
            "On shared memory the engine counts what other programs take while it starts as its"
            f" own. With --gpu-memory-utilization={share} its KV cache can be 10 GiB smaller than"
            f" this forecast; --arg {CACHE_BYTES}=BYTES fixes its size."
        ]
        if share is not None
        and CACHE_BYTES in candidate.engine.flags
        and CACHE_BYTES not in candidate.args
        else []
    )
    pages = min(candidate.inputs.spec.file_bytes or memory.weights_bytes, _SHARD_BYTES)
    kept_bytes = max(map(host_reserve_bytes, candidate.gpus))
    promised_bytes = memory.promised_bytes
    figures = (
        f"GPU and host share {gib(total)}, of which {gib(free_bytes)} are free: the engine takes"
        f" {gib(promised_bytes)}, and {gib(max(0, free_bytes - promised_bytes))} stay for the host"
    )
    if free_bytes - promised_bytes < kept_bytes:
        return [
            *counted_gpus,
            f"{figures}. That is less than the {gib(kept_bytes)} that the host should keep"
            " (FITSERVE_HOST_BYTES): without them the machine may hang while the engine starts.",
        ]
    loads = memory.weights_bytes + memory.beside_bytes + pages
    slow_words = ", which is more than is free: files are read several times"
    return [
        *counted_gpus,
        f"{figures}. While the weights load, the page cache takes up to {gib(pages)} more"
        f"{slow_words if loads > free_bytes else ''}.",
    ]


def _count_skipped_layers(candidate: Candidate, kernel: str) -> int:
    """The number of layers that lose this kernel because its switch is for the whole model."""
    passed_kernels = [
        layer_kernel
        for layer_kernel in candidate.evidence.kernels
        if any(
            refusal.kernel == kernel and refusal.reason == DISABLED_REASON
            for refusal in layer_kernel.refusals
        )
    ]
    return sum(layer_kernel.count for layer_kernel in passed_kernels)


def replacement_reason(candidate: Candidate) -> str:
    """Why the engine is kept from the kernel that it would choose."""
    because = candidate.variant.reasons
    return "; ".join(because[name][0] for name in ("disabled", "backends") if name in because)


def _kernel_warnings(candidate: Candidate) -> list[str]:
    """The warnings about kernels and speculation."""
    evidence = candidate.evidence
    warnings = [
        f"{layer_kernel.layer}: {layer_kernel.note}."
        for layer_kernel in evidence.kernels
        if layer_kernel.note
    ]
    warnings += (
        [f"Not the kernel that the engine would choose: {reason}."]
        if (reason := replacement_reason(candidate))
        else []
    )
    warnings += [
        f"The engine can leave out {kernel} for the whole model only: {count} layers go without it,"
        " and may be slower."
        for kernel in candidate.variant.disabled
        if (count := _count_skipped_layers(candidate, kernel)) > 1
    ]
    warnings += candidate.speculation.warnings
    if unknown_layers := [
        layer_kernel.layer for layer_kernel in evidence.kernels if layer_kernel.status == "unknown"
    ]:
        warnings.append(
            f"Which kernel computes {', '.join(unknown_layers[:3])} is not known; the start will"
            "  show."
        )
    if unknown_layers := sorted(
        {
            layer_attention.kind
            for layer_attention in evidence.attention
            if layer_attention.status == "unknown"
        }
    ):
        warnings.append(
            f"Which backend computes {', '.join(unknown_layers)} attention is not known; the start"
            "  will show."
        )
    return warnings


def _rule_warnings(candidate: Candidate) -> list[str]:
    """The warnings about guesses and missing rules."""
    spec = candidate.inputs.spec
    evidence = candidate.evidence
    built_model = candidate.built_model
    warnings = []
    if (spec.guessed or not built_model.is_known) and evidence.answer is None:
        guessed = (
            f"{', '.join(spec.guessed)} are guessed from the names of fields in config.json"
            if spec.guessed
            else ""
        )
        files = (
            ""
            if built_model.is_known
            else "sizes are those of its files, kernels are not predicted"
        )
        details = "; ".join(part for part in (guessed, files) if part)
        warnings.append(
            f"Layers of {spec.model_type} as these are not known here: {details}. --check asks the"
            " engine."
        )
    capability = candidate.gpus[0].capability if candidate.gpus else None
    if (
        candidate.engine.compiled
        and capability
        and binary_support(candidate.engine.compiled, capability) == "ptx"
    ):
        warnings.append(
            f"{candidate.engine.ref} holds no code for compute capability {capability}: the driver"
            " compiles what has PTX when it starts, and what has none fails."
        )
    if (guessed_from := candidate.engine.guessed_from) and evidence.answer is None:
        # An image of another name may say that it holds a version with rules.
        subject = (
            candidate.engine.ref
            if guessed_from != candidate.engine.ref
            else f"The image {candidate.engine.image}"
        )
        warnings.append(
            f"{subject} has no rules of its own: this is what {guessed_from} would do. Its own code"
            " was not asked."
        )
    if built_model.assumed:
        warnings.append(sentence(built_model.assumed))
    return warnings


def _load_warnings(candidate: Candidate) -> list[str]:
    """The warnings about quantization while loading, unequal stages, and expected speed."""
    spec = candidate.inputs.spec
    warnings = []
    if candidate.variant.quantization and spec.quant is None:
        quantization = candidate.variant.quantization
        warnings.append(
            f"The weights are quantized to {quantization} while they load, which costs some"
            " accuracy."
        )
    if len({gpu.name for gpu in candidate.gpus}) > 1:
        names = ", ".join(gpu.name for gpu in candidate.gpus)
        if candidate.variant.tp > 1:
            details = (
                "the KV cache is as large as on the one with the least memory, and the slowest sets"
                " the pace"
            )
        elif layers := candidate.variant.layers:
            details = f"they have {', '.join(map(str, layers))} layers"
        else:
            details = "each has as many layers, and the smallest and slowest sets the pace"
        parts = "ranks" if candidate.variant.tp > 1 else "stages"
        warnings.append(
            f"Its {parts} are on different GPUs ({names}): {details}. Kernels are listed"
            f" for {candidate.gpus[0].name}."
        )
    if candidate.inputs.adapters and candidate.inputs.speed_knowledge:
        warnings.append(
            "Its expected speed is that of the model alone; requests to adapters are slower."
        )
    return [*warnings, *_format_warnings(candidate)]


def _format_warnings(candidate: Candidate) -> list[str]:
    """The warning that this GPU has no products in the format of the weights."""
    table = candidate.inputs.gpus
    gpus = candidate.gpus
    if table is None or not gpus:
        return []
    formats = sorted(
        {
            lacking
            for kind in candidate.built_model.kinds
            if (lacking := table.widened_format(kind, gpus[0].capability))
        }
    )
    card = f"{gpus[0].name} (compute capability {gpus[0].capability})"
    return [
        f"The {name.upper()} weights are smaller, not faster: {card} widens them to 16 bits for"
        " every product."
        for name in formats
    ]


def _variable_warnings(candidate: Candidate) -> list[str]:
    """The warning for variables of FITSERVE_ENGINE_ENV with this engine's prefix that it lacks."""
    engine = candidate.engine
    inputs = candidate.inputs
    prefixes = candidate.rules.env_prefixes
    missing_names = [
        name
        for name in inputs.global_env
        if name.startswith(prefixes) and name not in inputs.wish.env
    ]
    return (
        [
            f"{', '.join(missing_names)} of FITSERVE_ENGINE_ENV is left out: {engine.ref} takes no"
            " such variable."
        ]
        if missing_names
        else []
    )


def _unfollowed_variables(candidate: Candidate) -> list[str]:
    """The warning for variables whose effect on kernels or memory the rules do not know."""
    names = candidate.rules.unfollowed_variables(candidate.inputs.wish.env)
    return (
        [
            f"{', '.join(names)} may change kernels or memory of {candidate.engine.ref} in ways"
            " that this forecast does not know; --check asks the engine."
        ]
        if names
        else []
    )


def _answer_limit_warnings(candidate: Candidate, sizes: Sizes) -> list[str]:
    """The warning that the model's own files end answers early."""
    limit = candidate.inputs.spec.answer_limit
    args = candidate.args
    if (
        limit is None
        or limit >= sizes.context.value
        or not candidate.rules.limits_answers
        or args.get("generation-config", "auto") != "auto"
        or "max_new_tokens" in str(args.get("override-generation-config", ""))
    ):
        return []
    return [
        f"Answers without `max_tokens` end after {limit} tokens: generation_config.json has"
        f' "max_new_tokens": {limit}, which {candidate.engine.ref} applies. --arg'
        " 'override-generation-config={\"max_new_tokens\": null}' lifts it."
    ]
