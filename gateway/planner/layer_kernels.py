"""The kernel of every linear layer of a model, by the rules of one engine version. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import combinations

from gateway.domain import LayerKernel, Refusal
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.kernels.expert_kernels import MoeChoice, MoeRules, choose_moe
from gateway.engines.common.kernels.linear import KernelChoice, choose
from gateway.engines.common.layers.built_model import Linear, parts, rank_shape, unit_parts
from gateway.engines.common.layers.weights import indivisible_scale
from gateway.models.experts import ExpertTraits
from gateway.models.rank import Rank
from gateway.models.scheme import LinearShape, MoeShape, Scheme, describe

# Inputs that share a scale in NVFP4.
_FP4_GROUP = 16


class ObservedRefusals:
    """Kernels that the engine refused although the rules accept them.

    refusals: scope (scheme as `describe`, k, n, kernel) and words. Equal objects are one cache key.
    """

    def __init__(self, refusals: Iterable[tuple[frozenset[tuple[str, str]], str]] = ()) -> None:
        self._refusals = tuple(refusals)
        self._hash = hash(self._refusals)
        # The first of equal scopes counts.
        self._numbers_by_scope = {
            scope: number for number, (scope, _) in reversed(list(enumerate(self._refusals)))
        }

    def refusal_text(self, layer: tuple[tuple[str, str], ...]) -> str | None:
        """The words of the first refusal whose whole scope is true of the layer."""
        parts = (
            frozenset(part) for size in range(len(layer) + 1) for part in combinations(layer, size)
        )
        number = min(
            (self._numbers_by_scope[part] for part in parts if part in self._numbers_by_scope),
            default=None,
        )
        return None if number is None else self._refusals[number][1]

    def __bool__(self) -> bool:
        return bool(self._refusals)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, ObservedRefusals) and self._refusals == other._refusals
        )


NO_REFUSALS = ObservedRefusals()


# A repaired cut, or a machine with the same GPUs, asks for the same layers again.
@lru_cache(maxsize=512)
def layer_kernels(
    layers: tuple[Linear, ...],
    rules: EngineRules,
    rank: Rank,
    forced_backend: str | None = None,
    *,
    experts: ExpertTraits | None = None,
    moe_backend: str | None = None,
    variables: frozenset[str] = frozenset(),
    refusals: ObservedRefusals = NO_REFUSALS,
) -> tuple[LayerKernel, ...]:
    """A row for each kind of layer.

    experts: traits beyond sizes; None: rows of quantized experts are unknown.
    moe_backend: --moe-backend.
    variables: the variables in the form that `choose` takes.
    """

    choose_linear = partial(
        choose,
        capability=rank.capability,
        forced_backend=forced_backend,
        variables=variables,
    )
    # Both products of experts have the same kernel.
    chosen_experts: dict[MoeShape, MoeChoice] = {}

    def choice(moe: MoeRules, shape: MoeShape) -> MoeChoice:
        if shape not in chosen_experts:
            chosen_experts[shape] = choose_moe(
                rules=moe,
                shape=shape,
                capability=rank.capability,
                packages=None,
                forced_backend=moe_backend,
                variables=variables,
            )
        return chosen_experts[shape]

    def kernel_row(layer: Linear) -> LayerKernel:
        if (
            layer.experts
            and experts is not None
            and rules.moe is not None
            and isinstance(layer.scheme, Scheme)
        ):
            return _expert_kernel(layer, layer.scheme, rank, experts, partial(choice, rules.moe))
        return _linear_kernel(
            layer=layer,
            rules=rules,
            rank=rank,
            choose_linear=choose_linear,
            traits=experts,
            refusals=refusals,
        )

    return tuple([kernel_row(layer) for layer in layers])


def _expert_kernel(
    layer: Linear,
    scheme: Scheme,
    rank: Rank,
    traits: ExpertTraits,
    choose_experts: Callable[[MoeShape], MoeChoice],
) -> LayerKernel:
    """The kernel of one product of the experts, or the reason why none is known or fits."""
    sizes = rank_shape(layer, rank.expert_parts)
    if sizes is None:
        return _refused_row(
            layer,
            k=None,
            n=None,
            status="none",
            reason=f"{layer.n} outputs and {layer.k} inputs cannot be cut for"
            f" {rank.expert_parts} ranks",
        )
    k, n = sizes
    first = layer.name.endswith(".w13")
    if not traits.function:
        reason = "the function between the experts' products is not known here"
        return _refused_row(layer, k, n, "unknown", reason)
    shape = _expert_shape(layer, scheme, rank, traits, sizes)
    choice = choose_experts(shape)
    crash = dict(choice.crashes).get("w13" if first else "w2")
    padded_sizes = None
    if choice.padded_to:
        grown_shape = shape._replace(hidden=choice.padded_to[0], intermediate=choice.padded_to[1])
        product = grown_shape.w13 if first else grown_shape.w2
        padded_sizes = (product.k, product.n) if (product.k, product.n) != (k, n) else None
    status = choice.status if choice.status != "crash" or crash else "ok"
    if status == "ok" and not first and (crash := _cut_expert_group(shape)):
        status = "crash"
    return LayerKernel(
        layer=layer.name,
        count=layer.count,
        k=k,
        n=n,
        scheme=describe(scheme),
        kernel=choice.kernel,
        status=status,
        padded_to=padded_sizes,
        refusals=choice.refusals,
        note=crash or ("" if choice.status == "crash" else choice.note),
        reason=choice.reason,
    )


def _cut_expert_group(shape: MoeShape) -> str:
    """The group of NVFP4 weights that two ranks would share, of which neither has the scale; "":
    none.

    Every class makes as many scales as a rank has whole groups. Kernels of the others fail in the
    profile run, or read wrong scales (code_sources.py of each kind).
    """
    if shape.scheme.kind != "nvfp4" or shape.intermediate % _FP4_GROUP == 0:
        return ""
    return (
        f"the intermediate size {shape.intermediate} of a rank is not a multiple of the group size"
        f" {_FP4_GROUP}"
    )


def _cut_group(scheme: Scheme, origin: str, k: int) -> str:
    """The group of inputs that ModelOpt's class does not find whole; "": none."""
    if scheme.kind != "nvfp4" or origin != "modelopt" or k % _FP4_GROUP == 0:
        return ""
    return f"K={k} is not a multiple of the group size {_FP4_GROUP}"


