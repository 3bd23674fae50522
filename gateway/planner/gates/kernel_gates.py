"""Gates of kernels and attention backends, by rules and by facts of this machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Engine, Fact, Gpu, LayerKernel
from gateway.engines.common.refusal import Refused, VariantEvidence
from gateway.planner.layer_kernels import ObservedRefusals


def gate_kernels(
    evidence: VariantEvidence, engine: Engine, facts: KnownFacts, capability: str | None
) -> None:
    """Refuse a layer without a kernel or backend, then one that is known to fail.

    The order matters: an engine refuses a missing kernel in any case, and other changes cure it.
    """
    source = f"profile {engine.ref}"
    for row in evidence.kernels:
        if row.status == "none":
            refusal_words = "; ".join(
                f"{refusal.kernel}: {refusal.reason}".removeprefix(": ") for refusal in row.refused
            )
            raise Refused(
                "no_kernel",
                f"no kernel for {row.layer}{_size(row)}: {refusal_words}",
                source,
                layer=row.layer,
            )
        if row.status == "crash":
            reason = (
                f"it loads, but {row.kernel} would crash at the first request in"
                f" {row.layer}{_size(row)}: {row.note}"
            )
            raise Refused("runtime_fail", reason, source, layer=row.layer, kernel=row.kernel)
    # Most machines have no such fact. This question is asked once, before the loop over the layers.
    may_fail = facts.may_hold("kernel_fails", "engine", engine.ref) and facts.may_hold(
        "kernel_fails", "capability", capability
    )
    for row in evidence.kernels if may_fail else ():
        suspected = row.kernel is not None and facts.may_hold("kernel_fails", "kernel", row.kernel)
        if suspected and (fact := _failure_fact(row, engine, facts, capability)):
            reason = (
                f"{row.kernel}, which {row.layer}{_size(row)} would get, is known to fail here:"
                f" {fact.source}"
            )
            raise Refused("known_bad", reason, "fact", layer=row.layer, kernel=row.kernel)
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
    for layers in evidence.attention:
        if layers.status == "none":
            refusal_words = "; ".join(
                f"{refusal.kernel}: {refusal.reason}".removeprefix(": ")
                for refusal in layers.refused
            )
            reason = (
                f"no attention backend for the {layers.layers} {layers.kind} layers of head size"
                f" {layers.head_dim}: {refusal_words}"
            )
            raise Refused("no_backend", reason, source)
        if not may_fail:
            continue
        scope = {
            "kernel": layers.backend,
            "engine": engine.ref,
            "capability": capability,
            "head_dim": str(layers.head_dim),
        }
        if facts.may_hold("kernel_fails", "head_dim", str(layers.head_dim)) and (
            fact := matching_fact(facts, "kernel_fails", scope)
        ):
            reason = (
                f"{layers.backend}, which heads of size {layers.head_dim} would get, is known to"
                f" fail here: {fact.source}"
            )
            raise Refused("known_bad", reason, "fact")


def _size(row: LayerKernel) -> str:
    return f" (K={row.k}, N={row.n} per rank)" if row.k else ""


def _failure_fact(
    row: LayerKernel, engine: Engine, facts: KnownFacts, capability: str | None
) -> Fact | None:
    scope = {
        "kernel": row.kernel,
        "engine": engine.ref,
        "capability": capability,
        "scheme": row.scheme,
    }
    scope |= {"k": str(row.k), "n": str(row.n)}
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


def gate_same_kernels(first: VariantEvidence, second: VariantEvidence, gpus: Sequence[Gpu]) -> None:
    """Refuse ranks of one stage whose kernels differ: all processes ask the first visible GPU."""
    for layer, counterpart in zip(first.kernels, second.kernels, strict=True):
        if layer.kernel != counterpart.kernel:
            names = " and ".join(f"{gpu.name} ({gpu.capability})" for gpu in gpus)
            reason = (
                f"ranks on {names} would need different kernels for {layer.layer}: {layer.kernel}"
                f" and {counterpart.kernel}. All ranks ask the first GPU"
            )
            raise Refused("no_kernel", reason, "vllm/platforms/cuda.py", layer=layer.layer)


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
        raise Refused("no_backend", reason, "planner")
