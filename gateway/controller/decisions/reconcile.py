"""The next action for one replica, from its wanted and observed state. Pure, and the only place
that decides.

    wanted?  attempt     instance   seen               action
    no       -           running    -                  Stop, then forget
    yes      none        any        -                  Stop (the engine of an ended attempt)
    yes      none        absent     -                  MakePlan (or Rest, while it backs off or in quarantine)
    yes      none        absent     held back          Rest (what it waits for, gateway/controller/decisions/eviction.py)
    yes      starting    any        leaves             Retire
    yes      ready       running    leaves, drained    Sleep, where the engine can; else Retire, then Stop as the engine of an ended attempt
    yes      asleep      running    its turn           Wake (also what was cut off while it fell asleep or woke up), or another copy serves
    yes      asleep      running    has to end         Retire
    yes      asleep      exited/absent                 Retire: nobody misses it
    yes      any         any        could not sleep    Retire
    yes      starting    absent     -                  Launch (also what was created and never ran)
    yes      starting    running    proof              Fail
    yes      starting    running    answering          Verify, then Publish
    yes      starting    exited     -                  Fail
    yes      ready       running    proof (hang)       Fail
    yes      ready       exited/absent                 Fail

The loop performs the action, records it, and asks again. Every action may be repeated: launching a
running engine or stopping an absent one does nothing. So a crash at any point costs one more pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gateway.diagnosis.ending import HOPELESS, ended, environmental
from gateway.domain import Attempt, Failure, Instance, Observation, Policy
from gateway.domain.running import failures_in_a_row
from gateway.planner.starts import undisturbed


@dataclass(frozen=True)
class MakePlan:
    """Read model and hardware, plan, and record a new attempt."""


@dataclass(frozen=True)
class Launch:
    attempt: Attempt


@dataclass(frozen=True)
class Verify:
    attempt: Attempt


@dataclass(frozen=True)
class Publish:
    attempt: Attempt


@dataclass(frozen=True)
class Fail:
    attempt: Attempt
    failure: Failure


@dataclass(frozen=True)
class Retire:
    """End an attempt that did not fail. Its engine stops then."""

    attempt: Attempt


@dataclass(frozen=True)
class Sleep:
    """Put the engine to sleep. If it cannot, or frees too little memory, its attempt ends."""

    attempt: Attempt


@dataclass(frozen=True)
class Wake:
    attempt: Attempt


@dataclass(frozen=True)
class Stop:
    name: str
    why: str = field(default="stopping the engine", compare=False)


@dataclass(frozen=True)
class Rest:
    """Nothing to do. Users see `state` and `reason`; `recheck_at` is the next look in Unix seconds,
    if any."""

    state: Literal[
        "starting",
        "verifying",
        "ready",
        "unreachable",
        "backing_off",
        "quarantined",
        "no_plan",
        "stopped",
        "asleep",
        "stopping",
    ]
    reason: str = ""
    recheck_at: float | None = None


Action = MakePlan | Launch | Verify | Publish | Fail | Retire | Sleep | Wake | Stop | Rest


@dataclass(frozen=True)
class ReplicaSnapshot:
    """All that is known of one replica at one moment. `history` has its ended attempts, oldest
    first."""

    is_wanted: bool
    policy: Policy
    attempt: Attempt | None
    history: tuple[Attempt, ...] = ()
    instance: Instance | None = None
    observation: Observation = Observation()
    tail: tuple[str, ...] = ()
    blocked: str | None = None
    """Why the planner has no plan, until something changes."""
    promised: bool = False
    """Other models are about to give the missing memory."""
    on_request: bool = False
    """Other models give the missing memory once a request waits."""
    busy: bool = False
    """An effect for this replica is under way."""
    hold: str = ""
    """Why it must not be loaded now."""
    stopped: bool = False
    """Its owner has stopped the model. This alone keeps it out, whatever failed before."""
    is_requested: bool = False
    """A request waits for its model, or the model is pinned."""
    spare: bool = False
    """Another copy of its model serves."""
    leaving: str = ""
    """Why a wanted replica has to stop."""
    drained: bool = False
    """Nothing is in flight at its engine, and nothing will be."""
    spent: bool = False
    """Its engine could not fall asleep or wake up."""
    sleeps: bool = False
    """An evicted engine may be put to sleep instead of stopped."""


def next_action(
    replica: ReplicaSnapshot, now: float, *, backoff_s: float, backoff_max_s: float
) -> Action:
    """The one action to take at `now`, in Unix seconds."""
    attempt = replica.attempt
    if not replica.is_wanted:
        return (
            Stop(replica.instance.name)
            if replica.instance and not replica.busy
            else Rest("stopping")
        )
    if attempt is None:
        if replica.busy:
            return Rest("starting", "planning")
        if replica.instance is not None:
            return Stop(replica.instance.name)
        return _between_attempts(replica, now, backoff_s, backoff_max_s)
    instance = replica.instance
    if replica.spent and not replica.busy:
        return Retire(attempt)
    if attempt.asleep is not None or (attempt.serves and replica.observation.sleeping):
        return _asleep(replica, attempt)
    if replica.observation.proof is not None:
        return Fail(attempt, replica.observation.proof)
    if replica.leaving and (attempt.state == "starting" or replica.drained):
        if (
            attempt.state == "ready"
            and replica.sleeps
            and instance is not None
            and instance.state == "running"
        ):
            return Rest("stopping", replica.leaving) if replica.busy else Sleep(attempt)
        return Retire(attempt)
    if instance is not None and instance.fingerprint != attempt.fingerprint:
        why = "replacing an engine that runs with another plan than the one that was recorded"
        return Stop(instance.name, why) if not replica.busy else Rest("starting", why)
    if instance is not None and instance.state == "exited" and not replica.observation.log_ended:
        return Rest("starting", "reading the end of its log")
    gone = instance is None or instance.state != "running"
    if attempt.state == "ready":
        if gone:
            return Fail(attempt, _ending(replica, attempt, "serving", was_ready=True))
        if replica.leaving:
            return Rest("stopping", f"{replica.leaving}; what it answers is finished first")
        return (
            Rest("unreachable", replica.observation.frozen)
            if replica.observation.frozen
            else Rest("ready")
        )
    if instance is None or instance.state == "created":
        return Rest("starting", replica.observation.phase) if replica.busy else Launch(attempt)
    if instance.state == "exited":
        return (
            Rest("starting", replica.observation.phase)
            if replica.busy
            else Fail(
                attempt, _ending(replica, attempt, replica.observation.phase, was_ready=False)
            )
        )
    if replica.observation.verified:
        return Publish(attempt)
    if replica.observation.answering and not replica.busy:
        return Verify(attempt)
    return Rest(
        "verifying" if replica.observation.answering else "starting", replica.observation.phase
    )


def _asleep(replica: ReplicaSnapshot, attempt: Attempt) -> Action:
    """The action for an engine that sleeps, falls asleep or wakes up."""
    settled = attempt.asleep is not None and attempt.asleep.gave is not None
    if (
        replica.instance is None
        or replica.instance.state != "running"
        or replica.observation.proof is not None
    ):
        return Retire(attempt)
    if replica.busy:
        return (
            Rest("stopping", replica.leaving)
            if replica.leaving
            else Rest("starting" if replica.is_requested else "asleep", replica.observation.phase)
        )
    if replica.leaving and not (replica.sleeps and settled):
        return Retire(attempt)
    if not settled:
        return (
            Wake(attempt)
            if replica.observation.answering
            else Rest("starting", replica.observation.phase)
        )
    if replica.leaving or not (replica.is_requested or replica.spare):
        return Rest("asleep")
    if replica.hold or replica.blocked is not None:
        comes = replica.is_requested and not (
            replica.spare and replica.blocked and not replica.promised
        )
        return Rest("starting" if comes else "asleep", replica.hold or replica.blocked or "")
    return Wake(attempt)


def backoff(failures: int, backoff_s: float, backoff_max_s: float) -> float:
    """Seconds before the next start after `failures` in a row: 10, 20, 40 ... 300."""
    return float(min(backoff_max_s, backoff_s * 2 ** min(failures - 1, 30)))


def attempts_that_count(
    history: Iterable[Attempt], forgiven_at: float, now: float
) -> tuple[Attempt, ...]:
    """The attempts that ended after the last `retry` and that no neighbour disturbed.

    If the clock was set back since, all attempts count.
    """
    since = forgiven_at if forgiven_at <= now else 0.0
    return tuple(attempt for attempt in undisturbed(history) if (attempt.ended_at or 0) > since)


def _between_attempts(
    replica: ReplicaSnapshot, now: float, backoff_s: float, backoff_max_s: float
) -> Action:
    if replica.stopped:
        return Rest("stopped", replica.hold)
    streak = failures_in_a_row(replica.history)
    if streak:
        last = streak[-1]
        cause = f"{last.failure.kind}: {last.failure.message}" if last.failure else "unknown"
        if len(streak) >= replica.policy.max_attempts:
            failed = (
                "its start failed"
                if len(streak) == 1
                else f"{len(streak)} starts failed in a row, the last"
            )
            return Rest("quarantined", f"{failed} with {cause}")
        if last.failure is not None and last.failure.kind in HOPELESS:
            return Rest(
                "quarantined", f"no other plan helps against {cause} {last.failure.advice}".rstrip()
            )
        # The next plan avoids a lost GPU, so there is nothing to wait for.
        elsewhere = (
            last.failure is not None
            and last.failure.kind == "gpu_lost"
            and "uuid" in last.failure.culprit
        )
        if last.failure is not None and environmental(last.failure) and not elsewhere:
            same: list[Attempt] = []
            for attempt in reversed(streak):
                if attempt.failure is None or not environmental(attempt.failure):
                    break
                same.append(attempt)
            # The first death of an engine that generated costs no wait.
            deaths = len(same) - (same[-1].ready_at is not None)
            wait = backoff(deaths, backoff_s, backoff_max_s) if deaths else 0.0
            # `ended_at` is wall time: a clock that was set back must not stretch the wait.
            until = (last.ended_at or now) + wait
            if now < until <= now + wait:
                return Rest("backing_off", f"after {cause}", until)
    if replica.hold:
        return Rest("starting" if replica.is_requested else "stopped", replica.hold)
    if replica.blocked is not None:
        if replica.promised or (replica.on_request and replica.is_requested):
            return Rest("starting", replica.blocked)
        return Rest("stopped" if replica.on_request else "no_plan", replica.blocked)
    return MakePlan()


def _ending(replica: ReplicaSnapshot, attempt: Attempt, phase: str, *, was_ready: bool) -> Failure:
    instance = replica.instance or Instance(
        name="",
        model=attempt.model,
        attempt=attempt.id,
        fingerprint=attempt.fingerprint,
        state="exited",
    )
    return ended(instance, phase, replica.tail, was_ready=was_ready)
