"""The planner: ranked plans and reasons from hardware, model, engines, wish and facts. Pure.

Every variant (engines/common/variant.py) of every engine version passes the same gates
(variant_search.py). A variant that passes becomes a Plan with a reason for every field. A failure
of an engine becomes a Fact, so the next call yields the next best plan: there is no other fallback
code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gateway.domain import Decision, Engine, Hardware, Plan, RejectedPlan, RuleGap, Wish
from gateway.domain.sharing import NO_SHARING
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.speed.objective import (
    Penalties,
    gpu_discount,
    plan_outcome,
    rating,
    score,
)
from gateway.engines.common.variant import Variant
from gateway.engines.kind_rules import rules_without_files
from gateway.errors import BadFlag, BadRequest
from gateway.models.context_limit import add_context_limit
from gateway.planner.comparison import gpu_comparison
from gateway.planner.flags import check_args
from gateway.planner.overrides import apply_overrides
from gateway.planner.parallel import drop_engines
from gateway.planner.sizes import MIN_USEFUL, needed_tokens, shortcomings, wanted_context
from gateway.planner.variant_search import Search, rejection
from gateway.planner.variants.shared_layouts import SharedLayouts
from gateway.variables import engine_env

# An engine version with published weaknesses wins by a context only if it is this times as long.
_LONGER_CONTEXT_RATIO = 1.1


def decide(
    inputs: PlanningInput,
    engines: Sequence[Engine],
    rules: Mapping[str, EngineRules] | None = None,
) -> Decision:
    """All plans with these engine versions, best first, and all refusals.

    rules: the rules of each engine version, by "kind==version"; a version without rules predicts no
        kernel.

    Raises BadFlag if the wish names a flag that no engine has, and BadRequest if it names a GPU
    that is absent or unused.
    """
    inputs = inputs.replace_fields(
        hardware=_usable(inputs.hardware, inputs.wish),
        spec=apply_overrides(inputs.spec, inputs.wish.args),
    )
    plans, rejections, gaps = _search(inputs, engines, rules or {})
    best_first = rank_plans(inputs, plans, engine_order(engines))
    if best_first and inputs.promised_bytes and any(_losses(best_first[0], inputs)):
        # Either the model itself is that large, or the claims of other models cause the loss.
        empty = drop_engines(inputs.hardware, inputs.promised_bytes)
        solo_plans = decide(
            inputs.replace_fields(hardware=empty, promised_bytes={}, sharing=NO_SHARING),
            engines,
            rules,
        ).plans
        if solo_plans and _losses(solo_plans[0], inputs) < _losses(best_first[0], inputs):
            rejections.insert(0, _crowding_refusal(best_first[0], solo_plans[0]))
            best_first = []
    return Decision(
        model=inputs.spec.source,
        hardware=inputs.hardware_name,
        plans=tuple(plan.evolve(rank=index) for index, plan in enumerate(best_first, start=1)),
        why_gpus=gpu_comparison(best_first, rejections),
        rejected=tuple(rejections),
        gaps=tuple(dict.fromkeys(gaps)),
    )


def _search(
    inputs: PlanningInput, engines: Sequence[Engine], rules: Mapping[str, EngineRules]
) -> tuple[list[Plan], list[RejectedPlan], list[RuleGap]]:
    """The plans, refusals and gaps of all engine versions. Raises BadFlag."""
    wish = inputs.wish
    plans: list[Plan] = []
    rejections: list[RejectedPlan] = []
    gaps: list[RuleGap] = []
    wrong_flags: list[BadFlag] = []
    layouts = SharedLayouts(inputs)
    for engine in engines:
        try:
            args = check_args(engine, wish.args)
            env = engine_env(engine, wish.env, inputs.global_env)
        except BadFlag as error:
            wrong_flags.append(error)
            refusal = RefusalError("bad_flag", str(error), f"profile {engine.ref}")
            rejections.append(rejection(engine, Variant(tp=wish.tensor_parallel or 1), refusal))
            continue
        known_rules = rules.get(engine.ref) or rules_without_files(engine.kind)
        read = inputs.replace_spec(add_context_limit(inputs.spec, engine.traits))
        search = Search(
            inputs=read.replace_env(env),
            engine=engine,
            rules=known_rules,
            args=args,
            env=env,
            layouts=layouts,
        )
        search.run()
        plans += search.plans
        rejections += search.rejections
        gaps += search.gaps
    if wrong_flags and len(wrong_flags) == len(engines):
        raise wrong_flags[0]
    return plans, rejections, gaps


def _usable(hardware: Hardware, wish: Wish) -> Hardware:
    """The machine with the GPUs that may be used and that the wish names. Raises BadRequest."""
    if not isinstance(wish.gpus, tuple):
        return hardware.usable()
    uuid_by_number = {str(gpu.index): gpu.uuid for gpu in hardware.gpus}
    uuids = tuple(uuid_by_number.get(name, name) for name in wish.gpus)
    present_uuids = {gpu.uuid for gpu in hardware.gpus}
    if missing_uuids := [uuid for uuid in uuids if uuid not in present_uuids]:
        gpu_list = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in hardware.gpus) or "none"
        raise BadRequest(
            f"This machine has no GPU {missing_uuids[0][:100]}.",
            hint=f"The GPUs of the machine are: {gpu_list}.",
            param="gpus",
        )
    for gpu in hardware.gpus:
        if gpu.uuid in uuids and (reason := gpu.reservation_reason or gpu.loss_reason):
            raise BadRequest(
                f"The GPU {gpu.uuid} is not used: {reason.rstrip('.')}.",
                hint="Name another GPU.",
                param="gpus",
            )
    return hardware.select_gpus(lambda gpu: gpu.uuid in uuids)


def engine_order(engines: Sequence[Engine]) -> dict[str, tuple[bool, int]]:
    """Per engine version: published weaknesses, and the position in the list, newest first."""
    return {engine.ref: (bool(engine.advisories), index) for index, engine in enumerate(engines)}


def rank_plans(
    inputs: PlanningInput, plans: list[Plan], age_by_engine: Mapping[str, tuple[bool, int]]
) -> list[Plan]:
    """The plans, best first.

    A plan to restore comes first. Then count the properties that matter for every goal
    (`_losses_and_proof`), and among equal plans the rating for the goal of the wish.
    """
    wish = inputs.wish
    longest_context = wanted_context(inputs.spec, wish, {})
    context_wanted = _attainable_context(plans, age_by_engine, longest_context)
    useful = _attainable_context(plans, age_by_engine, min(MIN_USEFUL, longest_context))
    tokens_needed = needed_tokens(wish, inputs.spec)
    gpu_count = len(inputs.hardware.gpus) * inputs.alike_nodes
    plan_to_restore = inputs.sharing.plan_to_restore

    def rank(plan: Plan) -> _PlanRank:
        """The values that order plans, best first."""
        context = plan.max_model_len.value
        replica_gpus = len(plan.gpus)
        replicas = plan.replicas.value
        # Among plans with too little context, the longest context is best.
        goal = wish.goal if context >= context_wanted else "context"
        outcome = plan_outcome(
            memory=plan.memory,
            speed=plan.speed,
            context=context,
            gpus=replica_gpus,
            count=replicas,
            tokens_needed=tokens_needed,
            groups=plan.data_parallel.value,
        )
        value = score(outcome, goal, gpu_discount(wish))
        is_weak, age = age_by_engine.get(str(plan.engine), (False, 0))
        if is_weak and goal == "context":
            value /= _LONGER_CONTEXT_RATIO
        return _PlanRank(
            is_not_restored=(
                plan_to_restore is not None and plan.fingerprint != plan_to_restore.fingerprint
            ),
            is_crowded=replica_gpus * replicas > gpu_count and replica_gpus > 0,
            losses=_losses_and_proof(plan, context_wanted, useful),
            negative_rating=-rating(value, Penalties(is_weak, plan.cost, age, replicas > 1)),
            is_weak=is_weak,
            cost=plan.cost,
            gpus=replica_gpus * replicas,
            age=age,
            negative_context=-context,
            data_parallel=plan.data_parallel.value,
            pipeline_parallel=plan.pipeline_parallel.value,
            replicas=replicas,
        )

    return sorted(plans, key=rank)


class _PlanRank(NamedTuple):
    """The properties of a plan in the order that decides. Smaller is better.

    losses: losses of the weights or the context, missing proof, unsound kernels.
    is_weak: the engine version has a published weakness.
    age: number of newer engine versions with plans.
    data_parallel, pipeline_parallel, replicas: layouts differ in one of these. So the order of
        equal plans never depends on the refusals of other plans.
    """

    is_not_restored: bool
    is_crowded: bool
    losses: tuple[bool, ...]
    negative_rating: float
    is_weak: bool
    cost: int
    gpus: int
    age: int
    negative_context: int
    data_parallel: int
    pipeline_parallel: int
    replicas: int


def _attainable_context(
    plans: Iterable[Plan], age_by_engine: Mapping[str, tuple[bool, int]], context_wanted: int
) -> int:
    """Tokens of context that count as all that was wished for.

    Fewer than `context_wanted` if only an engine version with published weaknesses reaches it, and
    the others nearly do.
    """
    longest_contexts = dict.fromkeys((False, True), 0)
    for plan in plans:
        weak, _ = age_by_engine.get(str(plan.engine), (False, 0))
        longest_contexts[weak] = max(longest_contexts[weak], plan.max_model_len.value)
    sound_context = longest_contexts[False]
    return (
        sound_context
        if longest_contexts[True]
        and sound_context < context_wanted <= sound_context * _LONGER_CONTEXT_RATIO
        else context_wanted
    )


def _losses(plan: Plan, inputs: PlanningInput) -> tuple[bool, ...]:
    """The losses that no neighbour justifies: a useful context, and the weights as they are."""
    return shortcomings(plan, wanted_context(inputs.spec, inputs.wish, {}))[:2]


def _crowding_refusal(plan: Plan, solo_plan: Plan) -> RejectedPlan:
    weights = "weights halved to fp8 and " if plan.quantizes_weights else ""
    reason = (
        f"next to other models it would have {weights}{plan.max_model_len.value} tokens of context,"
        f" and {solo_plan.max_model_len.value} without them: there is too little room for it. To"
        " accept this, pass --context N or --arg quantization=fp8"
    )
    return RejectedPlan(
        engine=plan.engine,
        tensor_parallel=plan.tensor_parallel.value,
        pipeline_parallel=plan.pipeline_parallel.value,
        data_parallel=plan.data_parallel.value,
        verdict="no_memory",
        reasons=(reason,),
        source="claims of other models",
        kernels=plan.kernels,
        attention=plan.attention,
        memory=plan.memory,
    )


def _losses_and_proof(plan: Plan, context_wanted: int, useful: int) -> tuple[bool, ...]:
    """Properties that no speed outweighs: losses, proof, sound kernels. Smaller is better."""
    losses = bool(plan.drops), *shortcomings(plan, context_wanted, useful)
    return *losses, plan.grade != "verified", plan.verdict == "degraded"
