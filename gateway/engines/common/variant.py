"""Variants of a model on an engine: the layout on GPUs, and changes of the engine's choices. Pure.

plain_variants(...)             -> the variants as the engine would run them
apply_former_concessions(variant, plan) -> the variant without the things that a plan gave up
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gateway.domain import Choice, Engine, Plan, Scalar, Wish
from gateway.models.rank import Rank

# Sizes of tensor parallelism that are tried.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
# Numbers of GPUs over which experts are spread while each computes separate attention.
_EXPERT_RANKS = (2, 4, 8)

# How destructive each change is; a plan's changes add up, and of two plans that else are equal the
# smaller sum wins.
_COST = {
    "disabled": 1,
    "backends": 1,
    "ep": 1,
    "pp": 1,
    "small": 1,
    "eager": 2,
    "dtype": 2,
    "kv_dtype": 3,
    "conservative": 4,
}
_COST |= {"quantization": 8, "layers": 0}

# The source of changes that save memory.
_MEMORY = "memory model"


@dataclass(frozen=True)
class Variant:
    """Layout and changes of a model on an engine.

    tp, pp: ranks of tensor and pipeline parallelism.
    dp: groups of `tp` ranks with requests of their own, which share the experts.
    ep: whole experts are spread over all ranks.
    dtype, quantization: "": as in the checkpoint.
    disabled: kernels for VLLM_DISABLED_KERNELS.
    backends: engine flags that force a kernel.
    layers: the number of layers of each stage; (): the engine splits them itself.
    small: whether a step has few sequences and tokens.
    eager: no graphs.
    conservative: both, and memory left free.
    reasons: reason and source of each difference from the plain variant.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    layers: tuple[int, ...] = ()
    ep: bool = False
    dtype: str = ""
    kv_dtype: str = "auto"
    quantization: str = ""
    disabled: tuple[str, ...] = ()
    backends: tuple[tuple[str, str], ...] = ()
    small: bool = False
    eager: bool = False
    conservative: bool = False
    reasons: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False, hash=False)

    @property
    def ranks(self) -> int:
        """Number of its GPUs."""
        return self.tp * self.pp * self.dp

    @property
    def cost(self) -> int:
        return sum(_COST[name] for name in self.reasons)

    @property
    def changes(self) -> int:
        """Number of changes. Pipeline stages are a layout, as tensor parallelism is, so they do not
        count."""
        return len(self.reasons.keys() - {"layers", "pp"})

    @property
    def gives_up(self) -> bool:
        """Something that is missed while it serves, for memory: concurrent requests, precision of
        the KV cache, graphs."""
        return bool({"small", "kv_dtype", "eager"} & self.reasons.keys())

    def rank(self, dtype: str, capability: str | None) -> Rank:
        """One of its ranks, with activations in `dtype`."""
        rank_count = self.tp * self.dp if self.ep else 1
        return Rank(
            tp=self.tp,
            pp=self.pp,
            ep=rank_count,
            dtype=dtype,
            kv_dtype=self.kv_dtype,
            capability=capability or "",
            dp=self.dp,
        )

    def backend(self, flag: str) -> str | None:
        return dict(self.backends).get(flag)

    def add_change(self, name: str, value: object, reason: str, source: str) -> Variant:
        """The variant with one more change and its reason."""
        return Variant(
            **{**vars(self), "reasons": {**self.reasons, name: (reason, source)}, name: value}
        )


class Layouts(NamedTuple):
    """Layouts that a model and an engine allow.

    gpus: the most.
    sufficient: ranks of tensor parallelism that hold the KV heads of this many GPUs without
        repeating any; None: ranks cannot form groups with requests of their own.
    counts_groups: the engine's tensor parallel size counts the ranks of all groups.
    """

    gpus: int
    sufficient: Callable[[int], int] | None = None
    counts_groups: bool = False


