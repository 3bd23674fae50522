"""The next action for an attempt, from its state, its engine and the earlier failures."""

from typing import Any

import pytest

from gateway.controller.decisions.reconcile import (
    Demand,
    EndAttemptAction,
    Fail,
    Launch,
    MakePlan,
    NoAction,
    NoteAbilities,
    PendingEviction,
    PlanState,
    ReplicaSnapshot,
    RouteAction,
    SleepAction,
    Stop,
    VerifyAction,
    WakeAction,
    backoff,
    next_action,
)
from gateway.domain import Abilities, Attempt, Failure, Instance, Observation, Policy, SleepState
from gateway.domain.running import failures_in_a_row
from tests.support.makers import attempt

NOW = 1_000_000.0


def replica(**fields: Any) -> ReplicaSnapshot:
    if "leaving" in fields:
        fields["reason"] = fields.pop("leaving")
    groups: dict[str, Any] = {"planning": PlanState, "demand": Demand, "leaving": PendingEviction}
    for name, kind in groups.items():
        names = kind.__dataclass_fields__.keys() & fields.keys()
        groups[name] = kind(**{field: fields.pop(field) for field in names})
    return ReplicaSnapshot(
        **{"is_wanted": True, "policy": Policy(), "attempt": None, **groups, **fields}
    )


def act(**fields: Any) -> Any:
    return next_action(replica(**fields), NOW, backoff_s=10, backoff_max_s=300)


def instance(attempt: Attempt, state: str = "running", **fields: Any) -> Instance:
    return Instance.model_validate(
        {
            "name": "m-r0-a1",
            "model": "m",
            "attempt": attempt.id,
            "fingerprint": attempt.fingerprint,
            "state": state,
            **fields,
        }
    )


def failed_attempt(number: int, kind: str, ended_at: float = NOW - 1, **fields: Any) -> Attempt:
    """Of these kinds only `killed` has a cause outside the plan."""
    proves = "nothing" if kind == "killed" else "plan"
    failure = Failure.model_validate(
        {"kind": kind, "phase": "starting", "message": "it broke", "proves": proves}
    )
    return attempt(number, "failed", ended_at=ended_at, failure=failure, **fields)


def test_a_start_goes_from_plan_to_route() -> None:
    start = attempt()
    assert act() == MakePlan()
    assert act(attempt=start) == Launch(start)
    assert act(attempt=start, is_busy=True) == NoAction("starting", "starting")
    running = instance(start)
    assert act(attempt=start, instance=running) == NoAction("starting", "starting")
    answering = Observation(is_healthy=True)
    assert act(attempt=start, instance=running, observation=answering) == VerifyAction(start)
    assert act(attempt=start, instance=running, observation=answering, is_busy=True) == NoAction(
        "verifying", "starting"
    )
    assert act(
        attempt=start, instance=running, observation=Observation(is_healthy=True, is_verified=True)
    ) == RouteAction(start)
    ready = attempt(state="ready", ready_at=NOW)
    assert act(attempt=ready, instance=instance(ready), observation=answering) == NoAction("ready")


def test_abilities_that_an_engine_shows_while_it_serves_are_recorded_once() -> None:
    ready = attempt(state="ready", ready_at=NOW)
    abilities = Abilities()
    observation = Observation(is_healthy=True, is_verified=True, abilities=abilities)
    assert act(attempt=ready, instance=instance(ready), observation=observation) == NoteAbilities(
        ready, abilities
    )
    assert act(
        attempt=ready, instance=instance(ready), observation=observation, is_busy=True
    ) == NoAction("ready")
    recorded_attempt = ready.evolve(abilities=abilities)
    assert act(
        attempt=recorded_attempt, instance=instance(recorded_attempt), observation=observation
    ) == NoAction("ready")


def test_a_start_that_was_cut_off_before_its_process_goes_on() -> None:
    start = attempt()
    assert act(attempt=start, instance=instance(start, "created")) == Launch(start)


def test_a_proof_ends_a_start_while_the_engine_still_runs() -> None:
    start, proof = attempt(), Failure(kind="kv_too_small", phase="starting", message="too small")
    assert act(
        attempt=start, instance=instance(start), observation=Observation(proof=proof)
    ) == Fail(start, proof)
    # Even while an effect is under way: nothing that is running now can undo a proof.
    assert act(
        attempt=start, instance=instance(start), observation=Observation(proof=proof), is_busy=True
    ) == Fail(start, proof)


