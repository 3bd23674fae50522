"""Decisions of the reconciler on a history of starts: crash loops, clocks that jump, lost
memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gateway.controller.decisions.reconcile import (
    MakePlan,
    NoAction,
    ReplicaSnapshot,
    attempts_that_count,
    next_action,
)
from gateway.diagnosis.ending import exit_failure
from gateway.diagnosis.facts.learn import learn
from gateway.domain import Attempt, Failure, Hardware, Instance, Policy
from tests.support.makers import attempt, engine, machine, spec, wish
from tests.support.planning import decide

DAY = 86_400.0


START = 1_000_000.0


def failed_attempt(number: int, at: float, ready_at: float | None = None) -> Attempt:
    failure = Failure(
        kind="killed",
        phase="serving",
        message="The engine was killed (signal 9).",
        proven_subject="nothing",
    )
    return attempt(number, "failed", started_at=at, ended_at=at, ready_at=ready_at, failure=failure)


def act(history: list[Attempt], now: float, attempts: int = 50) -> object:
    replica = ReplicaSnapshot(
        is_wanted=True, policy=Policy(max_attempts=attempts), attempt=None, history=tuple(history)
    )
    return next_action(replica, now, backoff_s=10, backoff_max_s=300)


def crashes(history: list[Attempt], now: float, until: float, step: float = 1.0) -> list[float]:
    """When starts are made that crash at once."""
    starts = []
    while now < until:
        if act(history, now) == MakePlan():
            starts.append(now)
            history.append(failed_attempt(len(history), now))
        now += step
    return starts


def test_a_crash_loop_starts_seven_times_in_a_quarter_of_an_hour() -> None:
    starts = crashes([], START, START + 900)
    assert len(starts) <= 8
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    for gap, rest_s in zip(gaps, (10, 20, 40, 80, 160, 300, 300), strict=False):
        assert rest_s <= gap <= 1.1 * rest_s


def test_the_state_says_when_the_next_start_is() -> None:
    rest = act([failed_attempt(1, START), failed_attempt(2, START + 10)], START + 11)
    assert isinstance(rest, NoAction)
    assert (rest.state, rest.recheck_at) == ("backing_off", START + 30)
    assert "The engine was killed" in rest.reason


def test_ten_good_minutes_reset_the_back_off() -> None:
    early = [failed_attempt(number, START) for number in range(6)]
    good = failed_attempt(6, START + 2000, ready_at=START + 1400)
    assert act([*early, good], START + 2001) == MakePlan()
    rest = act([*early, good, failed_attempt(7, START + 2002)], START + 2003)
    assert isinstance(rest, NoAction)
    assert rest.recheck_at == START + 2012
    short = failed_attempt(6, START + 2000, ready_at=START + 1401)
    rest = act([*early, short], START + 2001)
    assert isinstance(rest, NoAction)
    assert rest.recheck_at == START + 2300


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_costs_one_early_start_at_most(jump: float) -> None:
    history: list[Attempt] = []
    crashes(history, START, START + 100)
    before = len(history)
    starts = crashes(history, START + 100 + jump, START + 100 + jump + 900)
    # The next gaps would be 160 and 300 without the jump.
    assert len(starts) <= 4
    assert len(history) == before + len(starts)


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_touches_nothing_that_runs(jump: float) -> None:
    ready = attempt(1, "ready", ready_at=START)
    running_instance = Instance(
        name="m-r0-a1", model="m", attempt=1, fingerprint=ready.fingerprint, state="running"
    )
    replica = ReplicaSnapshot(
        is_wanted=True, policy=Policy(), attempt=ready, instance=running_instance
    )
    assert next_action(replica, START + jump, backoff_s=10, backoff_max_s=300) == NoAction("ready")


def test_a_clock_set_back_does_not_forgive_later_failures() -> None:
    old_failed_attempt = failed_attempt(1, START - 10)
    new_failed_attempt = failed_attempt(2, START - DAY)
    assert attempts_that_count(
        [old_failed_attempt, failed_attempt(2, START + 1)], START, START + 2
    ) == (failed_attempt(2, START + 1),)
    assert new_failed_attempt in attempts_that_count(
        [old_failed_attempt, new_failed_attempt], START, START - DAY + 1
    )


def next_plans(failed: Attempt, failure: Failure, hardware: Hardware) -> tuple[str, ...]:
    facts = learn(failed, failure, START)
    return tuple(
        plan.fingerprint for plan in decide(spec(), hardware, [engine("cuda")], wish(), facts).plans
    )


def test_the_plan_whose_engine_the_kernel_killed_for_memory_is_never_made_again() -> None:
    start = attempt()
    instance = Instance(
        name="m",
        model="m",
        attempt=1,
        fingerprint=start.fingerprint,
        state="exited",
        exit_code=137,
        is_oom_killed=True,
    )
    failure = exit_failure(instance, "loading weights", (), was_ready=False)
    assert failure.kind == "host_oom"
    hardware = machine("2x3090")
    assert start.fingerprint in {
        plan.fingerprint for plan in decide(spec(), hardware, [engine("cuda")], wish(), ()).plans
    }
    plans = next_plans(start, failure, hardware)
    assert start.fingerprint not in plans


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (-9, "killed"),
        (137, "killed"),
        (-11, "exited"),
        (139, "exited"),
        (134, "exited"),
        (1, "unknown"),
    ],
)
def test_an_engine_that_crashed_was_not_killed_from_outside(code: int, kind: str) -> None:
    instance = Instance(
        name="m",
        model="m",
        attempt=1,
        fingerprint=attempt().fingerprint,
        state="exited",
        exit_code=code,
    )
    assert exit_failure(instance, "loading weights", (), was_ready=False).kind == kind
