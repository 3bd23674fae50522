"""Gates of kernels and attention backends, by rules and by facts of this machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Engine, Fact, Gpu, LayerKernel
from gateway.engines.common.refusal import RefusalError, RepairHint, VariantEvidence
from gateway.engines.registry import engine_kind
from gateway.planner.layer_kernels import ObservedRefusals


def gate_kernels(
    evidence: VariantEvidence, engine: Engine, facts: KnownFacts, capability: str | None
) -> None:
    """Refuse a layer without a kernel or backend, then one that would crash or is known to fail.

    The order matters: an engine refuses a missing kernel in any case, and other changes cure it.
    """
    source = f"profile {engine.ref}"
    for layer_kernel in evidence.kernels:
        if layer_kernel.status == "none":
            refusal_words = "; ".join(
                f"{refusal.kernel}: {refusal.reason}".removeprefix(": ")
                for refusal in layer_kernel.refusals
            )
            raise RefusalError(
                "no_kernel",
                f"no kernel for {layer_kernel.layer}{_size_words(layer_kernel)}: {refusal_words}",
                source,
                layer=layer_kernel.layer,
            )
    for layer_kernel in evidence.kernels:
        if layer_kernel.status == "crash":
            reason = (
                f"it loads, but {layer_kernel.kernel} would crash at the first request in"
                f" {layer_kernel.layer}{_size_words(layer_kernel)}: {layer_kernel.note}"
            )
            raise RefusalError(
                "runtime_fail",
                reason,
                source,
                layer=layer_kernel.layer,
                repair=RepairHint(kernel=layer_kernel.kernel),
            )
    # Most machines have no such fact. This question is asked once, before the loop over the layers.
    may_fail = facts.may_hold("kernel_fails", "engine", engine.ref) and facts.may_hold(
        "kernel_fails", "capability", capability
    )
    for layer_kernel in evidence.kernels if may_fail else ():
        suspected = layer_kernel.kernel is not None and facts.may_hold(
            "kernel_fails", "kernel", layer_kernel.kernel
        )
        if suspected and (fact := _failure_fact(layer_kernel, engine, facts, capability)):
            reason = (
                f"{layer_kernel.kernel}, which {layer_kernel.layer}{_size_words(layer_kernel)}"
                " would get, is known to fail here:"
                f" {fact.source}"
            )
            raise RefusalError(
                "known_bad",
                reason,
                "fact",
                layer=layer_kernel.layer,
                repair=RepairHint(kernel=layer_kernel.kernel),
            )
    _gate_attention(evidence, engine, facts, capability, may_fail=bool(may_fail))


def _gate_attention(
    evidence: VariantEvidence,
    engine: Engine,
    facts: KnownFacts,
    capability: str | None,
    *,
    may_fail: bool,
) -> None:
    """Refuse layers without an attention backend, then a backend that is known to fail.

    may_fail: facts about failing kernels exist.
    """
    source = f"profile {engine.ref}"
    for layer_attention in evidence.attention:
        if layer_attention.status == "none":
            refusal_words = "; ".join(
                f"{refusal.kernel}: {refusal.reason}".removeprefix(": ")
                for refusal in layer_attention.refusals
            )
            reason = (
                f"no attention backend for the {layer_attention.layers} {layer_attention.kind}"
                " layers of head size"
                f" {layer_attention.head_dim}: {refusal_words}"
            )
            raise RefusalError("no_backend", reason, source)
        if not may_fail:
            continue
        scope = {
            "kernel": layer_attention.backend,
            "engine": engine.ref,
            "capability": capability,
            "head_dim": str(layer_attention.head_dim),
        }
        if facts.may_hold("kernel_fails", "head_dim", str(layer_attention.head_dim)) and (
            fact := matching_fact(facts, "kernel_fails", scope)
        ):
            reason = (
                f"{layer_attention.backend}, which heads of size {layer_attention.head_dim} would"
                " get, is known to"
                f" fail here: {fact.source}"
            )
            raise RefusalError("known_bad", reason, "fact")


def _size_words(layer_kernel: LayerKernel) -> str:
    return f" (K={layer_kernel.k}, N={layer_kernel.n} per rank)" if layer_kernel.k else ""


def _failure_fact(
    layer_kernel: LayerKernel, engine: Engine, facts: KnownFacts, capability: str | None
) -> Fact | None:
    scope = {
        "kernel": layer_kernel.kernel,
        "engine": engine.ref,
        "capability": capability,
        "scheme": layer_kernel.scheme,
    }
    scope |= {"k": str(layer_kernel.k), "n": str(layer_kernel.n)}
    return matching_fact(facts, "kernel_fails", scope)


def refused_before(facts: KnownFacts, engine: Engine, capability: str) -> ObservedRefusals:
    """Layers that this engine version refused although the rules accept them."""
    scope = {"engine": engine.ref, "capability": capability}
    return ObservedRefusals(
        (
            frozenset(fact.scope.items() - scope.items()),
            f"refused such a layer here before: {fact.source}",
        )
        for fact in facts.select_kind("kernel_refuses")
        if all(fact.scope.get(name, value) == value for name, value in scope.items())
    )


def matching_fact(facts: KnownFacts, kind: str, scope: Mapping[str, str | None]) -> Fact | None:
    """The first fact of this kind that holds and is about more than an engine version."""
    return next(
        (fact for fact in facts.holding(kind, scope) if fact.scope.keys() - {"engine"}), None
    )


def gate_same_kernels(
    first: VariantEvidence, second: VariantEvidence, gpus: Sequence[Gpu], engine: Engine
) -> None:
    """Refuse ranks of one stage whose kernels differ: all processes ask the first visible GPU."""
    for layer, counterpart in zip(first.kernels, second.kernels, strict=True):
        if layer.kernel != counterpart.kernel:
            names = " and ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus)
            reason = (
                f"ranks on {names} would need different kernels for {layer.layer}: {layer.kernel}"
                f" and {counterpart.kernel}. All ranks ask the first GPU"
            )
            source = engine_kind(engine.kind).code_sources.unlike_ranks
            raise RefusalError("no_kernel", reason, source, layer=layer.layer)


def gate_alike(first: VariantEvidence, second: VariantEvidence, gpu: Gpu) -> None:
    """Refuse stages with different caches: the engine counts blocks once for all stages."""
    first_caches, second_caches = (
        {
            (row.kind, row.head_dim): f"{row.backend} in blocks of {row.block}"
            for row in kernel.attention
            if row.kind != "vision"
        }
        for kernel in (first, second)
    )
    if first_caches != second_caches:
        reason = (
            f"its GPUs would keep their caches unlike: on {gpu.name}"
            f" {', '.join(second_caches.values())}, else {', '.join(first_caches.values())}"
        )
        raise RefusalError("no_backend", reason, "planner")
