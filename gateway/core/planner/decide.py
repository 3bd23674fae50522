"""The planner: hardware, model, engines, wish and facts in; ranked plans and reasons out. Pure.

Every variant (core/engines/variant.py) of every engine version goes through the same gates (search.py). What passes becomes a Plan
whose every field says why. A failure met in the field comes back as a Fact, so the next call yields the next best plan:
there is no other fallback code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.core.engines.candidate import EngineRules
from gateway.core.engines.planning_input import PlanningInput
from gateway.core.engines.refusal import Refused
from gateway.core.engines.variant import Variant
from gateway.core.engines.vllm_engine import VllmRules
from gateway.core.facts.known_facts import KnownFacts
from gateway.core.kernels.gpus import GpuTable
from gateway.core.planner.flags import check_args, check_env
from gateway.core.planner.search import Search, Shared, rejection
from gateway.core.planner.sizes import COMFORTABLE_CONTEXT
from gateway.core.speculative.drafter import Drafter
from gateway.domain import Decision, Engine, EngineAnswer, Fact, Hardware, ModelSpec, Plan, Question, Rejected, RuleGap, Wish
from gateway.errors import BadFlag

# A context that is shorter than this, and than what was wished for, helps nobody to keep the weights as they are.
_LEAST_USEFUL = 4096
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
) -> Decision:
    """All plans, best first, and all refusals. `claims` are bytes per GPU UUID promised to engines that run or start,
    `rules` are by engine ("kind==version"), `drafter` is what the wish names, `gpus` says which formats a GPU multiplies.
    `answers` are what engines' own code said of this model: where there is one, it wins over the rules.

    Raises BadFlag when the wish names a flag that none of the engines has.
    """
    given = PlanningInput(spec, hardware, wish, KnownFacts(facts), claims or {}, gpus, answers or {})
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    gaps: list[RuleGap] = []
    wrong_flags: list[BadFlag] = []
    shared = Shared(given)
    for engine in engines:
        try:
            args, env = check_args(engine, wish.args), check_env(engine, wish.env)
        except BadFlag as error:
            wrong_flags.append(error)
            refusal = Refused("bad_flag", str(error), f"profile {engine.ref}")
            rejected.append(rejection(engine, Variant(tp=wish.tensor_parallel or 1), refusal))
            continue
        search = Search(given, engine, (rules or {}).get(engine.ref, _NO_RULES), args, env, shared, drafter)
        search.run()
        plans += search.plans
        rejected += search.rejected
        gaps += search.gaps
    if wrong_flags and len(wrong_flags) == len(engines):
        raise wrong_flags[0]
    order = {engine.ref: (bool(engine.advisories), index) for index, engine in enumerate(engines)}
    plans.sort(key=lambda plan: _preference(given, plan, order))
    ranked = tuple(plan.evolve(rank=index) for index, plan in enumerate(plans, start=1))
    return Decision(
        model=spec.source, hardware=hardware_name, plans=ranked, rejected=tuple(rejected), gaps=tuple(dict.fromkeys(gaps))
    )


def _preference(given: PlanningInput, plan: Plan, order: Mapping[str, tuple[bool, int]]) -> tuple[Any, ...]:
    """Smaller is better: a context of any use, the weights as they are, the context that was wished for, proof, sound and fast
    kernels, few GPUs, few changes, an engine without known weaknesses, a new one."""
    wanted = min(COMFORTABLE_CONTEXT, given.spec.max_position, given.wish.max_context or given.spec.max_position)
    return (
        plan.max_model_len.value < min(_LEAST_USEFUL, given.wish.min_context or wanted),
        plan.halved,
        plan.max_model_len.value < (given.wish.min_context or wanted),
        plan.grade != "verified",
        plan.verdict == "degraded",
        plan.tensor_parallel.value * plan.pipeline_parallel.value,
        plan.cost,
        order.get(str(plan.engine), (False, 0)),
    )
