"""Changed wishes that an expert would try for a served model, each with its reason. Pure.

pin_layout(wish, plan)       -> the wish for the engine version and layout of a plan
neighbours(base)             -> differences from a plan in one respect, most promising first
other_engines(owner, plans)  -> the best plan of each other engine
forecast_best(owner, rival)  -> the plan that should beat the served one by its forecast
engine_defaults(base)        -> plans by the engine's defaults, to compare with; the first that fits
keeps_quality(plan, base)    -> whether nothing but the speed may get worse
may_win(plan, base)          -> whether a trial could pay
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.domain import Choice, Engine, Plan, Rival, Scalar, Wish
from gateway.engines.common.speed.objective import concurrency
from gateway.engines.common.speed.rival import is_no_worse
from gateway.measuring.tuning.plan_figures import score_plan
from gateway.planner.explain import rival_words
from gateway.planner.flags import canonical

_TOKENS = "max-num-batched-tokens"
_SEQS = "max-num-seqs"
_EAGER = "enforce-eager"
_KV_DTYPE = "kv-cache-dtype"
# A batch below the least makes prompts slow; one above the most takes memory and gives nothing.
_MIN_TOKENS = 512
_MAX_TOKENS = 65536
# A limit of concurrent requests below this frees little memory.
_FEW_SEQS = 8
# The largest batch with a graph of decoding: vLLM's flag, and SGLang's by version. vLLM captures up
# to 512 by itself: _set_cudagraph_sizes in vllm/config/vllm.py of 0.18.0 to 0.33.0.
_GRAPH_SIZE = ("max-cudagraph-capture-size", "cuda-graph-max-bs-decode", "cuda-graph-max-bs")
_OWN_GRAPHS = 512
# A plan whose expectation is so much lower than the best plan's is not started.
_MIN_WORTH_SHARE = 0.8
# Values of a KV cache in 8 bits, by preference of the engines that have them.
_EIGHT_BITS = ("fp8", "fp8_e4m3")


class PlanChange(NamedTuple):
    """A wish to try.

    change: the difference from the wish before.
    reason: the reason for the trial.
    """

    change: str
    reason: str
    wish: Wish


@dataclass(frozen=True)
class BasePlan:
    """A plan with the wish that it follows.

    owner: the wish of the owner, whose flags stay.
    allows_lossy: a KV cache of less precision is allowed.
    """

    owner: Wish
    wish: Wish
    plan: Plan
    engine: Engine
    allows_lossy: bool = False


def pin_layout(wish: Wish, plan: Plan) -> Wish:
    """The wish for the engine version and layout of the plan, so that a change is one change."""
    groups = plan.data_parallel.value
    layout = {"tensor_parallel": plan.tensor_parallel.value} if plan.gpus else {}
    layout |= {"data_parallel": groups} if groups > 1 else {}
    layout |= {"replicas": plan.replicas.value} if wish.copies is None else {}
    return wish.evolve(engines=(str(plan.engine),), **layout)


def neighbours(base: BasePlan) -> tuple[PlanChange, ...]:
    """The changes that differ from the plan in one respect. The planner may refuse some."""
    return (
        *_layout_changes(base),
        *_cache_dtypes(base),
        *speculation(base),
        *_batch_changes(base),
        *_request_changes(base),
        *_graph_changes(base),
    )


def engine_defaults(base: BasePlan) -> tuple[PlanChange, ...]:
    """The engine's own batch and cache on one GPU, or on as many as a copy of the plan has.

    Choices that the planner leaves to the engine are its defaults already.
    """
    engine = base.engine
    plan = base.plan
    defaults: tuple[tuple[str, Scalar, Choice[int] | Choice[str]], ...] = (
        (_SEQS, engine.default_seqs, plan.max_num_seqs),
        (_TOKENS, engine.default_batched_tokens, plan.max_num_batched_tokens),
        (_KV_DTYPE, "auto", plan.kv_cache_dtype),
    )
    args = {
        engine.spelling.get(name, name): value
        for name, value, choice in defaults
        if choice.source in ("memory model", "fact") and _open_flag(base, name)
    }
    fields = {"replicas": 1, "speculative": None, "drafter": None, "num_speculative_tokens": None}
    wish = base.wish.evolve(**fields, args={**base.wish.args, **args})
    sizes = dict.fromkeys((1, plan.tensor_parallel.value) if plan.gpus else (None,))
    return tuple(
        PlanChange("the engine's defaults", "to compare with", wish.evolve(tensor_parallel=size))
        for size in sizes
    )


def other_engines(owner: Wish, plans: Sequence[Plan], served_plan: Plan) -> tuple[PlanChange, ...]:
    """The best plan of each engine other than that of the served plan. plans: best first."""
    best_by_engine: dict[str, Plan] = {}
    for plan in plans:
        best_by_engine.setdefault(plan.engine.kind, plan)
    return tuple(
        PlanChange(str(plan.engine), "another engine", pin_layout(owner, plan))
        for kind, plan in best_by_engine.items()
        if kind != served_plan.engine.kind
    )


def forecast_best(owner: Wish, rival: Rival | None) -> tuple[PlanChange, ...]:
    """The plan that should be better than the served one, which may be of another version."""
    if rival is None:
        return ()
    change = f"the forecast's best plan on {rival.plan.engine}"
    return (PlanChange(change, rival_words(rival), pin_layout(owner, rival.plan)),)


def keeps_quality(plan: Plan, base_plan: BasePlan) -> bool:
    """Whether a plan has the context, inputs, weights and precision of the base plan."""
    base = base_plan.plan
    is_precise = plan.kv_cache_dtype.value in ("auto", base.kv_cache_dtype.value)
    is_same = plan.drops == base.drops and plan.dtype.value == base.dtype.value
    return (
        (is_precise or base_plan.allows_lossy)
        and is_same
        and is_no_worse(plan, base, base_plan.owner)
    )


def may_win(plan: Plan, base: BasePlan) -> bool:
    """Whether the expectation of a plan is near enough to that of the best plan so far."""
    if plan.speed is None or base.plan.speed is None:
        return True
    best_worth = score_plan(base.plan, base.plan.speed, base.owner)
    return score_plan(plan, plan.speed, base.owner) >= _MIN_WORTH_SHARE * best_worth


def concurrent_requests(wish: Wish, plan: Plan) -> int:
    """Concurrent requests for each copy of the plan."""
    return max(1, math.ceil(concurrency(wish) / plan.replicas.value))


def _layout_changes(base: BasePlan) -> Iterator[PlanChange]:
    """Changes that use the plan's GPUs as copies, tensor parallel ranks, or groups of ranks with
    shared experts."""
    owner = base.owner
    plan = base.plan
    ranks = plan.tensor_parallel.value
    copies = plan.replicas.value
    groups = plan.data_parallel.value
    stages = plan.pipeline_parallel.value
    set_by_owner = owner.tensor_parallel or owner.data_parallel or owner.least_copies
    if not plan.gpus or stages > 1 or set_by_owner or isinstance(owner.gpus, tuple):
        return
    gpu_count = ranks * groups * copies
    sizes = [size for size in range(1, gpu_count + 1) if gpu_count % size == 0]
    for size in sorted(sizes, key=lambda size: (abs(math.log2(size / ranks)), size)):
        for spread in sorted({1, gpu_count // size if plan.expert_parallel.value else 1}):
            count = gpu_count // size // spread
            if (size, spread, count) != (ranks, groups, copies):
                text = f"TP={size}" + (f" DP={spread}" if spread > 1 else "")
                fields = {"data_parallel": spread if spread > 1 else None}
                yield PlanChange(
                    text + (f", {count} copies" if count > 1 else ""),
                    "fewer ranks exchange less; more ranks read the weights faster",
                    base.wish.evolve(tensor_parallel=size, replicas=count, **fields),
                )


def _cache_dtypes(base: BasePlan) -> Iterator[PlanChange]:
    now = base.plan.kv_cache_dtype
    flag = _open_flag(base, _KV_DTYPE)
    if flag is None:
        return
    if now.source == "memory model":
        yield _flag_change(
            base, _KV_DTYPE, "auto", "the KV cache in full precision", "no accuracy is lost"
        )
    dtypes = base.engine.flags[flag].choices or ()
    name = next((name for name in _EIGHT_BITS if name in dtypes), None)
    if base.allows_lossy and now.value == "auto" and name is not None:
        yield _flag_change(
            base, _KV_DTYPE, name, f"KV cache of {name}", "half the bytes per token are read"
        )


def speculation(base: BasePlan) -> tuple[PlanChange, ...]:
    """Tokens drafted by layers of the checkpoint, which answers stay the same with.

    Drafts from the prompt pay only for prompts that repeat themselves, so they are not tried.
    """
    owner = base.owner
    if owner.speculative or owner.drafter or base.plan.speculation.value != "none":
        return ()
    text = "tokens drafted by layers of the checkpoint"
    return (PlanChange(text, "a step gives several", base.wish.evolve(speculative="mtp")),)


def _batch_changes(base: BasePlan) -> Iterator[PlanChange]:
    now = base.plan.max_num_batched_tokens.value
    for count, reason in (
        (now * 2, "prompts are read in fewer steps"),
        (now // 2, "answers wait less for the prompts of others"),
    ):
        if _MIN_TOKENS <= count <= _MAX_TOKENS and _open_flag(base, _TOKENS):
            yield _flag_change(base, _TOKENS, count, f"{count:,} tokens in a batch", reason)


def _request_changes(base: BasePlan) -> Iterator[PlanChange]:
    plan = base.plan
    now = base.plan.max_num_seqs.value
    concurrency = concurrent_requests(base.owner, plan)
    if plan.data_parallel.value > 1 or _open_flag(base, _SEQS) is None:
        return
    if now < concurrency:
        text = f"{min(concurrency, now * 2):,} concurrent requests"
        yield _flag_change(
            base, _SEQS, min(concurrency, now * 2), text, "no request waits for a place"
        )
    fewer = max(_FEW_SEQS, 1 << (concurrency - 1).bit_length())
    if now >= 2 * fewer:
        reason = "no more are expected, and places take memory"
        yield _flag_change(base, _SEQS, fewer, f"{fewer:,} concurrent requests", reason)


def _graph_changes(base: BasePlan) -> Iterator[PlanChange]:
    plan = base.plan
    concurrency = concurrent_requests(base.owner, base.plan)
    eager = plan.enforce_eager
    if eager.value and eager.source != "user" and _open_flag(base, _EAGER):
        yield _flag_change(
            base,
            _EAGER,
            value=False,
            change="compiled graphs",
            reason="steps start with less work",
        )
    size = next((name for name in _GRAPH_SIZE if _open_flag(base, name)), None)
    max_batch = min(concurrency, plan.max_num_seqs.value)
    if not eager.value and size is not None and max_batch > _OWN_GRAPHS:
        text = f"graphs for {max_batch:,} requests"
        yield _flag_change(base, size, max_batch, text, "larger batches run without graphs else")


def _open_flag(base: BasePlan, planned_name: str) -> str | None:
    """The engine's name of a flag by the planner's name; None: the engine has none, or the owner
    has set it."""
    engine = base.engine
    name = engine.spelling.get(planned_name, planned_name)
    args = base.owner.args.items()
    options = {key.removeprefix("--").replace("_", "-"): value for key, value in args}
    is_set = planned_name in canonical(engine, options)
    return (
        name if name in engine.flags and not engine.flags[name].is_reserved and not is_set else None
    )


def _flag_change(
    base: BasePlan, planned_name: str, value: Scalar, change: str, reason: str
) -> PlanChange:
    name = base.engine.spelling.get(planned_name, planned_name)
    return PlanChange(change, reason, base.wish.evolve(args={**base.wish.args, name: value}))
