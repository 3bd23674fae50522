"""No failure, of whatever kind, phase and cure, leads to a start that it refuses again."""

from collections.abc import Iterator

import pytest

from gateway.controller.decisions.reconcile import (
    Demand,
    MakePlan,
    NoAction,
    PendingEviction,
    PlanState,
    ReplicaSnapshot,
    next_action,
)
from gateway.diagnosis.ending import is_environmental
from gateway.diagnosis.facts.learn import learn
from gateway.diagnosis.remedy import Case
from gateway.domain import Fact, Failure, Plan, Policy
from gateway.profiles.profiles import Profiles
from tests.support.makers import attempt, machine, wish
from tests.support.planning import decide
from tests.support.published import published_model

PROFILES = Profiles()
SIGNATURES = PROFILES.signatures
CURES = SIGNATURES.cures
NOW = 1_000_000.0
PHASES = ("starting", "download", "load", "profile", "kv", "compile", "graphs", "serving")
# The values that a failure names of itself, by its proof.
CULPRITS = {
    "context": {"engine_max_model_len": 2048},
    "memory": {"process_bytes": 2**34, "tried_bytes": 2**30},
    "engine": {"architecture": "LlamaForCausalLM"},
}


def failures() -> Iterator[Failure]:
    """One failure for each kind, phase and proof of the shipped rows, with its cure."""
    proofs = {
        (row.kind, row.proves) for row in (*SIGNATURES.rows.texts, *SIGNATURES.rows.structures)
    }
    proofs |= {(kind, "plan") for kind in CURES.remedies}
    circumstances = [
        {},
        *(
            {name: "yes"}
            for lever in CURES.rows.levers
            if lever.cure
            for name in lever.circumstances
        ),
    ]
    kinds = set()
    for kind, proves in sorted(proofs):
        for phase in PHASES:
            for values in circumstances:
                cure = CURES.cure(Case(kind, phase, "vllm", values))
                if (kind, proves, phase, cure) not in kinds:
                    kinds.add((kind, proves, phase, cure))
                    yield Failure(
                        kind=kind,
                        phase=phase,
                        message="It broke.",
                        proven_subject=proves,
                        cure=cure,
                        culprit=CULPRITS.get(proves, {}),
                    )


class Planner:
    """Decides once for equal facts."""

    def __init__(self) -> None:
        engine_names = ("vllm==0.26.0", "vllm==0.33.0")
        self._engines = PROFILES.engines(engine_names, device="cuda")
        self._rules = PROFILES.rules(self._engines)
        self._plans: dict[str, tuple[Plan, ...]] = {}

    def plans(self, facts: tuple[Fact, ...]) -> tuple[Plan, ...]:
        key = repr([(fact.kind, sorted(fact.scope.items()), fact.value) for fact in facts])
        if key not in self._plans:
            model, hardware = published_model("llama-3.1-8b"), machine("2xh100")
            decision = decide(model, hardware, self._engines, wish(), facts, rules=self._rules)
            self._plans[key] = decision.plans
        return self._plans[key]


def next_step(failure: Failure, plan: Plan) -> object:
    """The action of the loop after the first failed start."""
    failed_start = attempt(1, "failed", plan=plan, ended_at=NOW - 1, failure=failure)
    replica = ReplicaSnapshot(
        is_wanted=True,
        policy=Policy(),
        attempt=None,
        planning=PlanState(),
        demand=Demand(),
        leaving=PendingEviction(),
        history=(failed_start,),
    )
    return next_action(replica, NOW, backoff_s=10, backoff_max_s=300)


@pytest.mark.parametrize("cure", ["plan", "engine", "user"])
def test_no_start_is_repeated_that_its_refusal_meets_again(cure: str) -> None:
    planner = Planner()
    first_plan = planner.plans(())[0]
    several = [failure for failure in failures() if failure.cure == cure]
    assert len(several) > 10
    for failure in several:
        action = next_step(failure, first_plan)
        if cure == "user":
            assert isinstance(action, NoAction), failure
            assert action.state == "quarantined", failure
            continue
        if is_environmental(failure):
            # The cause lies outside the plan: the same start waits, longer each time.
            assert isinstance(action, NoAction) or failure.kind == "gpu_lost", failure
            continue
        assert isinstance(action, MakePlan), failure
        facts = tuple(
            fact.evolve(attempt=1, source="It broke.")
            for fact in learn(attempt(plan=first_plan), failure, NOW)
        )
        assert facts, failure
        plans_after = planner.plans(facts)
        assert first_plan.fingerprint not in {plan.fingerprint for plan in plans_after}, failure
        if cure == "engine" and failure.proven_subject == "plan" and failure.phase in PHASES[:3]:
            assert str(first_plan.engine) not in {str(plan.engine) for plan in plans_after}, failure