def _expert_shape(
    layer: Linear, scheme: Scheme, rank: Rank, traits: ExpertTraits, sizes: tuple[int, int]
) -> MoeShape:
    """The shape of the experts of a layer on one rank.

    sizes: inputs and outputs of the layer there.
    """
    k, n = sizes
    if layer.name.endswith(".w13"):
        is_gated = not traits.function.endswith("_no_mul")
        hidden, intermediate = k, max(n // (2 if is_gated else 1), 1)
    else:
        hidden, intermediate = n, k
    return MoeShape(
        hidden=hidden,
        intermediate=intermediate,
        experts=layer.experts,
        scheme=scheme,
        origin="" if scheme.kind == "unquantized" else traits.origin,
        dtype=rank.dtype,
        function=traits.function,
        bias=layer.bias,
        routing=traits.routing,
        family=traits.family,
        ep=rank.ep > 1,
        dp=rank.dp > 1,
        clamped=traits.clamped,
    )


def _linear_kernel(
    layer: Linear,
    rules: EngineRules,
    rank: Rank,
    choose_linear: Callable[..., KernelChoice],
    traits: ExpertTraits | None,
    refusals: ObservedRefusals,
) -> LayerKernel:
    """The kernel of a linear layer without experts, or the reason why none is known or fits."""
    scheme = layer.scheme
    k, n = rank_shape(layer, parts(layer, rank)) or (None, None)
    if not isinstance(scheme, Scheme):
        return _refused_row(layer, k, n, "unknown", scheme.reason)
    if k is None or n is None:
        reason = f"{layer.n} outputs and {layer.k} inputs cannot be cut for {rank.tp} ranks"
        return _refused_row(layer, k, n, "none", reason)
    if scheme.kind == "unquantized":
        return _unquantized_kernel(layer.name, layer.count, k, n)
    if layer.experts:
        return _refused_row(layer, k, n, "unknown", "kernels of experts are not known here")
    if rules.linear is None:
        return _refused_row(
            layer, k, n, "unknown", "kernels of this engine version are not known here"
        )
    origin = traits.origin if traits else ""
    if reason := indivisible_scale(layer, scheme, k, n) or _cut_group(scheme, origin, k):
        return _refused_row(layer, k, n, "none", reason)
    shape = LinearShape(
        k,
        n,
        scheme,
        rank.dtype,
        full_k=layer.k,
        full_n=layer.n,
        parts=_parts(layer, parts(layer, rank)),
        origin=origin,
        family=traits.family if traits else "",
    )

    def refused_before(kernel: str) -> str | None:
        if not refusals:
            return None
        return refusals.refusal_text(
            (("scheme", describe(scheme)), ("k", str(k)), ("n", str(n)), ("kernel", kernel))
        )

    choice = choose_linear(rules.linear, shape, refusals=refused_before)
    return LayerKernel(
        layer=layer.name,
        count=layer.count,
        k=k,
        n=n,
        scheme=describe(scheme),
        kernel=choice.kernel,
        status=choice.status,
        padded_to=choice.padded_to,
        refusals=choice.refusals,
        note=choice.note,
        reason=choice.reason,
    )


@lru_cache(maxsize=512)
def _unquantized_kernel(layer: str, count: int, k: int, n: int) -> LayerKernel:
    """All engine versions compute it alike."""
    return LayerKernel(
        layer=layer,
        count=count,
        k=k,
        n=n,
        scheme="unquantized",
        kernel="torch",
        status="ok",
        reason="its weights are not quantized",
    )


def _parts(layer: Linear, tp: int) -> tuple[int, ...]:
    """The outputs of each module on one rank; (): they are one to the engine, or its inputs are
    cut."""
    if layer.shard in ("replicated", "row"):
        return ()
    if layer.units:
        return unit_parts(layer, tp) or ()
    copy_count = max(1, tp // layer.kv_heads) if layer.shard == "qkv" and layer.kv_heads else 1
    return tuple(
        part * (copy_count if number else 1) // tp for number, part in enumerate(layer.parts)
    )


def _refused_row(
    layer: Linear, k: int | None, n: int | None, status: str, reason: str
) -> LayerKernel:
    scheme = describe(layer.scheme) if isinstance(layer.scheme, Scheme) else "unknown"
    refusals = (Refusal(kernel="", reason=reason),)
    fields = {
        "layer": layer.name,
        "count": layer.count,
        "k": k,
        "n": n,
        "scheme": scheme,
        "kernel": None,
    }
    return LayerKernel.model_validate({**fields, "status": status, "refused": refusals})
