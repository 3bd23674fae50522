"""The next action for one replica, from its wanted and observed state. Pure, and the only place
that decides.

    wanted?  attempt   instance       condition        action
    no       -         running        -                Stop, then forget
    yes      none      any            -                Stop (the engine of an ended attempt)
    yes      none      absent         -                MakePlan (or NoAction: back-off, quarantine)
    yes      none      absent         held back        NoAction (the reason comes from eviction.py)
    yes      starting  any            evicted          EndAttemptAction
    yes      ready     running        evicted, idle    SleepAction if it can; else EndAttemptAction
                                                       and Stop
    yes      asleep    running        its turn         WakeAction, unless another copy serves; also
                                                       after an interrupted sleep or wake
    yes      asleep    running        has to end       EndAttemptAction
    yes      asleep    exited/absent  -                EndAttemptAction: nobody misses it
    yes      any       any            could not sleep  EndAttemptAction
    yes      starting  absent         -                Launch (also if created and never run)
    yes      starting  running        proof            Fail
    yes      starting  running        answering        VerifyAction, then RouteAction
    yes      starting  exited         -                Fail
    yes      ready     running        proof (hang)     Fail
    yes      ready     running        new abilities    NoteAbilities
    yes      ready     exited/absent  -                Fail

The loop performs the action, records it, and asks again. Every action may be repeated: launching a
running engine or stopping an absent one does nothing. So a crash at any point costs one more pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from gateway.diagnosis.ending import exit_failure, is_environmental
from gateway.domain import Abilities, Attempt, Failure, Instance, Observation, Policy
from gateway.domain.running import failures_in_a_row
from gateway.planner.starts import undisturbed_attempts


@dataclass(frozen=True)
class MakePlan:
    """Read model and hardware, plan, and record a new attempt."""


@dataclass(frozen=True)
class Launch:
    attempt: Attempt


@dataclass(frozen=True)
class VerifyAction:
    attempt: Attempt


@dataclass(frozen=True)
class RouteAction:
    attempt: Attempt


@dataclass(frozen=True)
class NoteAbilities:
    """Record the abilities that a serving engine has shown."""

    attempt: Attempt
    abilities: Abilities


@dataclass(frozen=True)
class Fail:
    attempt: Attempt
    failure: Failure


@dataclass(frozen=True)
class EndAttemptAction:
    """End an attempt that did not fail. The engine of the attempt stops then."""

    attempt: Attempt


@dataclass(frozen=True)
class SleepAction:
    """Put the engine to sleep. If it cannot, or frees too little memory, its attempt ends."""

    attempt: Attempt


@dataclass(frozen=True)
class WakeAction:
    attempt: Attempt


@dataclass(frozen=True)
class Stop:
    name: str
    reason: str = field(default="stopping the engine", compare=False)


@dataclass(frozen=True)
class NoAction:
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


Action = (
    MakePlan
    | Launch
    | VerifyAction
    | RouteAction
    | NoteAbilities
    | Fail
    | EndAttemptAction
    | SleepAction
    | WakeAction
    | Stop
    | NoAction
)


@dataclass(frozen=True)
class PlanState:
    """Whether the replica could be planned."""

    blocked_reason: str | None = None
    """Why the planner has no plan, until something changes."""
    is_promised: bool = False
    """Other models are about to give the missing memory."""
    waits_for_request: bool = False
    """Other models give the missing memory once a request waits."""


@dataclass(frozen=True)
class Demand:
    """Whether the replica is to be loaded now."""

    load_block_reason: str = ""
    """Why it must not be loaded now."""
    is_stopped: bool = False
    """Its owner has stopped the model. A stopped model stays out, whatever failed before."""
    is_requested: bool = False
    """A request waits for its model, or the model is pinned."""
    is_spare: bool = False
    """Another copy of its model serves."""


@dataclass(frozen=True)
class PendingEviction:
    """The eviction of a wanted replica, if any."""

    reason: str = ""
    is_drained: bool = False
    """Nothing is in flight at its engine, and nothing will be."""
    may_sleep: bool = False
    """Its engine may be put to sleep instead of stopped."""


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
    last_log_lines: tuple[str, ...] = ()
    planning: PlanState = PlanState()
    demand: Demand = Demand()
    leaving: PendingEviction = PendingEviction()
    is_busy: bool = False
    """An effect for this replica is under way."""
    is_spent: bool = False
    """Its engine could not fall asleep or wake up."""


def next_action(
    replica: ReplicaSnapshot, now: float, *, backoff_s: float, backoff_max_s: float
) -> Action:
    """The one action to take at `now`, in Unix seconds.

    No engine is shown as starting while it leaves, or while its owner has stopped the model.
    """
    action = _next_action(replica, now, backoff_s, backoff_max_s)
    if not (isinstance(action, NoAction) and action.state in ("starting", "verifying")):
        return action
    if replica.leaving.reason or replica.demand.is_stopped:
        return NoAction("stopping", replica.leaving.reason or replica.demand.load_block_reason)
    return action


def _next_action(
    replica: ReplicaSnapshot, now: float, backoff_s: float, backoff_max_s: float
) -> Action:
    """The next step of a replica, by the first of the states that asks for one."""
    attempt = replica.attempt
    instance = replica.instance
    if not replica.is_wanted:
        return Stop(instance.name) if instance and not replica.is_busy else NoAction("stopping")
    if attempt is None:
        if replica.is_busy:
            return NoAction("starting", "planning")
        if instance is not None:
            return Stop(instance.name)
        return _next_attempt(replica, now, backoff_s, backoff_max_s)
    if replica.is_spent and not replica.is_busy:
        return EndAttemptAction(attempt)
    if attempt.asleep is not None or (attempt.serves and replica.observation.is_sleeping):
        return _sleep_action(replica, attempt)
    if replica.observation.proof is not None:
        return Fail(attempt, replica.observation.proof)
    if replica.leaving.reason and (attempt.state == "starting" or replica.leaving.is_drained):
        return _evict(replica, attempt)
    if instance is not None:
        action = _instance_action(replica, attempt, instance)
        if action is not None:
            return action
    return _serve(replica, attempt) if attempt.state == "ready" else _start(replica, attempt)


def _instance_action(
    replica: ReplicaSnapshot, attempt: Attempt, instance: Instance
) -> Action | None:
    """The action for an engine of another plan, or whose log is still read; else None."""
    if instance.fingerprint != attempt.fingerprint:
        reason = "replacing an engine that runs by another plan than the recorded one"
        return Stop(instance.name, reason) if not replica.is_busy else NoAction("starting", reason)
    if instance.state == "exited" and not replica.observation.has_log_ended:
        return NoAction("starting", "reading the end of its log")
    return None


def _evict(replica: ReplicaSnapshot, attempt: Attempt) -> Action:
    """The action for an idle engine that has to leave."""
    runs = replica.instance is not None and replica.instance.state == "running"
    if attempt.state == "ready" and replica.leaving.may_sleep and runs:
        return (
            NoAction("stopping", replica.leaving.reason)
            if replica.is_busy
            else SleepAction(attempt)
        )
    return EndAttemptAction(attempt)


def _serve(replica: ReplicaSnapshot, attempt: Attempt) -> Action:
    """The action for a ready engine."""
    if replica.instance is None or replica.instance.state != "running":
        return Fail(attempt, _exit_failure(replica, attempt, "serving", was_ready=True))
    if replica.leaving.reason:
        return NoAction(
            "stopping", f"{replica.leaving.reason}; requests in flight are answered first"
        )
    abilities = replica.observation.abilities
    if abilities is not None and abilities != attempt.abilities and not replica.is_busy:
        return NoteAbilities(attempt, abilities)
    freeze_reason = replica.observation.freeze_reason
    return NoAction("unreachable", freeze_reason) if freeze_reason else NoAction("ready")


def _start(replica: ReplicaSnapshot, attempt: Attempt) -> Action:
    """The action for an engine that starts."""
    instance = replica.instance
    phase = replica.observation.phase
    if instance is None or instance.state == "created":
        return NoAction("starting", phase) if replica.is_busy else Launch(attempt)
    if instance.state == "exited":
        if replica.is_busy:
            return NoAction("starting", phase)
        return Fail(attempt, _exit_failure(replica, attempt, phase, was_ready=False))
    if replica.observation.is_verified:
        return RouteAction(attempt)
    if replica.observation.is_healthy and not replica.is_busy:
        return VerifyAction(attempt)
    return NoAction("verifying" if replica.observation.is_healthy else "starting", phase)


def _sleep_action(replica: ReplicaSnapshot, attempt: Attempt) -> Action:
    """The action for an engine that sleeps, falls asleep or wakes up."""
    observation = replica.observation
    runs = replica.instance is not None and replica.instance.state == "running"
    if not runs or observation.proof is not None:
        return EndAttemptAction(attempt)
    if replica.is_busy:
        if replica.leaving.reason:
            return NoAction("stopping", replica.leaving.reason)
        return NoAction("starting" if replica.demand.is_requested else "asleep", observation.phase)
    is_settled = attempt.is_sleep_confirmed
    if replica.leaving.reason and not (replica.leaving.may_sleep and is_settled):
        return EndAttemptAction(attempt)
    if not is_settled:
        return (
            WakeAction(attempt)
            if observation.is_healthy
            else NoAction("starting", observation.phase)
        )
    return NoAction("asleep") if replica.leaving.reason else _sleeping_action(replica, attempt)


def _sleeping_action(replica: ReplicaSnapshot, attempt: Attempt) -> Action:
    """The action for an engine that sleeps and may stay: it wakes up on demand, unless something
    holds it."""
    demand = replica.demand
    planning = replica.planning
    if not (demand.is_requested or demand.is_spare):
        return NoAction("asleep")
    if not demand.load_block_reason and planning.blocked_reason is None:
        return WakeAction(attempt)
    keeps_sleep = demand.is_spare and planning.blocked_reason and not planning.is_promised
    comes = demand.is_requested and not keeps_sleep
    return NoAction(
        "starting" if comes else "asleep", demand.load_block_reason or planning.blocked_reason or ""
    )


def backoff(failures: int, backoff_s: float, backoff_max_s: float) -> float:
    """Seconds before the next start after `failures` in a row: 10, 20, 40 ... 300."""
    return float(min(backoff_max_s, backoff_s * 2 ** min(failures - 1, 30)))


def attempts_that_count(
    history: Iterable[Attempt], forgiven_at: float, now: float
) -> tuple[Attempt, ...]:
    """The attempts that ended after the last `retry` and that no neighbour disturbed.

    If the clock was set back since, all attempts count.
    """
    count_from = forgiven_at if forgiven_at <= now else 0.0
    return tuple(
        attempt for attempt in undisturbed_attempts(history) if (attempt.ended_at or 0) > count_from
    )


def _next_attempt(
    replica: ReplicaSnapshot, now: float, backoff_s: float, backoff_max_s: float
) -> Action:
    """The action for a replica without an engine: a new plan, or the reason why none is made."""
    if replica.demand.is_stopped:
        return NoAction("stopped", replica.demand.load_block_reason)
    streak = failures_in_a_row(replica.history)
    delay = _quarantine(streak, replica.policy.max_attempts)
    delay = delay or _back_off(streak, now, backoff_s, backoff_max_s)
    if delay is not None:
        return delay
    if replica.demand.load_block_reason:
        return NoAction(
            "starting" if replica.demand.is_requested else "stopped",
            replica.demand.load_block_reason,
        )
    if replica.planning.blocked_reason is not None:
        return _plan_refusal(replica, replica.planning.blocked_reason)
    return MakePlan()


def _quarantine(streak: Sequence[Attempt], max_attempts: int) -> NoAction | None:
    """The rest after failures that no further start avoids. None: another start may succeed."""
    if not streak:
        return None
    last_failure = streak[-1].failure
    if len(streak) >= max_attempts:
        failure_words = (
            "its start failed"
            if len(streak) == 1
            else f"{len(streak)} starts failed in a row, the last"
        )
        return NoAction("quarantined", f"{failure_words} with {_failure_cause(last_failure)}")
    if last_failure is not None and last_failure.cure == "user":
        reason = f"no other plan avoids {_failure_cause(last_failure)} {last_failure.advice}"
        return NoAction("quarantined", reason.rstrip())
    return None


def _back_off(
    streak: Sequence[Attempt], now: float, backoff_s: float, backoff_max_s: float
) -> NoAction | None:
    """The rest after failures of the environment. None: the next start needs no wait."""
    failure = streak[-1].failure if streak else None
    # The next plan avoids a lost GPU, so there is nothing to wait for.
    if failure is None or not is_environmental(failure) or _names_lost_gpu(failure):
        return None
    environment_failures = [*takewhile(_was_ended_by_environment, reversed(streak))]
    # The first death of an engine that generated costs no wait.
    deaths = len(environment_failures) - (environment_failures[-1].ready_at is not None)
    wait_s = backoff(deaths, backoff_s, backoff_max_s) if deaths else 0.0
    # `ended_at` is wall time: a clock that was set back must not stretch the wait.
    retry_at = (streak[-1].ended_at or now) + wait_s
    if now < retry_at <= now + wait_s:
        return NoAction("backing_off", f"after {_failure_cause(failure)}", retry_at)
    return None


def _plan_refusal(replica: ReplicaSnapshot, reason: str) -> NoAction:
    """The rest of a replica that found no plan."""
    on_request = replica.planning.waits_for_request
    is_requested = replica.demand.is_requested
    if replica.planning.is_promised or (on_request and is_requested):
        return NoAction("starting", reason)
    return NoAction("stopped" if on_request else "no_plan", reason)


def _failure_cause(failure: Failure | None) -> str:
    return f"{failure.kind}: {failure.message}" if failure is not None else "unknown"


def _names_lost_gpu(failure: Failure) -> bool:
    return failure.kind == "gpu_lost" and "uuid" in failure.culprit


def _was_ended_by_environment(attempt: Attempt) -> bool:
    return attempt.failure is not None and is_environmental(attempt.failure)


def _exit_failure(
    replica: ReplicaSnapshot, attempt: Attempt, phase: str, *, was_ready: bool
) -> Failure:
    instance = replica.instance or Instance(
        name="",
        model=attempt.model,
        attempt=attempt.id,
        fingerprint=attempt.fingerprint,
        state="exited",
    )
    return exit_failure(instance, phase, replica.last_log_lines, was_ready=was_ready)
