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
    assert "leaves out" not in capsys.readouterr().out
    show_plan(plan.evolve(unrehearsed=("capture of CUDA graphs",)))
    out = capsys.readouterr().out
    assert "The check before the start leaves out\n  capture of CUDA graphs" in out