def test_an_exit_counts_only_after_the_log_was_read_to_its_end() -> None:
    start = attempt()
    exited_instance = instance(start, "exited", exit_code=1)
    assert isinstance(act(attempt=start, instance=exited_instance), NoAction)
    action = act(
        attempt=start,
        instance=exited_instance,
        observation=Observation(has_log_ended=True),
        last_log_lines=("a", "last words"),
    )
    assert isinstance(action, Fail)
    assert action.failure.kind == "unknown"
    assert action.failure.line == "last words"
    assert action.failure.culprit == {"exit_code": 1}


@pytest.mark.parametrize(
    ("code", "oom", "kind"),
    [(0, False, "exited"), (-9, False, "killed"), (137, True, "host_oom"), (None, False, "exited")],
)
def test_a_ready_engine_that_ends_has_failed_with_any_exit_code(
    code: int | None, oom: bool, kind: str
) -> None:
    ready = attempt(state="ready", ready_at=NOW - 5)
    exited_instance = instance(ready, "exited", exit_code=code, is_oom_killed=oom)
    action = act(
        attempt=ready, instance=exited_instance, observation=Observation(has_log_ended=True)
    )
    assert isinstance(action, Fail)
    assert action.failure.kind == kind


def test_a_ready_engine_that_vanished_has_failed() -> None:
    ready = attempt(state="ready", ready_at=NOW)
    assert isinstance(act(attempt=ready), Fail)


def test_the_engine_of_an_ended_attempt_is_stopped_before_the_next_plan() -> None:
    old_failed_attempt = failed_attempt(1, "kv_too_small")
    assert act(history=(old_failed_attempt,), instance=instance(old_failed_attempt)) == Stop(
        "m-r0-a1"
    )
    assert act(history=(old_failed_attempt,)) == MakePlan()


def test_an_engine_with_another_plan_is_replaced() -> None:
    start = attempt()
    foreign = instance(start).evolve(fingerprint="other")
    assert act(attempt=start, instance=foreign) == Stop("m-r0-a1")


def test_causes_outside_the_plan_back_off_and_others_do_not() -> None:
    action = act(history=(failed_attempt(1, "killed"),))
    assert isinstance(action, NoAction)
    assert (action.state, action.recheck_at) == ("backing_off", NOW - 1 + 10)
    assert act(history=(failed_attempt(1, "killed", ended_at=NOW - 10),)) == MakePlan()
    assert act(history=(failed_attempt(1, "unknown"),)) == MakePlan()


@pytest.mark.parametrize("served_s", [0.1, 5, 120])
def test_waits_begin_with_the_second_death_of_an_engine_that_served(
    served_s: float,
) -> None:
    healthy = failed_attempt(1, "killed", ready_at=NOW - 1 - served_s)
    assert act(history=(healthy,)) == MakePlan()
    second_failed_attempt = failed_attempt(2, "killed", ready_at=NOW - 1 - served_s)
    waits = [
        act(history=(healthy, *[second_failed_attempt] * more)).recheck_at - (NOW - 1)
        for more in (1, 2, 3)
    ]
    assert waits == [10, 20, 40]
    # A replica that never served waits from the first failure on, and ten good minutes begin anew.
    assert act(history=(failed_attempt(1, "killed"), healthy)).recheck_at == NOW - 1 + 20
    assert (
        act(
            history=(
                healthy,
                second_failed_attempt,
                failed_attempt(3, "killed", ready_at=NOW - 1 - 600),
            )
        )
        == MakePlan()
    )


def test_a_gateway_that_finds_an_engine_dead_that_served_starts_another_at_once() -> None:
    ready = attempt(state="ready", ready_at=NOW - 3600)
    death = act(attempt=ready)
    assert isinstance(death, Fail)
    assert (
        act(history=(ready.evolve(state="failed", ended_at=NOW, failure=death.failure),))
        == MakePlan()
    )


def test_back_off_doubles_to_five_minutes() -> None:
    assert [backoff(n, 10, 300) for n in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]
    assert backoff(10_000, 10, 300) == 300


def test_a_clock_that_jumps_neither_stretches_nor_skips_the_wait_for_ever() -> None:
    in_the_future = failed_attempt(1, "killed", ended_at=NOW + 86400)
    assert act(history=(in_the_future,)) == MakePlan()


def test_a_failure_that_no_plan_avoids_is_quarantined_at_once() -> None:
    failure = Failure(kind="weights_missing", phase="starting", message="It broke.", cure="user")
    action = act(history=(attempt(1, "failed", ended_at=NOW - 1, failure=failure),))
    assert (action.state, action.reason) == (
        "quarantined",
        "no other plan avoids weights_missing: It broke.",
    )
    other_failure = failure.evolve(cure="engine")
    assert (
        act(history=(attempt(1, "failed", ended_at=NOW - 1, failure=other_failure),)) == MakePlan()
    )


