"""A decision as `print` shows it."""

from __future__ import annotations

from tests.support.makers import make_decision


def test_print_shows_the_plans_and_the_flags_of_the_first() -> None:
    decision = make_decision("2x3090")
    best, lines = decision.plans[0], str(decision).splitlines()
    assert lines[0] == f"{decision.model} on {decision.hardware}"
    row = next(line for line in lines if line.startswith("1 "))
    assert row.split()[:2] == ["1", str(best.engine)]
    assert f"{best.max_model_len.value:,}" in row
    assert " ".join(best.argv) in lines
    head = next(line for line in lines if line.startswith("rank"))
    assert head.index("engine") == row.index(str(best.engine))


def test_print_shows_the_refusal_without_a_plan() -> None:
    decision = make_decision("2x3090", tensor_parallel=64)
    assert not decision.plans
    first_line, *other_lines = str(decision).splitlines()
    assert first_line == f"{decision.model} on {decision.hardware}"
    assert other_lines == list(decision.refusal or ("No plan.",))
