"""What the command line prints of a plan."""

from __future__ import annotations

import pytest

from gateway.cli.present import show_plan
from tests.support.makers import wish
from tests.support.planning import decide
from tests.unit.planner.test_stateful_requests import CASES, ENGINES, MACHINES, RULES


def test_a_plan_names_the_stages_that_were_not_rehearsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = decide(CASES["qwen-27b"], MACHINES["2xh100"], ENGINES, wish(), rules=RULES).plans[0]
    show_plan(plan)
    assert "Not rehearsed" not in capsys.readouterr().out
    show_plan(plan.evolve(unrehearsed=("capture of graphs",)))
    said = capsys.readouterr().out
    assert "Not rehearsed by the engine's own code\n  capture of graphs" in said