def test_too_many_failures_in_a_row_are_quarantined_with_the_reason() -> None:
    history = tuple(failed_attempt(number, "killed", ended_at=NOW - 1000) for number in range(5))
    action = act(history=history)
    assert isinstance(action, NoAction)
    assert action.state == "quarantined"
    assert "5 starts failed in a row" in action.reason
    assert "killed" in action.reason


def test_ten_good_minutes_forgive_earlier_failures() -> None:
    early = tuple(failed_attempt(number, "killed", ended_at=NOW - 5000) for number in range(4))
    last_attempt = failed_attempt(5, "killed", ended_at=NOW - 100, ready_at=NOW - 900)
    assert failures_in_a_row((*early, last_attempt)) == (last_attempt,)
    short = failed_attempt(5, "killed", ended_at=NOW - 100, ready_at=NOW - 300)
    assert len(failures_in_a_row((*early, short))) == 5


def test_no_plan_is_shown_until_something_changes() -> None:
    assert act(blocked_reason="needs 40 GiB") == NoAction("no_plan", "needs 40 GiB")


def test_removal_stops_running_engines() -> None:
    ready = attempt(state="ready")
    assert act(is_wanted=False, attempt=ready, instance=instance(ready)) == Stop("m-r0-a1")
    assert act(is_wanted=False, attempt=ready) == NoAction("stopping")


def test_an_engine_that_leaves_finishes_its_answers_and_stops() -> None:
    ready = attempt(state="ready", ready_at=NOW - 5)
    leaves = {"attempt": ready, "instance": instance(ready), "leaving": "it makes room for x"}
    assert act(**leaves) == NoAction(
        "stopping", "it makes room for x; requests in flight are answered first"
    )
    assert act(**leaves, is_drained=True) == EndAttemptAction(ready)
    # Nobody waits for an engine that has not served yet.
    start = attempt()
    assert act(
        attempt=start, instance=instance(start), leaving="stopped", is_busy=True
    ) == EndAttemptAction(start)
    # An engine that dies meanwhile has failed like any other.
    assert isinstance(act(**{**leaves, "instance": None}), Fail)


@pytest.mark.parametrize("replica_fields", [{"leaving": "no request for 5m"}, {"is_stopped": True}])
def test_no_engine_is_shown_as_starting_while_it_stops(replica_fields: dict[str, Any]) -> None:
    reason = replica_fields.get("leaving", "its owner stopped it")
    replica_fields = {"load_block_reason": reason, **replica_fields}
    asleep = attempt(state="ready", ready_at=NOW - 5, asleep=SleepState(since=NOW - 1))
    other_instance = instance(attempt(), fingerprint="another")
    for fields in (
        {"is_busy": True},
        {"attempt": attempt(), "is_busy": True},
        {"attempt": attempt(), "instance": other_instance, "is_busy": True},
        {"attempt": asleep, "instance": instance(asleep), "is_busy": True, "is_requested": True},
    ):
        action = act(**fields, **replica_fields)
        assert action == NoAction("stopping", reason) or not isinstance(action, NoAction), fields


def test_a_model_held_back_is_not_planned_but_shows_its_last_failure() -> None:
    assert act(load_block_reason="the next request loads it") == NoAction(
        "stopped", "the next request loads it"
    )
    assert act(load_block_reason="it waits for its turn", is_requested=True) == NoAction(
        "starting", "it waits for its turn"
    )
    assert act(load_block_reason="x", blocked_reason="needs 40 GiB") == NoAction("stopped", "x")
    action = act(
        load_block_reason="x",
        history=tuple(failed_attempt(number, "oom") for number in range(1, 6)),
    )
    assert action.state == "quarantined"


SEEN = Observation(is_healthy=True, is_verified=True)


def sleeper(gave: dict[str, int] | None) -> Attempt:
    return attempt(state="ready", ready_at=NOW, asleep=SleepState(since=NOW, freed_bytes=gave))


def test_an_engine_that_leaves_sleeps_if_it_can_once_it_has_answered_everything() -> None:
    ready = attempt(state="ready", ready_at=NOW)
    leaves = {
        "attempt": ready,
        "instance": instance(ready),
        "observation": SEEN,
        "leaving": "it makes room",
        "may_sleep": True,
    }
    assert act(**leaves).state == "stopping"
    assert act(**leaves, is_drained=True) == SleepAction(ready)
    assert act(**leaves, is_drained=True, is_busy=True) == NoAction("stopping", "it makes room")
    assert act(**{**leaves, "may_sleep": False}, is_drained=True) == EndAttemptAction(ready)
    assert isinstance(act(**{**leaves, "instance": None}, is_drained=True), EndAttemptAction)
    starting = attempt()
    assert act(
        **{**leaves, "attempt": starting, "instance": instance(starting)}
    ) == EndAttemptAction(starting)


