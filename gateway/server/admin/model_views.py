"""Views of a model for the admin API: state, replicas, attempts, and a pending change."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from pydantic import Field

from gateway.controller.decisions.changes import Difference, diff_plans, diff_wishes
from gateway.controller.decisions.copies import CopyCause
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_state import copies_text, status
from gateway.controller.fleet.start_record import StartRecord
from gateway.domain import (
    Abilities,
    Attempt,
    Decision,
    ExpectedStart,
    Failure,
    Plan,
    SleepState,
    StartConditions,
    StartTime,
    Value,
    Wish,
)
from gateway.domain.phases import phase_label
from gateway.planner.explain import changes
from gateway.server.admin.bench_routes import RivalView, rival_view
from gateway.wishes.shown_wish import shown_wish


class FollowUpStart(Value):
    """The start after a failure, and the differences of its plan from the failed plan."""

    attempt: int
    failure: str = Field(description="kind of the preceding failure")
    differs: tuple[Difference, ...] = Field(
        description="every choice that changed; empty: the same plan"
    )


class AttemptView(Value):
    """A start of an engine: its plan, its end, and the log line of a failure."""

    id: int
    replica: int
    state: str
    grade: str
    engine: str
    digest: str | None = Field(
        description=("digest of its image; None: not known yet, or it runs as a process")
    )
    fingerprint: str
    max_model_len: int
    default_differences: str = Field(
        description="differences of its plan from the engine's defaults"
    )
    instance: str
    started_at: float
    ready_at: float | None
    ended_at: float | None
    phases: dict[str, float] = Field(description="seconds of each phase of its start")
    asleep: SleepState | None = Field(description="sleep of its engine; None: the engine is awake")
    failure: Failure | None
    failed_while: str | None = Field(description="phase of the failure, in words for users")
    follows: FollowUpStart | None = Field(
        description="the next start of its replica after a failure"
    )


class StartView(Value):
    """The present phase of a start, and its expected time."""

    phase: str | None = Field(description="None: before the engine's process")
    elapsed_s: float = Field(description="seconds in this phase")
    total_s: float = Field(description="seconds since the start of the process")
    conditions: StartConditions
    expected: StartTime | None = Field(description="None: unknown")


class ReplicaView(Value):
    replica: int
    state: str
    detail: str
    attempt: int | None
    busy_with: str | None
    engine: str | None = Field(None, description='"kind==version" of the attempt')
    max_model_len: int | None = None
    gpus: tuple[str, ...] = Field((), description="UUIDs; empty on a CPU")
    memory_bytes: int | None = Field(
        None, description="memory reserved for its engine on each GPU, or of RAM"
    )
    ready_at: float | None = Field(None, description="start of serving, in Unix seconds")
    follows: FollowUpStart | None = Field(description="set if the attempt follows a failure")
    start: StartView | None = Field(None, description="set while its engine starts")


class CopiesView(Value):
    """The number of copies of a model whose copies follow its load."""

    wanted_count: int
    least_count: int
    most_count: int
    words: str = Field(description="serving copies with the reason, in words")
    cause: CopyCause | None = Field(None, description="cause of the last change; None: no change")
    changed_at: float | None = Field(None, description="last change, in Unix seconds")


class ModelView(Value):
    """The current state of a model."""

    name: str
    state: str
    detail: str
    created_at: float
    used_at: float | None = Field(None, description="time of its last request, in Unix seconds")
    keep_alive: float | None = Field(
        None, description="seconds that it stays loaded without a request; -1: forever"
    )
    on_request: bool = Field(False, description="whether a request loads the unloaded model")
    wish: Wish
    replicas: tuple[ReplicaView, ...]
    copies: CopiesView | None = Field(
        None, description="number of copies by the load; None: the number is fixed"
    )
    plan: Plan | None = None
    start: ExpectedStart | None = Field(
        None, description="expected start of this plan, with its last conditions"
    )
    abilities: Abilities | None = Field(
        None,
        description=("tested abilities of its current or last engine; None: no engine was tested"),
    )
    rival: RivalView | None = Field(
        None,
        description="a plan that is probably better than the running one, by its measurements",
    )
    attempts: tuple[AttemptView, ...] = ()
    change: ChangeView | None = Field(None, description="a pending or refused change")
    decision: Decision | None = Field(
        None, description="the planner's last answer, with rejected plans and reasons"
    )


class ChangeAnswer(Value):
    """The effects of a change.

    restarts_engines: whether engines are restarted.
    plan: differences from the running plan.
    """

    name: str
    restarts_engines: bool
    wish: tuple[Difference, ...]
    plan: tuple[Difference, ...] = ()
    commits: dict[str, str] = Field(description="commits of the new wish, by repository")
    reason: str = Field("", description="cause why there is no plan")
    no_effect: str = Field("", description="cause why the plan stays as it is")
    decision: Decision | None = Field(None, description="the planner's answer, with `dry_run`")


class ChangeView(Value):
    """A new wish for the model, being applied or refused."""

    at: float
    state: str = Field(description="underway, or refused: the earlier wish stays in force")
    detail: str
    wish: tuple[Difference, ...]


class ModelList(Value):
    data: tuple[ModelView, ...]


def view(
    model: ManagedModel,
    keep_alive_s: float,
    starts: StartRecord,
    attempts: Sequence[Attempt] = (),
    *,
    shows_all: bool = False,
) -> ModelView:
    """The view of a model.

    attempts: those remembered, oldest first.
    shows_all: whether the view contains the plan.
    """
    state, detail = status(model)
    loaded_model = next(
        (replica for replica in model.replicas if replica.attempt is not None), None
    )
    live = loaded_model.attempt if loaded_model is not None else None
    return ModelView(
        name=model.wish.name,
        state=state,
        detail=detail,
        created_at=model.created_at,
        used_at=model.used_at or None,
        keep_alive=keep_alive_s if model.replicas else None,
        on_request=model.waits_for_request,
        wish=shown_wish(model.wish),
        replicas=tuple(_replica_view(replica, starts) for replica in model.replicas),
        copies=_copies_view(model),
        plan=_plan(model, live) if live and shows_all else None,
        start=_expected_start(loaded_model, starts) if loaded_model and shows_all else None,
        abilities=model.abilities,
        rival=rival_view(model.wish.name, model.rival),
        attempts=tuple(
            _attempt_view(attempt, attempts[position + 1 :])
            for position, attempt in enumerate(attempts)
        ),
        change=_change_view(model),
    )


def _copies_view(model: ManagedModel) -> CopiesView | None:
    wish = model.wish
    change = model.copy_change
    if wish.copies is None or model.wanted_copies is None:
        return None
    return CopiesView(
        wanted_count=model.wanted_copies,
        least_count=wish.least_copies or 1,
        most_count=wish.most_copies or 1,
        words=copies_text(model),
        cause=change.cause if change is not None else None,
        changed_at=change.at if change is not None else None,
    )


def _change_view(model: ManagedModel) -> ChangeView | None:
    change = model.change
    generation = model.wanted_generation
    if change is None:
        return None
    if change.refusal_text:
        state = "refused"
        detail = change.refusal_text
        if model.has_pending_changes:
            detail += "; its replicas are being restored"
    else:
        changed_count = sum(replica.generation == generation for replica in model.replicas)
        state = "underway"
        detail = f"{changed_count} of {len(model.replicas)} replicas are changed"
        if model.trial is not None and model.trial.succession.seeks_plan:
            detail += f"; the next replica starts alongside the running ones: {model.trial.phase}"
    return ChangeView(
        at=change.at, state=state, detail=detail, wish=diff_wishes(model.wish, change.wish)
    )


def _plan(model: ManagedModel, live: Attempt) -> Plan:
    """The plan of `live`, with its measured speed."""
    measured_plan = model.measured_plan
    speed = (
        measured_plan.speed
        if measured_plan is not None and measured_plan.fingerprint == live.fingerprint
        else live.plan.speed
    )
    return live.plan.evolve(grade=live.grade, speed=speed)


def _replica_view(replica: ReplicaState, starts: StartRecord) -> ReplicaView:
    attempt = replica.attempt
    plan = attempt.plan if attempt is not None else None
    return ReplicaView(
        replica=replica.index,
        state=replica.status.state,
        detail=replica.status.reason,
        attempt=attempt.id if attempt else None,
        busy_with=replica.phase if replica.status.state in ("starting", "verifying") else None,
        engine=str(plan.engine) if plan else None,
        max_model_len=plan.max_model_len.value if plan else None,
        gpus=plan.gpus if plan else (),
        memory_bytes=plan.memory.promised_bytes if plan else None,
        ready_at=attempt.ready_at if attempt else None,
        follows=_follows(replica.history[-1], [attempt]) if attempt and replica.history else None,
        start=_start_view(replica, starts),
    )


def _expected_start(replica: ReplicaState, starts: StartRecord) -> ExpectedStart | None:
    if replica.attempt is None:
        return None
    time_s = starts.expected_time(replica.attempt.plan, replica.conditions)
    return ExpectedStart(conditions=replica.conditions, time=time_s)


def _start_view(replica: ReplicaState, starts: StartRecord) -> StartView | None:
    clock = replica.start_clock
    attempt = replica.attempt
    if attempt is None or not replica.is_launching:
        return None
    now_s = time.monotonic()
    return StartView(
        phase=clock.phase if clock is not None else None,
        elapsed_s=round(clock.elapsed_s(now_s), 1) if clock is not None else 0.0,
        total_s=round(clock.total_s(now_s), 1) if clock is not None else 0.0,
        conditions=replica.conditions,
        expected=starts.expected_time(attempt.plan, replica.conditions),
    )


def _follows(failed_attempt: Attempt, later_attempts: Iterable[Attempt]) -> FollowUpStart | None:
    following = next(
        (attempt for attempt in later_attempts if attempt.replica == failed_attempt.replica), None
    )
    if failed_attempt.failure is None or following is None:
        return None
    return FollowUpStart(
        attempt=following.id,
        failure=failed_attempt.failure.kind,
        differs=diff_plans(failed_attempt.plan, following.plan),
    )


def _attempt_view(attempt: Attempt, later_attempts: Iterable[Attempt]) -> AttemptView:
    return AttemptView(
        id=attempt.id,
        replica=attempt.replica,
        state=attempt.state,
        grade=attempt.grade,
        engine=str(attempt.plan.engine),
        digest=attempt.plan.engine.digest,
        fingerprint=attempt.fingerprint,
        max_model_len=attempt.plan.max_model_len.value,
        default_differences=changes(attempt.plan),
        instance=attempt.instance_name,
        started_at=attempt.started_at,
        ready_at=attempt.ready_at,
        ended_at=attempt.ended_at,
        phases=attempt.phases,
        asleep=attempt.asleep,
        failure=attempt.failure,
        failed_while=phase_label(attempt.failure.phase) if attempt.failure is not None else None,
        follows=_follows(attempt, later_attempts),
    )
