"""The matrix: of each engine version its best plan, or the refusal that says most."""

from __future__ import annotations

import pytest

from gateway.domain import Decision, EngineRef, RejectedPlan
from gateway.planner.matrix import cells
from gateway.profiles.profiles import Profiles
from tests.support.makers import make_decision, plan, spec, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import VLLM_REF

REF = EngineRef(kind="vllm", version="9.9.0", image="engine:9.9.0")


def make_rejection(tp: int, verdict: str, pp: int = 1) -> RejectedPlan:
    return RejectedPlan(
        engine=REF,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        verdict=verdict,
        reasons=(f"{verdict} on {tp}",),
        source="test",
    )


def test_each_cell_of_the_matrix_shows_its_best_plan() -> None:
    (cell,) = cells(make_decision("2x3090"), ["vllm==9.9.0"])
    best = plan("2x3090")
    assert (cell.state, cell.verdict, cell.engine) == ("ok", "ok", best.engine)
    assert (cell.tensor_parallel, cell.pipeline_parallel, cell.max_model_len) == (
        1,
        1,
        best.max_model_len.value,
    )
    assert cell.why == " ".join(best.warnings)
    assert (cell.tokens_s, best.speed) == (None, None)


def test_a_cell_has_the_expected_speed_of_a_single_request() -> None:
    profiles = Profiles()
    engine = profiles.engine(VLLM_REF)
    machine = profiles.hardware("3090")
    decision = decide(
        published_model("llama-3.1-8b"),
        machine,
        [engine],
        wish(),
        speed_knowledge=profiles.speed_knowledge,
    )
    (cell,) = cells(decision, [VLLM_REF])
    speed = decision.plans[0].speed
    assert speed is not None
    assert cell.tokens_s == speed.stream.value


def test_a_degraded_plan_says_why() -> None:
    degraded_plan = plan().evolve(verdict="degraded", warnings=("It is slow.", "Nobody ran it."))
    (cell,) = cells(Decision(model="m", hardware="h", plans=(degraded_plan,)), ["vllm==9.9.0"])
    assert (cell.state, cell.verdict, cell.why) == (
        "degraded",
        "degraded",
        "It is slow. Nobody ran it.",
    )


def test_the_refusal_with_the_most_ranks_says_most() -> None:
    rejections = (
        make_rejection(1, "no_memory"),
        make_rejection(2, "no_memory"),
        make_rejection(4, "no_kernel"),
    )
    (cell,) = cells(Decision(model="m", hardware="h", rejected=rejections), ["vllm==9.9.0"])
    assert (cell.state, cell.verdict, cell.tensor_parallel, cell.why) == (
        "failing",
        "no_kernel",
        4,
        "no_kernel on 4",
    )


@pytest.mark.parametrize("verdict", ["no_device", "illegal_parallelism"])
def test_the_number_of_gpus_is_blamed_last(verdict: str) -> None:
    rejections = (make_rejection(1, "no_memory"), make_rejection(8, verdict))
    (cell,) = cells(Decision(model="m", hardware="h", rejected=rejections), ["vllm==9.9.0"])
    assert cell.verdict == "no_memory"
    (lone_cell,) = cells(
        Decision(model="m", hardware="h", rejected=rejections[1:]), ["vllm==9.9.0"]
    )
    assert lone_cell.verdict == verdict


def test_every_engine_that_was_considered_has_a_cell_in_the_order_asked_for() -> None:
    other_engine = EngineRef(kind="sglang", version="1.0")
    rejections = (
        make_rejection(1, "no_memory"),
        make_rejection(1, "bad_flag").evolve(engine=other_engine),
    )
    decision = Decision(model="m", hardware="h", rejected=rejections)
    assert [str(cell.engine) for cell in cells(decision, ["sglang==1.0", "vllm==9.9.0"])] == [
        "sglang==1.0",
        "vllm==9.9.0",
    ]
    assert cells(decision, ["vllm==1.2.3"]) == []


def test_too_large_a_model_fails_with_its_bytes() -> None:
    (cell,) = cells(make_decision("2x3090", model=spec(num_hidden_layers=400)), ["vllm==9.9.0"])
    assert (cell.state, cell.verdict, cell.max_model_len) == ("failing", "no_memory", None)
    assert "GiB are needed" in cell.why
