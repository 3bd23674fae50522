"""What the command line prints of a plan."""

from __future__ import annotations

import pytest

from gateway.cli.present import (
    detail_text,
    expected_start_text,
    show_plan,
    start_text,
    status_text,
)
from tests.support.makers import wish
from tests.support.planning import decide
from tests.unit.planner.test_stateful_requests import CASES, ENGINES, MACHINES, RULES


def test_a_plan_names_the_stages_that_were_not_rehearsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = decide(CASES["qwen-27b"], MACHINES["2xh100"], ENGINES, wish(), rules=RULES).plans[0]
    show_plan(plan)
    assert "leaves out" not in capsys.readouterr().out
    show_plan(plan.evolve(unrehearsed=("capture of CUDA graphs",)))
    said = capsys.readouterr().out
    assert "The check before the start leaves out\n  capture of CUDA graphs" in said


def test_a_start_that_has_not_begun_tells_its_time_or_that_nobody_knows_it() -> None:
    cold = {"origin": "process", "is_cache_empty": True}
    time = {"phases": {"import": 9.0}, "low_s": 60.0, "high_s": 150.0, "grade": "estimate"}
    assert expected_start_text({"conditions": cold, "time": time}) == (
        "The start takes 1m to 2m30s in all, an estimate, nothing is compiled yet."
    )
    assert expected_start_text({"conditions": cold, "time": time | {"grade": "elsewhere"}}) == (
        "The start takes 1m to 2m30s in all, measured on another machine, without reading weights,"
        " nothing is compiled yet."
    )
    assert expected_start_text({"conditions": cold, "time": None}) == (
        "Nothing is compiled yet, no start like it was measured here, so its time is unknown."
    )
    warm = cold | {"is_cache_empty": False}
    assert expected_start_text({"conditions": warm, "time": None}) == (
        "No start like it was measured here, so its time is unknown."
    )


def test_a_phase_stands_once_beside_its_seconds() -> None:
    start = {
        "phase": "load",
        "elapsed_s": 3.0,
        "total_s": 9.0,
        "expected": None,
        "conditions": {"origin": "process", "is_cache_empty": False},
    }
    replica = {"start": start, "follows": None, "busy_with": None}
    view = {"state": "starting", "detail": "loading weights", "replicas": [replica]}
    assert status_text(view) == "starting"
    assert detail_text(view) == start_text(start) == "loading weights 3s"
    waiting = view | {"detail": "waits: b is unloaded"}
    assert status_text(waiting) == "starting (waits: b is unloaded)"
