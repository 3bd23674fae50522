"""The kernel of every linear layer of a model, by the rules of one engine version. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.layers import Linear, per_rank
from gateway.core.linear import LinearRules, LinearShape, Scheme, choose
from gateway.domain import LayerKernel, Refusal


@dataclass(frozen=True)
class Rules:
    """What is known of how one engine version computes: `linear` from its linear.yaml, `traits` from its profile."""

    linear: LinearRules
    traits: frozenset[str] = frozenset()


def layer_kernels(
    layers: tuple[Linear, ...],
    rules: Rules,
    tp: int,
    dtype: str,
    capability: str,
    disabled: frozenset[str] = frozenset(),
    forced: str | None = None,
) -> tuple[LayerKernel, ...]:
    """One row for each kind of layer.

    Experts have other kernels than dense layers; their rows are "unknown" until there are rules for them.
    """
    return tuple(_row(layer, rules, tp, dtype, capability, disabled, forced) for layer in layers)


def _row(
    layer: Linear, rules: Rules, tp: int, dtype: str, capability: str, disabled: frozenset[str], forced: str | None
) -> LayerKernel:
    sizes = per_rank(layer, tp)
    scheme = layer.scheme
    k, n = sizes or (None, None)
    if not isinstance(scheme, Scheme):
        return _plain(layer, k, n, "unknown", scheme.reason)
    if k is None or n is None:
        return _plain(layer, k, n, "none", f"{layer.n} outputs and {layer.k} inputs cannot be cut for {tp} ranks")
    if scheme.kind == "unquantized":
        return LayerKernel(layer=layer.name, count=layer.count, k=k, n=n, scheme="unquantized", kernel="torch", status="ok")
    if layer.experts:
        return _plain(layer, k, n, "unknown", "kernels of experts are not known here")
    choice = choose(
        rules.linear, LinearShape(k=k, n=n, scheme=scheme, dtype=dtype, full_k=layer.k), capability, None, disabled, forced
    )
    return LayerKernel(
        layer=layer.name,
        count=layer.count,
        k=k,
        n=n,
        scheme=described(scheme),
        kernel=choice.kernel,
        status=choice.status,
        padded_to=choice.padded_to,
        refused=tuple(Refusal(kernel=one.kernel, reason=one.reason) for one in choice.refused),
    )


def _plain(layer: Linear, k: int | None, n: int | None, status: str, reason: str) -> LayerKernel:
    scheme = described(layer.scheme) if isinstance(layer.scheme, Scheme) else "unknown"
    refused = (Refusal(kernel="", reason=reason),)
    fields = {"layer": layer.name, "count": layer.count, "k": k, "n": n, "scheme": scheme, "kernel": None}
    return LayerKernel.model_validate({**fields, "status": status, "refused": refused})


def described(scheme: Scheme) -> str:
    """A scheme in a word or two: `wna16 4-bit g128 act-order`."""
    words: list[str] = [scheme.kind]
    if scheme.kind in ("wna16", "w8a16", "w4a8"):
        words += [f"{scheme.bits}-bit", "channel" if scheme.group < 0 else f"g{scheme.group}"]
        words += ["act-order"] if scheme.act_order else []
        words += [] if scheme.symmetric else ["zero points"]
    return " ".join(words)