def plain_variants(
    engine: Engine,
    layouts: Layouts,
    args: Mapping[str, Scalar],
    wish: Wish,
    kv_dtype: str = "auto",
) -> tuple[Variant, ...]:
    """The variants with no change beyond the user's flags (`args`, by canonical names). kv_dtype:
    the checkpoint's."""
    set_by_user = Variant(
        pp=int(args.get("pipeline-parallel-size", 1)),
        ep=bool(_spreads_experts(args)),
        kv_dtype=_kv_dtype(str(args.get("kv-cache-dtype", "auto")), kv_dtype),
        quantization=str(args.get("quantization", "")),
        backends=tuple(
            (name, str(args[name]))
            for name in ("linear-backend", "moe-backend")
            if args.get(name, "auto") != "auto"
        ),
    )
    if engine.device == "cpu":
        size = args.get("tensor-parallel-size", wish.tensor_parallel) or 1
        groups = args.get("data-parallel-size", wish.data_parallel) or 1
        return (replace(set_by_user, tp=int(size), dp=int(groups)),)
    variants = tuple(_layout_variants(set_by_user, layouts, args, wish))
    # Whole experts have an effect only where there are ranks to spread them over.
    spread = tuple(variant for variant in variants if variant.tp * variant.dp > 1)
    return spread if set_by_user.ep and spread else variants


def _layout_variants(
    plain_variant: Variant, layouts: Layouts, args: Mapping[str, Scalar], wish: Wish
) -> Iterator[Variant]:
    """The layouts of the user's sizes, or all that the GPUs allow: tensor parallel ones first."""
    tensor_parallel = args.get("tensor-parallel-size", wish.tensor_parallel)
    data_parallel = args.get("data-parallel-size", wish.data_parallel)
    groups = int(data_parallel or 1)
    experts = _spreads_experts(args)
    if tensor_parallel is not None and layouts.counts_groups and "tensor-parallel-size" in args:
        tensor_parallel = max(1, int(tensor_parallel) // groups)
    limit = max(1, layouts.gpus // plain_variant.pp // groups)
    sizes = (
        tuple(size for size in SIZES if size <= limit)
        if tensor_parallel is None
        else (int(tensor_parallel),)
    )
    has_whole_experts = plain_variant.ep if groups == 1 else experts is not False
    yield from (replace(plain_variant, tp=size, dp=groups, ep=has_whole_experts) for size in sizes)
    is_free = (
        tensor_parallel is None
        and data_parallel is None
        and plain_variant.pp == 1
        and experts is not False
    )
    if layouts.sufficient is None or not is_free:
        return
    for ranks in _EXPERT_RANKS:
        tp = layouts.sufficient(ranks)
        if ranks <= limit and tp < ranks:
            yield replace(plain_variant, tp=tp, dp=ranks // tp, ep=True)


def _spreads_experts(args: Mapping[str, Scalar]) -> bool | None:
    """Whether the user has whole experts spread over ranks: a switch, or a number of ranks."""
    value = args.get("enable-expert-parallel")
    return value if value is None or isinstance(value, bool) else int(value) > 1


def apply_former_concessions(variant: Variant, plan: Plan) -> Variant:
    """The variant with the changes that `plan` made for lack of memory.

    The memory of today is not considered.
    """
    batch = (
        plan.max_num_seqs if plan.max_num_seqs.source == _MEMORY else plan.max_num_batched_tokens
    )
    choices: dict[str, tuple[object, Choice[Any]]] = {
        "small": (True, batch),
        "eager": (True, plan.enforce_eager),
        "kv_dtype": (plan.kv_cache_dtype.value, plan.kv_cache_dtype),
        "quantization": (plan.quantization.value, plan.quantization),
        "pp": (plan.pipeline_parallel.value, plan.pipeline_parallel),
    }
    for name, (value, choice) in choices.items():
        if choice.source == _MEMORY:
            variant = variant.add_change(name, value, choice.reason, choice.source)
    return variant


def _kv_dtype(users: str, declared_dtype: str) -> str:
    return declared_dtype if users == "auto" else users
