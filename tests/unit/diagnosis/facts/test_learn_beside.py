"""Facts of memory beside the budget, and of starts that others disturbed."""

from gateway.diagnosis.facts.learn import drop_disturbed_proof, learn, prove_success
from gateway.domain import Attempt, Failure
from gateway.domain.units import GIB
from gateway.profiles.profiles import Profiles
from tests.support.makers import attempt, machine, wish
from tests.support.planning import decide
from tests.support.published import published_model

OOM = Failure(
    kind="gpu_oom",
    phase="load",
    message="no memory",
    proven_subject="memory",
    culprit={"process_bytes": GIB, "tried_bytes": GIB},
)


def test_memory_that_nvml_reads_beside_the_share_is_left_free_by_the_next_plan() -> None:
    profiles = Profiles()
    hardware, engines = machine("h200"), profiles.engines(("vllm==0.26.0",), device="cuda")
    rules = profiles.rules(engines)
    models = [published_model("llama-3.1-8b"), published_model("llama-3.2-1b")]
    first_plan = decide(models[0], hardware, engines, wish(), rules=rules).plans[0]
    start: Attempt = attempt(plan=first_plan)
    used_bytes = first_plan.memory.promised_bytes + 2 * GIB
    (fact,) = (
        fact for fact in prove_success(start, 1.0, None, used_bytes) if fact.kind == "beside_memory"
    )
    assert (fact.value, set(fact.scope)) == (
        2 * GIB,
        {"engine", "device", "tensor_parallel", "pipeline_parallel"},
    )
    for model in models:
        before, after = (
            decide(model, hardware, engines, wish(), facts, rules=rules).plans[0].memory
            for facts in ((), (fact,))
        )
        assert after.beside_bytes - before.beside_bytes == 2 * GIB
    # The rest of the GPU beside the share is enough for it, so that the plan stays as it is.
    assert (
        decide(models[0], hardware, engines, wish(), (fact,), rules=rules).plans[0].argv
        == first_plan.argv
    )
    assert not [
        fact
        for fact in prove_success(start, 1.0, None, first_plan.memory.promised_bytes)
        if fact.kind == "beside_memory"
    ]


def test_a_disturbed_start_teaches_nothing_and_a_disturbed_engine_nothing_of_memory() -> None:
    starts, serves = attempt(), attempt(state="ready", ready_at=1.0)
    assert learn(starts, drop_disturbed_proof(starts, OOM, ""), 2.0)
    assert not learn(starts, drop_disturbed_proof(starts, OOM, "b came to its end"), 2.0)
    assert not learn(serves, drop_disturbed_proof(serves, OOM, "b came to its end"), 2.0)
    kernel = OOM.evolve(kind="kernel_runtime", proven_subject="plan", culprit={})
    assert learn(serves, drop_disturbed_proof(serves, kernel, "b came to its end"), 2.0)
    assert not learn(starts, drop_disturbed_proof(starts, kernel, "b came to its end"), 2.0)


def test_an_engine_that_no_plan_of_its_own_cures_is_not_planned_for_the_model_again() -> None:
    profiles, hardware = Profiles(), machine("h200")
    engine_names = ("vllm==0.26.0", "vllm==0.33.0")
    engines = profiles.engines(engine_names, device="cuda")
    rules, model = profiles.rules(engines), published_model("llama-3.1-8b")
    first_plan = decide(model, hardware, engines, wish(), rules=rules).plans[0]
    failure = Failure(kind="tokenizer", phase="load", message="It broke.", cure="engine")
    facts = learn(attempt(plan=first_plan), failure, 2.0)
    (fact,) = (fact for fact in facts if fact.kind == "engine_fails")
    assert set(fact.scope) == {"engine", "model"}
    plans_after = decide(model, hardware, engines, wish(), facts, rules=rules).plans
    assert plans_after
    assert str(first_plan.engine) not in {str(plan.engine) for plan in plans_after}
    other_plans = decide(
        published_model("llama-3.2-1b"), hardware, engines, wish(), facts, rules=rules
    ).plans
    assert str(first_plan.engine) in {str(plan.engine) for plan in other_plans}
    # Where sizes matter another plan of the engine may help.
    for later in (failure.evolve(phase="graphs"), failure.evolve(cure="plan")):
        later_facts = learn(attempt(plan=first_plan), later, 2.0)
        assert {fact.kind for fact in later_facts} == {"plan_failed"}


def test_a_learned_fact_quotes_the_engine_without_the_time() -> None:
    lines = [
        f"(EngineCore pid={pid}) ERROR 11-23 02:39:{pid} [core.py:1330] RuntimeError: no such op"
        for pid in (13, 35)
    ]
    failures = [
        Failure(kind="unknown", phase="load", message="it ended", proven_subject="plan", line=line)
        for line in lines
    ]
    assert {fact.source for failure in failures for fact in learn(attempt(), failure, 2.0)} == {
        "RuntimeError: no such op"
    }
