"""A model as the admin API shows it: its state, replicas, attempts and what another wish
changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field

from gateway.controller.decisions.changes import Difference, diff_plans, diff_wishes
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_state import status
from gateway.domain import Abilities, Asleep, Attempt, Decision, Failure, Plan, Value, Wish
from gateway.planner.explain import changes
from gateway.server.admin.bench_routes import RivalView, rival_view


class Follows(Value):
    """What was started after a failure, and how that plan differs from the one that failed."""

    attempt: int
    failure: str = Field(description="the kind of failure before it")
    differs: tuple[Difference, ...] = Field(
        description="every choice that is another one now; empty: the same plan again"
    )


class AttemptView(Value):
    """One start, as it is shown: the plan, how it ended, and the line that proves it."""

    id: int
    replica: int
    state: str
    grade: str
    engine: str
    digest: str | None = Field(
        description=(
            "of the image that it is started from; None: not known yet, or it runs as a process"
        )
    )
    fingerprint: str
    max_model_len: int
    otherwise: str = Field(description="what its plan does otherwise than the engine by itself")
    instance: str
    started_at: float
    ready_at: float | None
    ended_at: float | None
    asleep: Asleep | None = Field(description="its engine sleeps; None: it is awake")
    failure: Failure | None
    follows: Follows | None = Field(description="what its replica started next, where it failed")


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
        None, description="what its engine was promised of each GPU, or of RAM"
    )
    ready_at: float | None = Field(None, description="since when it serves, in Unix seconds")
    follows: Follows | None = Field(description="where the attempt follows a failure")


class ModelView(Value):
    """A model as it is now."""

    name: str
    state: str
    detail: str
    created_at: float
    used_at: float | None = Field(None, description="when it was last asked, in Unix seconds")
    keep_alive: float | None = Field(
        None, description="how long it stays loaded without a request, in seconds; -1: for ever"
    )
    on_request: bool = Field(False, description="whether a request loads it where it is not loaded")
    wish: Wish
    replicas: tuple[ReplicaView, ...]
    plan: Plan | None = None
    abilities: Abilities | None = Field(
        None,
        description=(
            "what its engine showed that it does for apps, now or the last time; None: no engine"
            " was asked"
        ),
    )
    rival: RivalView | None = Field(
        None,
        description="a plan that should be better than what runs, by what was measured of that",
    )
    attempts: tuple[AttemptView, ...] = ()
    change: ChangeView | None = Field(None, description="another wish for it")
    decision: Decision | None = Field(
        None, description="the planner's last answer, with what it rejected and why"
    )


class ChangeAnswer(Value):
    """What a change of a model does. anew: engines are started for it. plan: what serves against
    what will."""

    name: str
    anew: bool
    wish: tuple[Difference, ...]
    plan: tuple[Difference, ...]
    commits: dict[str, str] = Field(description="of the new wish, by repository")
    reason: str = Field("", description="why there is no plan for it")
    decision: Decision | None = Field(
        None, description="with `dry_run`: the planner's answer to it"
    )


class ChangeView(Value):
    """Another wish for the model: it takes the place of the one in force, or was given up."""

    at: float
    state: str = Field(description="underway, or refused: then the wish from before is in force")
    detail: str
    wish: tuple[Difference, ...]


class ModelList(Value):
    data: tuple[ModelView, ...]


def view(
    model: ManagedModel,
    keep_alive_s: float,
    attempts: Sequence[Attempt] = (),
    *,
    full: bool = False,
) -> ModelView:
    """attempts: those that are remembered, the oldest first. full: with the plan."""
    state, detail = status(model)
    live = next(
        (replica.attempt for replica in model.replicas if replica.attempt is not None), None
    )
    return ModelView(
        name=model.wish.name,
        state=state,
        detail=detail,
        created_at=model.created_at,
        used_at=model.used_at or None,
        keep_alive=keep_alive_s if model.replicas else None,
        on_request=model.on_request,
        wish=model.wish,
        replicas=tuple(_replica(replica) for replica in model.replicas),
        plan=_plan(model, live) if live and full else None,
        abilities=model.abilities,
        rival=rival_view(model.wish.name, model.rival),
        attempts=tuple(
            _attempt(attempt, attempts[place + 1 :]) for place, attempt in enumerate(attempts)
        ),
        change=_change(model),
    )


def _change(model: ManagedModel) -> ChangeView | None:
    change, wanted = model.change, model.wanted_generation
    if change is None:
        return None
    if change.refused:
        state, detail = "refused", change.refused
        if model.unsettled:
            detail += "; its replicas are brought back"
    else:
        done = sum(replica.generation == wanted for replica in model.replicas)
        state, detail = "underway", f"{done} of {len(model.replicas)} replicas are changed"
        if model.trial is not None and model.trial.seeks:
            detail += f"; the next one starts beside what serves: {model.trial.phase}"
    return ChangeView(
        at=change.at, state=state, detail=detail, wish=diff_wishes(model.wish, change.wish)
    )


def _plan(model: ManagedModel, live: Attempt) -> Plan:
    """With what was measured of it."""
    known = model.measured
    speed = (
        known.speed
        if known is not None and known.fingerprint == live.fingerprint
        else live.plan.speed
    )
    return live.plan.evolve(grade=live.grade, speed=speed)


def _replica(replica: ReplicaState) -> ReplicaView:
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
    )


def _follows(failed: Attempt, later: Iterable[Attempt]) -> Follows | None:
    following = next((one for one in later if one.replica == failed.replica), None)
    if failed.failure is None or following is None:
        return None
    return Follows(
        attempt=following.id,
        failure=failed.failure.kind,
        differs=diff_plans(failed.plan, following.plan),
    )


def _attempt(attempt: Attempt, later: Iterable[Attempt]) -> AttemptView:
    return AttemptView(
        id=attempt.id,
        replica=attempt.replica,
        state=attempt.state,
        grade=attempt.grade,
        engine=str(attempt.plan.engine),
        digest=attempt.plan.engine.digest,
        fingerprint=attempt.fingerprint,
        max_model_len=attempt.plan.max_model_len.value,
        otherwise=changes(attempt.plan),
        instance=attempt.instance_name,
        started_at=attempt.started_at,
        ready_at=attempt.ready_at,
        ended_at=attempt.ended_at,
        asleep=attempt.asleep,
        failure=attempt.failure,
        follows=_follows(attempt, later),
    )
