"""The facts that a sleep teaches about the engine version on this kind of GPU."""

from __future__ import annotations

import pytest

from gateway.diagnosis.facts.sleep import (
    expected_bytes,
    failure_fact,
    has_freed_enough,
    result_fact,
)
from tests.support.makers import attempt, plan

PLAN = plan("3090")
ONE = attempt(3, "ready", plan=PLAN)


@pytest.mark.parametrize(
    ("share", "kind"),
    [(1.0, "sleep_works"), (0.85, "sleep_works"), (0.75, "sleep_fails"), (0.0, "sleep_fails")],
)
def test_the_returned_memory_shows_whether_sleep_works(share: float, kind: str) -> None:
    fact = result_fact(ONE, {"GPU-0": int(share * expected_bytes(PLAN))}, 7.0)
    assert (fact.kind, fact.attempt, fact.at) == (kind, 3, 7.0)
    assert set(fact.scope) == {"engine", "device"}
    assert fact.software == PLAN.software


def test_the_gpu_with_the_least_freed_memory_decides_and_no_reading_frees_nothing() -> None:
    whole = expected_bytes(PLAN)
    assert has_freed_enough(PLAN, {"GPU-0": whole, "GPU-1": whole})
    assert not has_freed_enough(PLAN, {"GPU-0": whole, "GPU-1": whole // 2})
    assert not has_freed_enough(PLAN, {})


def test_an_engine_that_did_not_wake_up_has_failed() -> None:
    fact = failure_fact(ONE, "did not wake up", 7.0)
    assert (fact.kind, fact.grade) == ("sleep_fails", "failed")
    assert fact.source.endswith("did not wake up")
