"""Variants of a model on an engine: the layout on GPUs, and changes of the engine's choices. Pure.

plain(...)             -> the variants as the engine would run them
given_up(variant, plan) -> the variant with what a plan gave up for memory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.domain import Choice, Engine, Plan, Scalar
from gateway.models.rank import Rank

# Sizes of tensor parallelism that are tried.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8)

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

    tp, pp: ranks of tensor and pipeline parallelism. ep: whole experts are spread over the tensor
    parallel ranks. dtype, quantization: "": as in the checkpoint. disabled: kernels for
    VLLM_DISABLED_KERNELS. backends: engine flags that force a kernel. layers: of each stage, if the
    engine is told; (): the engine's own split. small: few sequences and tokens at once. eager: no
    graphs. conservative: both, and memory left free. reasons: for each difference from the
    plain variant.
    """

    tp: int = 1
    pp: int = 1
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
    def cost(self) -> int:
        return sum(_COST[name] for name in self.reasons)

    @property
    def changes(self) -> int:
        """Number of changes. Pipeline stages are a layout, as tensor parallelism is, so they do not
        count."""
        return len(self.reasons.keys() - {"layers", "pp"})

    @property
    def gives_up(self) -> bool:
        """Something that is missed while it serves, for memory: requests at once, precision of the
        KV cache, graphs."""
        return bool({"small", "kv_dtype", "eager"} & self.reasons.keys())

    def rank(self, dtype: str, capability: str | None) -> Rank:
        """One of its ranks, with activations in `dtype`."""
        return Rank(
            self.tp, self.pp, self.tp if self.ep else 1, dtype, self.kv_dtype, capability or ""
        )

    def backend(self, flag: str) -> str | None:
        return dict(self.backends).get(flag)

    def changed(self, name: str, value: object, reason: str, source: str) -> Variant:
        """The variant with one more change and its reason."""
        return Variant(
            **{**vars(self), "reasons": {**self.reasons, name: (reason, source)}, name: value}
        )


def plain(
    engine: Engine,
    gpus: int,
    args: Mapping[str, Scalar],
    tensor_parallel: int | None,
    kv_dtype: str = "auto",
) -> tuple[Variant, ...]:
    """The variants with no change beyond the user's flags (`args`, by canonical names). kv_dtype:
    the checkpoint's."""
    set_by_user = Variant(
        pp=int(args.get("pipeline-parallel-size", 1)),
        ep=bool(args.get("enable-expert-parallel", False)),
        kv_dtype=_kv_dtype(str(args.get("kv-cache-dtype", "auto")), kv_dtype),
        quantization=str(args.get("quantization", "")),
        backends=tuple(
            (name, str(args[name]))
            for name in ("linear-backend", "moe-backend")
            if args.get(name, "auto") != "auto"
        ),
    )
    wanted = args.get("tensor-parallel-size", tensor_parallel)
    if wanted is not None:
        return (replace(set_by_user, tp=int(wanted)),)
    if engine.device == "cpu":
        return (set_by_user,)
    limit = max(1, gpus // set_by_user.pp)
    return tuple(replace(set_by_user, tp=size) for size in SIZES if size <= limit)


def given_up(variant: Variant, plan: Plan) -> Variant:
    """Whether memory is as short now as it was then is not asked."""
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
            variant = variant.changed(name, value, choice.reason, choice.source)
    return variant


def _kv_dtype(users: str, declared: str) -> str:
    return declared if users == "auto" else users
