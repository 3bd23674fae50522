"""The planner: hardware, model, engines, wish and facts in; ranked plans and reasons out. Pure.

Every variant (engines/common/variant.py) of every engine version goes through the same gates
(search.py). What passes becomes a Plan whose every field says why. A failure met in the field comes
back as a Fact, so the next call yields the next best plan: there is no other fallback code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import (
    Adapter,
    Decision,
    Engine,
    EngineAnswer,
    Fact,
    Hardware,
    ModelSpec,
    Plan,
    Question,
    Rejected,
    RuleGap,
    Sharing,
    Wish,
)
from gateway.domain.plan import ALONE
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.chat.parsers import ParserTable
from gateway.engines.common.kernels.gpus import GpuTable
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import Refused
from gateway.engines.common.speed.machine import Pace
from gateway.engines.common.speed.objective import Demerits, outcome, rating, share, worth
from gateway.engines.common.variant import Variant
from gateway.engines.vllm.engine import VllmRules
from gateway.errors import BadFlag, BadRequest
from gateway.models.drafter import Drafter
from gateway.planner.flags import check_args
from gateway.planner.parallel import freed
from gateway.planner.search import Search, Shared, rejection
from gateway.planner.sizes import LEAST_USEFUL, lacks, needed_tokens, wanted_context
from gateway.variables import merged

# By a context that is less than this times as long no engine version with published weaknesses
# wins.
_LONGER = 1.1
# Of an engine version that nobody has written rules for.
_NO_RULES = VllmRules()


def decide(
    spec: ModelSpec,
    hardware: Hardware,
    engines: Sequence[Engine],
    wish: Wish,
    facts: Iterable[Fact] = (),
    claims: Mapping[str, int] | None = None,
    hardware_name: str = "this machine",
    rules: Mapping[str, EngineRules] | None = None,
    drafter: Drafter | None = None,
    gpus: GpuTable | None = None,
    answers: Mapping[Question, EngineAnswer] | None = None,
    pace: Pace | None = None,
    everywhere: Mapping[str, str] | None = None,
    parsers: ParserTable | None = None,
    sharing: Sharing = ALONE,
    adapters: tuple[Adapter, ...] = (),
) -> Decision:
    """All plans, best first, and all refusals. `claims` are bytes per GPU UUID promised to engines
    that run or start,
    `rules` are by engine ("kind==version"), `drafter` is what the wish names, `gpus` says which
    formats a GPU multiplies. `answers` are what engines' own code said of this model: where there
    is one, it wins over the rules. `pace`: how fast GPUs and engines are. `everywhere`: environment
    variables for all engines that have them.
    `parsers`: how models write tool calls and thoughts. `sharing`: what the model keeps to for
    others, and who they are. `adapters`: LoRA adapters that are served beside the model.

    Raises BadFlag when the wish names a flag that none of the engines has.
    """
    hardware, facts = _allowed(hardware, wish), tuple(facts)
    given = PlanningInput(
        spec,
        hardware,
        wish,
        KnownFacts(facts),
        claims or {},
        gpus,
        answers or {},
        pace,
        parsers,
        everywhere or {},
        sharing,
        adapters,
    )
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    gaps: list[RuleGap] = []
    wrong_flags: list[BadFlag] = []
    shared = Shared(given)
    for engine in engines:
        try:
            args, env = check_args(engine, wish.args), merged(engine, wish.env, given.everywhere)
        except BadFlag as error:
            wrong_flags.append(error)
            refusal = Refused("bad_flag", str(error), f"profile {engine.ref}")
            rejected.append(rejection(engine, Variant(tp=wish.tensor_parallel or 1), refusal))
            continue
        search = Search(
            given.under(env),
            engine,
            (rules or {}).get(engine.ref, _NO_RULES),
            args,
            env,
            shared,
            drafter,
        )
        search.run()
        plans += search.plans
        rejected += search.rejected
        gaps += search.gaps
    if wrong_flags and len(wrong_flags) == len(engines):
        raise wrong_flags[0]
    order = {engine.ref: (bool(engine.advisories), index) for index, engine in enumerate(engines)}
    ranked = tuple(
        plan.evolve(rank=index) for index, plan in enumerate(_ranked(given, plans, order), start=1)
    )
    if ranked and claims and any(_loss(ranked[0], given)):
        # Whether that is the model's own size, or what the others leave of the GPUs.
        empty = freed(hardware, claims)
        alone = decide(
            spec,
            empty,
            engines,
            wish,
            facts,
            None,
            hardware_name,
            rules,
            drafter,
            gpus,
            answers,
            pace,
            everywhere,
            parsers,
            adapters=adapters,
        )
        if alone.plans and _loss(alone.plans[0], given) < _loss(ranked[0], given):
            rejected.insert(0, _crowded_out(ranked[0], alone.plans[0]))
            ranked = ()
    return Decision(
        model=spec.source,
        hardware=hardware_name,
        plans=ranked,
        rejected=tuple(rejected),
        gaps=tuple(dict.fromkeys(gaps)),
    )


def _allowed(hardware: Hardware, wish: Wish) -> Hardware:
    """The machine with the GPUs that may be used, and that the wish names. Raises BadRequest."""
    named = wish.gpus
    if not isinstance(named, tuple):
        return hardware.usable()
    numbers = {str(gpu.index): gpu.uuid for gpu in hardware.gpus}
    named = tuple(numbers.get(one, one) for one in named)
    known = {gpu.uuid for gpu in hardware.gpus}
    if missing := [uuid for uuid in named if uuid not in known]:
        here = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in hardware.gpus) or "none"
        raise BadRequest(
            f"There is no GPU {missing[0][:100]} here.", hint=f"There are: {here}.", param="gpus"
        )
    for gpu in hardware.gpus:
        if gpu.uuid in named and (why := gpu.kept or gpu.lost):
            raise BadRequest(
                f"The GPU {gpu.uuid} is not used: {why.rstrip('.')}.",
                hint="Name another one.",
                param="gpus",
            )
    return hardware.only(lambda gpu: gpu.uuid in named)


def _ranked(
    given: PlanningInput, plans: list[Plan], order: Mapping[str, tuple[bool, int]]
) -> list[Plan]:
    """Best first: the one that it had and is to have again, if it is here; else by what counts
    whatever the goal is, and of plans that are equal in that
    by what they are worth."""
    wish = given.wish
    longest = wanted_context(given.spec, wish, {})
    wanted, useful = (
        _enough(plans, order, longest),
        _enough(plans, order, min(LEAST_USEFUL, longest)),
    )
    cost, needed = share(wish.gpus), needed_tokens(wish, given.spec)
    before = given.sharing.again.fingerprint if given.sharing.again is not None else None

    def key(plan: Plan) -> tuple[Any, ...]:
        context, size, count = plan.max_model_len.value, len(plan.gpus), plan.replicas.value
        crowded = size * count > len(given.hardware.gpus) and size > 0
        # Of plans with too little context the longer one is better.
        goal = wish.goal if context >= wanted else "context"
        value = worth(outcome(plan.memory, plan.speed, context, size, count, needed), goal, cost)
        weak, age = order.get(str(plan.engine), (False, 0))
        value = value / _LONGER if weak and goal == "context" else value
        rated = rating(value, Demerits(weak, plan.cost, age, count > 1))
        other = before is not None and plan.fingerprint != before
        return (
            other,
            crowded,
            *_class(plan, wanted, useful),
            -rated,
            weak,
            plan.cost,
            size * count,
            age,
            -context,
        )

    return sorted(plans, key=key)


def _enough(plans: Iterable[Plan], order: Mapping[str, tuple[bool, int]], wanted: int) -> int:
    """Tokens of context that are enough: as many as are wanted, or nearly as many where only an
    engine version with published weaknesses
    has more."""
    contexts = dict.fromkeys((False, True), 0)
    for plan in plans:
        weak, _ = order.get(str(plan.engine), (False, 0))
        contexts[weak] = max(contexts[weak], plan.max_model_len.value)
    sound = contexts[False]
    return sound if contexts[True] and sound < wanted <= sound * _LONGER else wanted


def _loss(plan: Plan, given: PlanningInput) -> tuple[bool, ...]:
    """What nobody would give up for a neighbour: a context of any use, and the weights as they
    are."""
    return lacks(plan, wanted_context(given.spec, given.wish, {}))[:2]


def _crowded_out(plan: Plan, alone: Plan) -> Rejected:
    weights = "weights halved to fp8 and " if plan.halved else ""
    reason = (
        f"beside other models it would have {weights}{plan.max_model_len.value} tokens of context,"
        f" and {alone.max_model_len.value} without them: there is too little room for it. If so"
        " little is enough, ask for it: --context, --arg quantization=fp8"
    )
    return Rejected(
        engine=plan.engine,
        tensor_parallel=plan.tensor_parallel.value,
        pipeline_parallel=plan.pipeline_parallel.value,
        verdict="no_memory",
        reasons=(reason,),
        source="claims of other models",
        kernels=plan.kernels,
        attention=plan.attention,
        memory=plan.memory,
    )


def _class(plan: Plan, wanted: int, useful: int) -> tuple[bool, ...]:
    """What no speed makes good; smaller is better: what it lacks, proof, sound kernels."""
    return *lacks(plan, wanted, useful), plan.grade != "verified", plan.verdict == "degraded"
