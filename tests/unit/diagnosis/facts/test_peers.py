"""GPUs that cannot talk to each other: the changes of the next plans, until they share nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.ending import is_environmental
from gateway.diagnosis.facts.learn import judge, learn
from gateway.domain import Decision, Fact, Failure
from gateway.planner.explain import changes
from gateway.profiles.profiles import Profiles
from tests.support.makers import attempt, wish
from tests.support.paths import LOGS
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
HANG = Failure(
    kind="hang",
    phase="serving",
    message="The engine gave no token for 60 seconds.",
    proven_subject="nothing",
)
SILENT = Failure(
    kind="start_timeout",
    phase="starting",
    message="The start printed nothing for 1800 seconds and does not answer.",
    line="(EngineCore_DP0 pid=271) INFO 06-18 03:12:33 [pynccl.py:111] vLLM is using nccl==2.27.5",
)


def proven(log: str, engine: str = "vllm") -> Failure:
    return diagnose([(LOGS / f"{log}.log").read_bytes()], PROFILES.signatures, engine)[0]


def make_decision(
    model: str, hardware: str, ref: str, facts: tuple[Fact, ...] = (), **wishes: Any
) -> Decision:
    engines = [PROFILES.engine(ref)]
    return decide(
        published_model(model),
        PROFILES.hardware(hardware),
        engines,
        wish(**wishes),
        facts,
        rules=PROFILES.rules(engines),
    )


def play_starts(
    failure: Failure, model: str, hardware: str, ref: str, **wishes: Any
) -> list[tuple[int, str]]:
    """The starts in a row while every start of several ranks fails so: (GPUs, changes)."""
    facts: tuple[Fact, ...] = ()
    steps: list[tuple[int, str]] = []
    fingerprints = set()
    for number in range(12):
        plans = make_decision(model, hardware, ref, facts, **wishes).plans
        if not plans:
            return steps
        best = plans[0]
        assert best.fingerprint not in fingerprints
        fingerprints.add(best.fingerprint)
        steps.append((len(best.gpus), changes(best)))
        if len(best.gpus) < 2:
            return steps
        facts += learn(attempt(number, plan=best), failure, 1.0)
    raise AssertionError(steps)


@pytest.mark.parametrize("log", ["failed-nccl-0.19.1", "failed-p2p-0.18.0", "failed-nccl-watchdog"])
@pytest.mark.parametrize("ref", [VLLM_REF, SGLANG_REF])
def test_one_way_after_the_other_is_left_off_and_then_the_gpus_share_nothing(
    log: str, ref: str
) -> None:
    # NVLink: the engine's own all-reduce is on.
    assert play_starts(proven(log), "llama-3.1-8b", "8xh100", ref, tensor_parallel=2) == [
        (2, ""),
        (2, "no custom all-reduce"),
        (2, "no custom all-reduce, no peer-to-peer access"),
    ]


def test_peer_access_goes_first_without_nvlink_and_a_single_gpu_last() -> None:
    # 120,000 tokens of context do not fit beside the weights as they are.
    steps = play_starts(
        proven("failed-nccl-0.19.1"), "llama-3.1-8b", "2x3090", VLLM_REF, min_context=120_000
    )
    assert steps == [(2, ""), (2, "no peer-to-peer access"), (1, "KV cache in fp8, weights in fp8")]


def test_the_plan_explains_missing_peer_access() -> None:
    plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF, tensor_parallel=2).plans[0]
    failure = proven("failed-nccl-0.19.1")
    facts: tuple[Fact, ...] = ()
    for number in range(2):
        facts += learn(attempt(number, plan=plan), failure, 1.0)
        plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF, facts, tensor_parallel=2).plans[0]
    assert plan.env["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in plan.argv
    assert plan.custom_all_reduce.source == "fact"
    assert "unhandled system error" in plan.custom_all_reduce.reason
    assert any("NCCL_P2P_DISABLE=1" in warning and "slower" in warning for warning in plan.warnings)


def test_a_fact_holds_between_its_own_gpus_and_on_no_others() -> None:
    plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF, tensor_parallel=2).plans[0]
    facts = learn(attempt(plan=plan), proven("failed-nccl-0.19.1"), 1.0)
    peers = [fact for fact in facts if fact.kind == "peers_fail"]
    assert [fact.scope["gpus"] for fact in peers] == [",".join(sorted(plan.gpus))]
    foreign_facts = [fact.evolve(scope={**fact.scope, "gpus": "GPU-x,GPU-y"}) for fact in peers]
    assert (
        make_decision(
            "llama-3.1-8b", "8xh100", VLLM_REF, tuple(foreign_facts), tensor_parallel=2
        ).plans[0]
        == plan
    )
    wider = make_decision(
        "llama-3.1-8b", "8xh100", VLLM_REF, tuple(peers), tensor_parallel=8
    ).plans[0]
    assert not wider.custom_all_reduce.value
    other_plan = make_decision(
        "llama-3.1-8b", "8xh100", "vllm==0.26.0", tuple(peers), tensor_parallel=2
    ).plans[0]
    assert other_plan.custom_all_reduce.value


def test_a_failed_collective_of_one_gpu_rules_out_the_plan() -> None:
    plan = make_decision("llama-3.1-8b", "3090", VLLM_REF).plans[0]
    (fact,) = learn(attempt(plan=plan), proven("failed-nccl-0.19.1"), 1.0)
    assert fact.kind == "plan_failed"


# --- hangs: one may be the machine's ---


def test_the_second_hang_counts_against_the_plan() -> None:
    plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF, tensor_parallel=2).plans[0]
    first_attempt = attempt(1, "failed", plan=plan, ended_at=10.0, failure=HANG)
    assert is_environmental(judge(first_attempt, HANG, (), 10.0))
    assert learn(first_attempt, judge(first_attempt, HANG, (), 10.0), 10.0) == ()
    second_verdict = judge(attempt(2, plan=plan, ready_at=20.0), HANG, (first_attempt,), 100.0)
    assert not is_environmental(second_verdict)
    assert {fact.kind for fact in learn(attempt(2, plan=plan), second_verdict, 100.0)} == {
        "peers_fail",
        "plan_failed",
    }
    # After ten good minutes it is the first one again, and so it is of another plan.
    assert is_environmental(
        judge(attempt(2, plan=plan, ready_at=20.0), HANG, (first_attempt,), 20.0 + 600)
    )
    other_plan = make_decision("llama-3.1-8b", "8xh100", "vllm==0.26.0", tensor_parallel=2).plans[0]
    assert is_environmental(judge(attempt(2, plan=other_plan), HANG, (first_attempt,), 100.0))


def test_the_second_hang_of_one_gpu_rules_out_the_plan() -> None:
    start = attempt(1, "failed", ended_at=10.0, failure=HANG)
    (fact,) = learn(attempt(2), judge(attempt(2), HANG, (start,), 100.0), 100.0)
    assert fact.kind == "plan_failed"


def test_a_start_that_falls_silent_where_the_ranks_meet_is_about_the_peers() -> None:
    plan = make_decision("llama-3.1-8b", "8xh100", VLLM_REF, tensor_parallel=2).plans[0]
    two, lone_attempt = attempt(1, plan=plan), attempt(1)
    assert judge(two, SILENT, (), 1.0).proven_subject == "peers"
    assert judge(lone_attempt, SILENT, (), 1.0).proven_subject == "plan"
    assert judge(
        two,
        SILENT.evolve(line="INFO [default_loader.py:385] Loading weights took 9.31 seconds"),
        (),
        1.0,
    ) == (SILENT.evolve(line="INFO [default_loader.py:385] Loading weights took 9.31 seconds"))
