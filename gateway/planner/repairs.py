"""Changes of a variant after a refusal, or for a longer context. Pure.

    repairs(variant, refusal, ...)                          variants that may cure the refusal
    longer_variants(variant, context, context_wanted, ...)  variants that may have a longer context

A repair changes one thing, and never a flag of the user.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from gateway.domain import Engine
from gateway.domain.record import FrozenRecord
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.variant import Variant

# A trait of engine versions that hold all weights in 16 bits before they quantize the first.
LATE_QUANTIZATION_TRAIT = "quantizes_late"

# Changes of one variant; more would be a search for its own sake.
_MAX_CHANGES = 3


class _RefusedVariant(FrozenRecord, frozen=True):
    """A refused variant of one engine version, and the flags that the user set."""

    variant: Variant
    refusal: RefusalError
    engine: Engine
    rules: EngineRules
    max_gpus: int
    args: Collection[str]
    is_quantized: bool

    @property
    def reason(self) -> str:
        return str(self.refusal)

    @property
    def concerns_experts(self) -> bool:
        return bool(self.refusal.layer and ".experts" in self.refusal.layer)

    @property
    def may_set_sizes(self) -> bool:
        """Whether the user left tensor and pipeline parallelism to the planner."""
        sizes = {"tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"}
        return not sizes & set(self.args)


def repairs(
    variant: Variant,
    refusal: RefusalError,
    engine: Engine,
    rules: EngineRules,
    max_gpus: int,
    args: Collection[str],
    *,
    is_quantized: bool,
) -> Iterator[Variant]:
    """Variants that differ in one thing, which may cure this refusal.

    args: flags that the user set. The search tries each variant, so a useless repair is refused.
    """
    if variant.changes >= _MAX_CHANGES:
        return
    refused_variant = _RefusedVariant(
        variant=variant,
        refusal=refusal,
        engine=engine,
        rules=rules,
        max_gpus=max_gpus,
        args=args,
        is_quantized=is_quantized,
    )
    backend = "moe-backend" if refused_variant.concerns_experts else "linear-backend"
    forced_backend = variant.backend(backend) if "backends" in variant.reasons else None
    if (
        forced_backend
        and refusal.layer
        and refusal.verdict in ("no_kernel", "known_bad", "runtime_fail")
    ):
        return  # this replacement of a kernel does not compute the layer; another one may
    yield from _kernel_repairs(refused_variant)
    yield from _parallelism_repairs(refused_variant)
    yield from _backend_and_dtype_repairs(refused_variant)
    if refusal.verdict == "no_memory":
        yield from _memory_repairs(refused_variant)


def _kernel_repairs(refused_variant: _RefusedVariant) -> Iterator[Variant]:
    """Fewer demands, another kernel, whole experts, or float16 activations."""
    variant = refused_variant.variant
    refusal = refused_variant.refusal
    args = refused_variant.args
    experts = refused_variant.concerns_experts
    reason = refused_variant.reason
    if (
        refusal.verdict == "known_bad"
        and refusal.repair.kernel is None
        and not variant.conservative
    ):
        yield variant.add_change(
            "conservative", True, "fewer demands, because the plan without this failed", "fact"
        )
    failing = refusal.repair.kernel or (
        variant.disabled[-1] if refusal.verdict == "no_kernel" and variant.disabled else None
    )
    if refusal.verdict in ("known_bad", "runtime_fail", "no_kernel") and failing is not None:
        yield from _other_kernel(
            variant,
            failing,
            refused_variant.engine,
            refused_variant.rules,
            args,
            has_experts=experts,
            reason=reason,
        )
    divided = (
        refusal.verdict in ("no_kernel", "runtime_fail", "illegal_parallelism")
        and experts
        and variant.tp > 1
        and not variant.ep
    )
    flag = "enable-expert-parallel"
    if divided and has(refused_variant.engine, flag) and flag not in args:
        yield variant.add_change(
            "ep",
            True,
            f"whole experts on each GPU, because cut ones have no kernel: {reason}",
            refusal.source,
        )
    if (
        refusal.verdict == "no_kernel"
        and refusal.layer
        and not experts
        and not variant.dtype
        and "dtype" not in args
    ):
        yield variant.add_change(
            "dtype",
            "float16",
            f"a kernel that needs float16 activations takes the layer: {reason}",
            refusal.source,
        )


def _parallelism_repairs(refused_variant: _RefusedVariant) -> Iterator[Variant]:
    """Stages instead of divided layers."""
    variant = refused_variant.variant
    refusal = refused_variant.refusal
    max_gpus = refused_variant.max_gpus
    repair_reason = refused_variant.reason
    if variant.pp * variant.dp > 1 or not refused_variant.may_set_sizes:
        return
    if not has(refused_variant.engine, "pipeline-parallel-size"):
        return
    if refusal.verdict == "no_kernel" and variant.tp > 1:
        whole_variant = variant.add_change(
            "pp",
            variant.tp,
            f"whole layers on each GPU, because a cut one has no kernel: {repair_reason}",
            refusal.source,
        )
        yield replace(whole_variant, tp=1)
    if refusal.verdict == "illegal_parallelism" and variant.tp == max_gpus:
        for size in range(max_gpus - 1, 0, -1):
            if max_gpus % size == 0:
                reason = (
                    f"stages of {size} GPUs: {repair_reason}"
                    if size > 1
                    else f"a stage on each GPU: {repair_reason}"
                )
                yield replace(
                    variant.add_change("pp", max_gpus // size, reason, refusal.source), tp=size
                )


def _backend_and_dtype_repairs(refused_variant: _RefusedVariant) -> Iterator[Variant]:
    """Another attention backend, or activations that the quantization takes."""
    variant = refused_variant.variant
    refusal = refused_variant.refusal
    args = refused_variant.args
    reason = refused_variant.reason
    if (
        refusal.verdict == "no_backend"
        and not variant.backend("attention-backend")
        and not _forces_attention(args)
    ):
        for name in refused_variant.rules.attention_repairs:
            yield variant.add_change(
                "backends",
                (*variant.backends, ("attention-backend", name)),
                f"the engine's own choice of a backend would fail: {reason}",
                refusal.source,
            )
    for dtype in refusal.repair.dtypes:
        # float32 would double every size for a method that exists to halve them.
        if dtype != "float32" and not variant.dtype and "dtype" not in args:
            yield variant.add_change(
                "dtype", dtype, f"activations that the quantization takes: {reason}", refusal.source
            )


def _memory_repairs(refused_variant: _RefusedVariant) -> Iterator[Variant]:
    """Fewer demands, a smaller cache, smaller batches, more stages, or halved weights."""
    variant = refused_variant.variant
    refusal = refused_variant.refusal
    engine = refused_variant.engine
    args = refused_variant.args
    reason = refused_variant.reason
    if refusal.source == "fact" and not variant.conservative:
        # The batch or the graphs may have been too large.
        yield variant.add_change(
            "conservative",
            True,
            f"fewer demands, because memory ran out without this: {reason}",
            "fact",
        )
    if refusal.repair.may_shrink_cache:
        yield from _half_cache(
            variant, engine, args, f"the context asked for does not fit otherwise: {reason}"
        )
    if _is_near(refusal):
        yield from smaller(variant, engine, args, reason)
    flag = "pipeline-parallel-size"
    stages_help = variant.pp * variant.dp == 1 and not (variant.small or variant.eager)
    if has(engine, flag) and flag not in args and stages_help:
        for stages in _stages(refusal, refused_variant.max_gpus // variant.tp):
            yield variant.add_change(
                "pp", stages, f"the layers are shared by {stages} stages: {reason}", "memory model"
            )
    is_halved = (
        not refused_variant.is_quantized
        and engine.device == "cuda"
        and LATE_QUANTIZATION_TRAIT not in engine.traits
    )
    if is_halved and not variant.quantization and "quantization" not in args:
        yield variant.add_change(
            "quantization", "fp8", f"weights are halved while they load: {reason}", "memory model"
        )


def longer_variants(
    variant: Variant,
    context: int,
    context_wanted: int,
    engine: Engine,
    max_gpus: int,
    args: Collection[str],
) -> Iterator[Variant]:
    """Variants that differ in one thing, which may have a longer context than this one, whose
    `context` is less than `context_wanted`."""
    if context >= context_wanted or variant.changes >= _MAX_CHANGES:
        return
    reason = f"{context} tokens of context fit otherwise"
    yield from smaller(variant, engine, args, reason)
    stages = variant.pp + 1
    # A refusal of uneven stages does not rule out one more stage. A search over even stages leads
    # there.
    are_sizes_fixed = (
        "pipeline-parallel-size" in args
        or not has(engine, "pipeline-parallel-size")
        or variant.layers
        or variant.dp > 1
    )
    if (
        not are_sizes_fixed
        and not variant.small
        and engine.device == "cuda"
        and variant.tp * stages <= max_gpus
    ):
        yield variant.add_change(
            "pp", stages, f"the layers are shared by {stages} stages: {reason}", "memory model"
        )


def smaller(
    variant: Variant, engine: Engine, args: Collection[str], reason: str
) -> Iterator[Variant]:
    """The variants that give up one thing: concurrent requests, then KV precision or graphs.

    Flags of the user stay.
    """
    if engine.device != "cuda" or variant.conservative or "quantization" in variant.reasons:
        return
    if not variant.small and "max-num-seqs" not in args:
        yield variant.add_change(
            "small",
            True,
            f"fewer concurrent requests, which leaves memory for long ones: {reason}",
            "memory model",
        )
        return
    yield from _half_cache(variant, engine, args, reason)
    if not variant.eager and "enforce-eager" not in args and has(engine, "enforce-eager"):
        yield variant.add_change(
            "eager",
            True,
            f"no CUDA graphs, which costs speed and frees their memory: {reason}",
            "memory model",
        )


def _half_cache(
    variant: Variant, engine: Engine, args: Collection[str], repair_reason: str
) -> Iterator[Variant]:
    flag = engine.flags.get(engine.spelling.get("kv-cache-dtype", "kv-cache-dtype"))
    # SGLang has no plain name for the usual one of the two.
    half = next(
        (name for name in ("fp8", "fp8_e4m3") if flag and name in (flag.choices or ())), None
    )
    if (
        half
        and variant.kv_dtype == "auto"
        and "kv-cache-dtype" not in args
        and engine.device == "cuda"
    ):
        reason = f"half the bytes per token, which costs some accuracy: {repair_reason}"
        yield variant.add_change("kv_dtype", half, reason, "memory model")


def _stages(refusal: RefusalError, max_stages: int) -> list[int]:
    """The numbers of stages worth a look: the least that could hold the weights, one more for
    memory besides them, and all GPUs."""
    memory = refusal.evidence.memory
    capacity = memory.budget_bytes - memory.overhead_bytes if memory else 0
    min_stages = (
        max(2, math.ceil(memory.weights_bytes / capacity)) if memory and capacity > 0 else 2
    )
    return sorted(
        {stages for stages in (min_stages, min_stages + 1, max_stages) if 2 <= stages <= max_stages}
    )


def _is_near(refusal: RefusalError) -> bool:
    """Whether the weights have room, so that less memory for other things may help. After a start
    that took too much, "conservative" is the smaller variant."""
    memory = refusal.evidence.memory
    return (
        memory is not None
        and refusal.source != "fact"
        and memory.weights_bytes + memory.overhead_bytes < memory.budget_bytes
    )


def _forces_attention(args: Collection[str]) -> bool:
    return any(flag.endswith("attention-backend") for flag in args)


def has(engine: Engine, flag: str) -> bool:
    """Whether this version has the flag with this canonical name."""
    return engine.spelling.get(flag, flag) in engine.flags


def _other_kernel(
    variant: Variant,
    kernel: str,
    engine: Engine,
    rules: EngineRules,
    args: Collection[str],
    *,
    has_experts: bool,
    reason: str,
) -> Iterator[Variant]:
    """The variant without this kernel, by the flags and variables that the engine version has for
    that."""
    if not rules.has_rules:
        return
    can_disable = not has_experts and rules.disabled_kernels_env in engine.user_env
    if can_disable and kernel not in variant.disabled:
        # Where that leaves a layer without a kernel, or the engine ignores it, its refusal
        # leads here again.
        disabled = (*variant.disabled, kernel)
        yield variant.add_change("disabled", disabled, f"{kernel} is left out: {reason}", "fact")
        return
    flag = "moe-backend" if has_experts else "linear-backend"
    option = engine.flags.get(engine.spelling.get(flag, flag))
    if flag in args or option is None or variant.backend(flag):
        return
    for name in _backends_without_kernel(
        option.choices or (), kernel, rules, has_experts=has_experts
    ):
        backends = (*variant.backends, (flag, name))
        yield variant.add_change("backends", backends, f"{kernel} is passed over: {reason}", "fact")


def _backends_without_kernel(
    choices: Iterable[str], kernel: str, rules: EngineRules, *, has_experts: bool
) -> Iterator[str]:
    """The choices of a backend flag that do not take this kernel."""
    kernels_by_backend = rules.linear.backends if rules.linear else {}
    # The rules of experts describe those backends only that some quantization method can be forced
    # to take.
    forced_backends = (
        {name for method in rules.moe.methods for name in method.backends_by_flag}
        if has_experts and rules.moe
        else None
    )
    for name in choices:
        is_described = forced_backends is None or name in forced_backends
        if is_described and name != "auto" and kernel not in kernels_by_backend.get(name, ()):
            yield name