def test_a_sleeping_engine_wakes_on_a_request_when_its_turn_has_come() -> None:
    sleeping_attempt = sleeper({"GPU-0": 5})
    rests = {
        "attempt": sleeping_attempt,
        "instance": instance(sleeping_attempt),
        "observation": SEEN,
        "may_sleep": True,
    }
    assert act(**rests) == NoAction("asleep")
    assert act(**rests, is_requested=True) == WakeAction(sleeping_attempt)
    assert act(**rests, is_requested=True, is_busy=True).state == "starting"
    assert act(**rests, is_requested=True, load_block_reason="another is first") == NoAction(
        "starting", "another is first"
    )
    assert act(**rests, is_requested=True, blocked_reason="waits: b sleeps") == NoAction(
        "starting", "waits: b sleeps"
    )
    # Its model leaves with its other engines.
    assert act(**rests, is_requested=True, leaving="it makes room") == NoAction("asleep")


def test_a_spare_copy_wakes_only_where_there_is_room() -> None:
    sleeping_attempt = sleeper({"GPU-0": 5})
    rests = {
        "attempt": sleeping_attempt,
        "instance": instance(sleeping_attempt),
        "observation": SEEN,
        "may_sleep": True,
        "is_spare": True,
    }
    assert act(**rests) == WakeAction(sleeping_attempt)
    assert act(**rests, load_block_reason="other models load first") == NoAction(
        "asleep", "other models load first"
    )
    assert act(**rests, blocked_reason="it lacks 3 GiB") == NoAction("asleep", "it lacks 3 GiB")
    assert act(**rests, is_requested=True, blocked_reason="it lacks 3 GiB") == NoAction(
        "asleep", "it lacks 3 GiB"
    )
    assert act(
        **rests, is_requested=True, blocked_reason="waits: b sleeps", is_promised=True
    ) == NoAction("starting", "waits: b sleeps")
    assert act(**rests, leaving="it makes room") == NoAction("asleep")


def test_an_engine_cut_off_while_it_fell_asleep_or_woke_up_is_woken() -> None:
    sleeping_attempt = sleeper(None)
    assert act(
        attempt=sleeping_attempt, instance=instance(sleeping_attempt), observation=SEEN
    ) == WakeAction(sleeping_attempt)
    assert act(attempt=sleeping_attempt, instance=instance(sleeping_attempt)) == NoAction(
        "starting", "starting"
    ), "its watcher has not seen it yet"
    awake = attempt(state="ready", ready_at=NOW)
    assert act(
        attempt=awake, instance=instance(awake), observation=SEEN.evolve(is_sleeping=True)
    ) == WakeAction(awake)
    assert act(attempt=awake, instance=instance(awake), observation=SEEN) == NoAction("ready")


@pytest.mark.parametrize("gave", [{"GPU-0": 5}, None])
def test_a_sleeping_engine_that_dies_or_has_to_end_just_ends(gave: dict[str, int] | None) -> None:
    sleeping_attempt = sleeper(gave)
    proof = Failure(kind="hang", phase="serving", message="it hangs")
    assert act(attempt=sleeping_attempt, instance=None) == EndAttemptAction(sleeping_attempt)
    assert act(
        attempt=sleeping_attempt, instance=instance(sleeping_attempt, "exited"), is_requested=True
    ) == EndAttemptAction(sleeping_attempt)
    assert act(
        attempt=sleeping_attempt,
        instance=instance(sleeping_attempt),
        observation=SEEN.evolve(proof=proof),
        is_busy=True,
    ) == EndAttemptAction(sleeping_attempt)
    assert act(
        attempt=sleeping_attempt,
        instance=instance(sleeping_attempt),
        observation=SEEN,
        leaving="its owner stops it",
    ) == EndAttemptAction(sleeping_attempt)
    assert act(
        attempt=sleeping_attempt,
        instance=instance(sleeping_attempt),
        observation=SEEN,
        is_spent=True,
    ) == EndAttemptAction(sleeping_attempt)
    assert act(
        attempt=sleeping_attempt,
        instance=instance(sleeping_attempt),
        observation=SEEN,
        is_spent=True,
        is_busy=True,
    ) != EndAttemptAction(sleeping_attempt)
