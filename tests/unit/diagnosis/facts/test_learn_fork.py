"""A failed fork: the next plan leaves the start method to the engine."""

from __future__ import annotations

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.facts.learn import learn
from gateway.diagnosis.facts.scope import FORK
from gateway.domain import Failure
from gateway.engines.common.expert_warmups import VARIABLE
from gateway.profiles.profiles import Profiles
from tests.support.makers import attempt, machine, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

from .test_peers import make_decision

NAME, VALUE = FORK
PROFILES = Profiles()
FIXED = [
    str(engine.ref) for engine in PROFILES.engines_for(machine("8xh100")) if engine.expert_warmups
]
LINE = (
    b"RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with"
    b" multiprocessing, you must use the 'spawn' start method\n"
)
SILENT = Failure(
    kind="start_timeout",
    phase="starting",
    message="The start printed nothing for 1800 seconds and does not answer.",
    line="INFO [core.py:97] Initializing a V1 LLM engine",
)


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "refused"])
def test_a_failed_fork_is_taken_back(silent: bool) -> None:
    failure = SILENT if silent else diagnose([LINE], Profiles().signatures, "vllm")[0]
    fork_plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF).plans[0]
    assert fork_plan.env[NAME] == VALUE
    facts = learn(attempt(1, plan=fork_plan), failure, 1.0)
    assert "fork_fails" in {fact.kind for fact in facts}
    spawn_plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF, facts).plans[0]
    assert NAME not in spawn_plan.env
    assert spawn_plan.argv == fork_plan.argv
    # A second failure is not due to a fork.
    second_facts = learn(attempt(2, plan=spawn_plan), failure, 1.0)
    assert {fact.kind for fact in second_facts} == {"plan_failed"}


def test_only_forks_on_hopper_skip_the_warm_ups_of_other_models() -> None:
    """Each engine that compiles the kernels of experts for every model."""
    assert FIXED
    for ref in FIXED:
        dense = make_decision("llama-3.1-8b", "8xh100", ref).plans[0]
        assert dense.env[VARIABLE]
        assert "experts" in dense.variables[VARIABLE].reason
        for model, hardware in (("deepseek-v3", "8xh200"), ("llama-3.1-8b", "2x3090")):
            assert VARIABLE not in make_decision(model, hardware, ref).plans[0].env
        facts = learn(attempt(1, plan=dense), SILENT, 1.0)
        assert VARIABLE not in make_decision("llama-3.1-8b", "8xh100", ref, facts).plans[0].env


def test_a_guessed_family_keeps_the_warm_ups_of_experts() -> None:
    guessed_model = published_model("llama-3.1-8b").evolve(guessed=("its MLPs",))
    for engine in map(PROFILES.engine, FIXED):
        rules = PROFILES.rules([engine])
        plan = decide(guessed_model, machine("8xh100"), [engine], wish(), (), rules=rules).plans[0]
        assert plan.env[NAME] == VALUE
        assert VARIABLE not in plan.env


def test_other_failures_say_nothing_of_forks() -> None:
    fork_plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF).plans[0]
    exit_failure = SILENT.evolve(kind="exited")
    assert "fork_fails" not in {
        fact.kind for fact in learn(attempt(1, plan=fork_plan), exit_failure, 1.0)
    }


def test_the_user_decides_before_the_planner() -> None:
    plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF, env={NAME: "spawn"}).plans[0]
    assert plan.env[NAME] == "spawn"
    assert NAME not in make_decision("llama-3.1-8b", "8xh100", SGLANG_REF).plans[0].env
