"""The events that lie between two states of a model. Pure.

Events follow from recorded and observed state, not from the code path. So each event is reported
once, for any cause. Events that a dying gateway could not report are reported at the next start:
`ReportedMilestones` remembers the last report of each start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.controller.decisions.changes import diff_plans, diff_wishes
from gateway.controller.decisions.copies import CopyChange
from gateway.controller.decisions.reconcile import NoAction
from gateway.domain import Attempt, Change, Choice, Offer, Plan, Wish
from gateway.domain.facts import Event, EventKind
from gateway.domain.phases import detail_without_state
from gateway.domain.units import duration_text, plural

Milestone = Literal["", "chosen", "started", "ready", "ended"]
"""How far a start was reported."""

_MILESTONES: dict[str, Milestone] = {
    "plan.chosen": "chosen",
    "plan.fallback": "chosen",
    "plan.shrunk": "chosen",
    "engine.started": "started",
    "engine.ready": "ready",
    "engine.failed": "ended",
    "engine.stopped": "ended",
}
_MILESTONE_ORDER: tuple[Milestone, ...] = ("", "chosen", "started", "ready", "ended")
# Prefixes of phases that have events of their own.
_WEIGHTS = ("Downloading ", "Checking ")
_IMAGE = ("pulling ", "unpacking ")


@dataclass(frozen=True, slots=True)
class ReportedReplica:
    """One replica.

    `attempts` are the last few, oldest first, with the live one. `watched` is the attempt whose
    engine is seen to run. `leaving` is the reason of its eviction, as a word and as a sentence.
    """

    index: int
    attempts: tuple[Attempt, ...] = ()
    status: NoAction = field(default_factory=lambda: NoAction("starting"))
    phase: str = ""
    watched: int | None = None
    awaited_offers: tuple[Offer, ...] = ()
    leaving: tuple[str, str] | None = None
    is_trial: bool = False

    @property
    def live(self) -> Attempt | None:
        return next((attempt for attempt in reversed(self.attempts) if attempt.is_live), None)


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """One model. `endpoints` says for each URL why it is away; "" if it answers."""

    wish: Wish
    state: str = "starting"
    detail: str = ""
    is_deleting: bool = False
    is_stopped: bool = False
    forgiven_at: float = 0.0
    generation: int = 0
    change: Change | None = None
    copy_change: CopyChange | None = None
    replicas: tuple[ReportedReplica, ...] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)


class ReportedMilestones:
    """The reported milestone of each start, by attempt number."""

    def __init__(self) -> None:
        self._milestones: dict[int, Milestone] = {}

    def milestone(self, attempt: Attempt) -> Milestone:
        return self._milestones.get(attempt.id, "")

    def record(self, number: int, milestone: Milestone) -> None:
        self._milestones[number] = milestone
        if len(self._milestones) > 2 * _ENDED_STARTS_MAX:
            ended_numbers = sorted(
                number for number, milestone in self._milestones.items() if milestone == "ended"
            )
            for attempt_id in ended_numbers[:_ENDED_STARTS_MAX]:
                del self._milestones[attempt_id]


# Ended starts to remember. A state holds the last few of each replica.
_ENDED_STARTS_MAX = 10_000


def milestone_of_event(kind: str) -> Milestone:
    """The milestone that an event of this kind reports; "" if none."""
    return _MILESTONES.get(kind, "")


def milestone_of_attempt(attempt: Attempt, *, is_watched: bool) -> Milestone:
    """How far a start has come."""
    if not attempt.is_live:
        return "ended"
    if attempt.state == "ready":
        return "ready"
    return "started" if is_watched else "chosen"


def events_of_model(
    former_model: ReportedModel | None,
    new_model: ReportedModel | None,
    reported_milestones: ReportedMilestones,
    now: float,
) -> Iterator[Event]:
    """The events between two states of a model; None: the model does not exist.

    `reported_milestones` is brought up to date while the events are consumed.
    """
    if new_model is None:
        if former_model is not None:
            name = former_model.wish.name
            if not former_model.is_deleting:
                yield Event(
                    at=now, kind="model.removing", model=name, words=f"{name} is being removed."
                )
            yield Event(at=now, kind="model.removed", model=name, words=f"{name} is removed.")
        return
    yield from _wish_events(former_model, new_model, now)
    for replica in new_model.replicas:
        yield from _replica_events(
            new_model, _earlier_replica(former_model, replica), replica, reported_milestones, now
        )
    yield from _endpoint_events(former_model, new_model, now)
    if former_model is not None and former_model.state != new_model.state:
        detail = detail_without_state(new_model.state, new_model.detail)
        text = (
            f"{new_model.wish.name} {_STATE_VERBS.get(new_model.state, f'is {new_model.state}')}"
            + (f": {detail}" if detail else ".")
        )
        data = {"state": new_model.state, "before": former_model.state, "detail": new_model.detail}
        yield Event(at=now, kind="model.state", model=new_model.wish.name, words=text, data=data)


# States whose name is not an adjective.
_STATE_VERBS = {"no_plan": "has no plan", "backing_off": "is backing off"}


def _wish_events(
    former_model: ReportedModel | None, new_model: ReportedModel, now: float
) -> Iterator[Event]:
    """The events of changes of a model's wish."""
    wish = new_model.wish
    name = new_model.wish.name

    def event(kind: EventKind, text: str, **data: Any) -> Event:
        return Event(at=now, kind=kind, model=name, words=text, data=data)

    if former_model is None:
        data = {"source": wish.source} if wish.source else {"endpoints": list(wish.endpoints)}
        yield event(
            "model.added", f"{name} is added: {wish.source or ', '.join(wish.endpoints)}.", **data
        )
        former_model = ReportedModel(wish)
    for kind, text, data in _change_events(former_model, new_model):
        yield event(kind, text, **data)
    if new_model.is_deleting and not former_model.is_deleting:
        yield event("model.removing", f"{name} is being removed.")
    if new_model.is_stopped != former_model.is_stopped:
        start_or_stop: EventKind = "model.stopped" if new_model.is_stopped else "model.started"
        yield event(
            start_or_stop,
            f"{name} was {'stopped' if new_model.is_stopped else 'started'} by its owner.",
        )
    copy_change = new_model.copy_change
    if copy_change is not None and copy_change != former_model.copy_change:
        noun = "copy" if copy_change.count == 1 else "copies"
        yield event(
            "model.copies",
            f"{name} gets {copy_change.count} {noun} instead of {copy_change.former_count}:"
            f" {copy_change.reason}.",
            copies=copy_change.count,
            before=copy_change.former_count,
            cause=copy_change.cause,
            reason=copy_change.reason,
            waited_s=copy_change.waited_s,
            queued=copy_change.queue_length,
        )
    if new_model.forgiven_at != former_model.forgiven_at:
        yield event("model.retried", f"{name} is tried again. Earlier failures no longer count.")


def _change_events(
    former_model: ReportedModel, new_model: ReportedModel
) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
    """Kinds, texts and data of the events about a wish that is being changed or was changed."""
    wish = new_model.wish
    name = new_model.wish.name
    change = new_model.change
    former_change = former_model.change
    is_same_change = (
        change is not None
        and former_change is not None
        and change.generation == former_change.generation
    )
    if change is not None and not is_same_change:
        differences = _difference_rows(diff_wishes(wish, change.wish))
        text = f"{name} is being changed: {_differences_text(differences)}."
        yield "model.changing", text, {"differences": differences}
    was_refused = is_same_change and former_change is not None and former_change.refusal_text
    if change is not None and change.refusal_text and not was_refused:
        text = f"{name} stays as it was: {change.refusal_text}"
        yield "model.change_refused", text, {"reason": change.refusal_text}
    if former_model.wish != wish:
        differences = _difference_rows(diff_wishes(former_model.wish, wish))
        if differences:
            text = f"{name} is changed: {_differences_text(differences)}."
            yield "model.changed", text, {"differences": differences}


def _replica_events(
    model: ReportedModel,
    former_replica: ReportedReplica,
    new_replica: ReportedReplica,
    reported_milestones: ReportedMilestones,
    now: float,
) -> Iterator[Event]:
    """The events of one replica between two states of the fleet."""
    for position, attempt in enumerate(new_replica.attempts):
        is_watched = new_replica.watched == attempt.id
        former_milestone = reported_milestones.milestone(attempt)
        present_milestone = milestone_of_attempt(attempt, is_watched=is_watched)
        if _MILESTONE_ORDER.index(former_milestone) < _MILESTONE_ORDER.index(present_milestone):
            reported_milestones.record(attempt.id, present_milestone)
            earlier_attempt = new_replica.attempts[position - 1] if position else None
            yield from _start_events(
                model, new_replica, earlier_attempt, attempt, former_milestone, now
            )

        if present_milestone == former_milestone == "ready":
            yield from _late_abilities(model, former_replica, attempt, new_replica.index, now)

    def event(kind: EventKind, text: str, **data: Any) -> Event:
        live = new_replica.live
        number = live.id if live is not None else None
        return Event(
            at=now,
            kind=kind,
            model=name,
            replica=new_replica.index,
            attempt=number,
            words=text,
            data=data,
        )

    name = model.wish.name
    status = new_replica.status
    yield from (
        event(kind, text, **data)
        for kind, text, data in _phase_events(name, former_replica, new_replica)
    )
    if new_replica.awaited_offers and new_replica.awaited_offers != former_replica.awaited_offers:
        takes = [offer.words for offer in new_replica.awaited_offers]
        yield event("plan.waits", f"{name} waits for others: {'; '.join(takes)}.", takes=takes)
    if (
        new_replica.leaving is not None
        and former_replica.leaving is None
        and not new_replica.is_trial
    ):
        reason, text = new_replica.leaving
        copy = (
            f"Copy {new_replica.index + 1} of {name}"
            if sum(not sibling.is_trial for sibling in model.replicas) > 1
            else name
        )
        yield event("model.leaving", f"{copy} is unloaded: {text}.", why=reason)
    yield from (
        event(kind, text, **data)
        for kind, text, data in _status_events(name, former_replica.status, status, now)
    )


def _late_abilities(
    model: ReportedModel, former_replica: ReportedReplica, attempt: Attempt, index: int, now: float
) -> Iterator[Event]:
    """The abilities that an engine has shown after it was ready, as some answers take long."""
    earlier_abilities = next(
        (
            former_attempt
            for former_attempt in former_replica.attempts
            if former_attempt.id == attempt.id
        ),
        attempt,
    ).abilities
    if attempt.abilities is None or attempt.abilities == earlier_abilities:
        return
    name = model.wish.name
    yield Event(
        at=now,
        kind="engine.abilities",
        model=name,
        replica=index,
        attempt=attempt.id,
        words=f"The engine of {name} has answered what takes long: its abilities are known.",
        data={"abilities": attempt.abilities.model_dump(mode="json")},
    )


def _status_events(
    name: str, former_status: NoAction, status: NoAction, now: float
) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
    if status == former_status:
        return
    has_changed = (status.state, status.reason) != (former_status.state, former_status.reason)
    reason = {"reason": status.reason}
    if status.state == "no_plan" and has_changed:
        yield "plan.none", f"There is no plan for {name}: {status.reason}", reason
    elif status.state == "backing_off" and status.recheck_at is not None:
        wait = duration_text(max(0.0, status.recheck_at - now))
        text = f"{name} is started again in {wait}, {status.reason}"
        yield "engine.retry", text, {"at": status.recheck_at, **reason}
    elif status.state == "quarantined" and has_changed:
        yield "engine.quarantined", f"{name} is not started again: {status.reason}", reason
    elif status.state == "unreachable" and former_status.state != "unreachable":
        yield "engine.frozen", f"An engine of {name} gets no requests: {status.reason}", reason
    elif status.state == "ready" and former_status.state == "unreachable":
        yield "engine.answers", f"An engine of {name} answers again.", {}


def _start_events(
    model: ReportedModel,
    replica: ReportedReplica,
    earlier_attempt: Attempt | None,
    attempt: Attempt,
    former_milestone: Milestone,
    now: float,
) -> Iterator[Event]:
    """The events of a start that were not reported yet."""
    name = model.wish.name
    plan = attempt.plan

    def event(kind: EventKind, text: str, at: float = now, **data: Any) -> Event:
        return Event(
            at=at,
            kind=kind,
            model=name,
            replica=replica.index,
            attempt=attempt.id,
            words=text,
            data=data,
        )

    if former_milestone == "":
        kind, text, data = _plan_event(name, earlier_attempt, attempt)
        yield event(kind, text, attempt.started_at, **data, trial=replica.is_trial)
    if former_milestone in ("", "chosen") and (
        replica.watched == attempt.id or attempt.ready_at is not None
    ):
        yield event(
            "engine.started",
            f"{plan.engine} of {name} runs.",
            engine=str(plan.engine),
            instance=attempt.instance_name,
        )
    if former_milestone in ("", "chosen", "started") and attempt.ready_at is not None:
        tested = attempt.abilities
        abilities = tested.model_dump(mode="json") if tested is not None else {}
        text = f"{name} answers, even to a full prefill batch and to many concurrent requests."
        yield event("engine.proven", text, attempt.ready_at, abilities=abilities)
        took_s = round(attempt.ready_at - attempt.started_at, 3)
        ready = {"took_s": took_s, "fingerprint": attempt.fingerprint, "grade": "verified"}
        yield event(
            "engine.ready",
            f"{name} is ready after {duration_text(max(0.0, took_s))}.",
            attempt.ready_at,
            **ready,
        )
    if (failure := attempt.failure) is not None:
        text = f"{name} failed ({failure.kind}): {failure.message}"
        details = failure.model_dump(mode="json", exclude_defaults=True)
        ended_at = attempt.ended_at or now
        engine = str(plan.engine)
        yield event("engine.failed", text, ended_at, engine=engine, failure=details)
    elif not attempt.is_live:
        stop_kind, reason = _stop_reason(model, replica)
        text = f"An engine of {name} stops: {reason}."
        yield event("engine.stopped", text, attempt.ended_at or now, why=stop_kind, reason=reason)


def _plan_event(
    name: str, earlier_attempt: Attempt | None, attempt: Attempt
) -> tuple[EventKind, str, dict[str, Any]]:
    """The kind, sentence and data of the event about a start's plan."""
    plan = attempt.plan
    data: dict[str, Any] = {
        "engine": str(plan.engine),
        "gpus": list(plan.gpus),
        "fingerprint": attempt.fingerprint,
        "grade": plan.grade,
        "why": _plan_choices(plan),
        "memory_bytes": plan.memory.budget_bytes,
        "kv_tokens": plan.memory.kv_tokens,
        "warnings": list(plan.warnings),
    }
    device_words = plural(len(plan.gpus), "GPU") if plan.gpus else "the CPU"
    cause = f"{plan.engine} on {device_words}, context {plan.max_model_len.value}"
    if earlier_attempt is not None and earlier_attempt.failure is not None:
        differences = _difference_rows(diff_plans(earlier_attempt.plan, plan))
        data |= {
            "after": earlier_attempt.failure.kind,
            "attempt_before": earlier_attempt.id,
            "differences": differences,
        }
        changes = _differences_text(differences) or "the same plan again"
        return (
            "plan.fallback",
            f"{name} is tried again after {earlier_attempt.failure.kind}: {changes}.",
            data,
        )
    if (
        plan.cap is not None
        and earlier_attempt is not None
        and plan.memory.kv_tokens < earlier_attempt.plan.memory.kv_tokens
    ):
        data |= {"cap_bytes": plan.cap.bytes, "for": list(plan.cap.models)}
        return (
            "plan.shrunk",
            (
                f"{name} gives KV cache to {', '.join(plan.cap.models)}: {plan.memory.kv_tokens}"
                " tokens remain."
            ),
            data,
        )
    return "plan.chosen", f"{name} is planned: {cause}.", data


def _plan_choices(plan: Plan) -> dict[str, Any]:
    return {
        name: {"value": choice.value, "reason": choice.reason, "source": choice.source}
        for name, choice in plan
        if isinstance(choice, Choice)
    }


def _stop_reason(model: ReportedModel, replica: ReportedReplica) -> tuple[str, str]:
    if model.is_deleting:
        return "removed", "its model is removed"
    if replica.leaving is not None:
        return replica.leaving
    if replica.is_trial:
        return "trial", "the trial was not adopted, or took its place"
    return "replaced", "another engine takes its place"


def _phase_events(
    name: str, former_replica: ReportedReplica, new_replica: ReportedReplica
) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
    """The event about a start that goes on. Figures that change every second are left out."""
    live = new_replica.live
    old_phase = _phase_head(former_replica.phase)
    new_phase = _phase_head(new_replica.phase)
    if old_phase == new_phase or live is None or live.state == "ready":
        return
    if old_phase.startswith(_WEIGHTS) and not new_phase.startswith(_WEIGHTS):
        yield (
            "weights.downloaded",
            f"The weights of {name} are here.",
            {"source": live.plan.model.source},
        )
    if new_phase.startswith(_WEIGHTS):
        if not old_phase.startswith(_WEIGHTS):
            yield (
                "weights.downloading",
                f"{new_replica.phase}, for {name}.",
                {"source": live.plan.model.source, "detail": new_replica.phase},
            )
    elif new_phase.startswith(_IMAGE):
        if not old_phase.startswith(_IMAGE):
            yield (
                "engine.pulling",
                f"{new_replica.phase}, for {name}.",
                {"engine": str(live.plan.engine), "detail": new_replica.phase},
            )
    elif new_phase:
        yield (
            "engine.phase",
            f"{name}: {new_replica.phase}",
            {"phase": new_phase, "detail": new_replica.phase},
        )


def _phase_head(phase: str) -> str:
    return phase.partition(": ")[0]


def _endpoint_events(
    former_model: ReportedModel | None, new_model: ReportedModel, now: float
) -> Iterator[Event]:
    states = former_model.endpoints if former_model is not None else {}
    for url, reason in new_model.endpoints.items():
        state_before = states.get(url)
        name = new_model.wish.name
        if not reason and state_before != "":
            yield Event(
                at=now,
                kind="endpoint.reached",
                model=name,
                words=f"{name}: {url} answers.",
                data={"url": url},
            )
        elif reason and state_before == "":
            yield Event(
                at=now,
                kind="endpoint.lost",
                model=name,
                words=f"{name}: {reason}",
                data={"url": url, "reason": reason},
            )


def _earlier_replica(
    former_model: ReportedModel | None, replica: ReportedReplica
) -> ReportedReplica:
    """The earlier state of the same replica."""
    replicas = former_model.replicas if former_model is not None else ()
    matches = (
        former_replica
        for former_replica in replicas
        if former_replica.index == replica.index and former_replica.is_trial == replica.is_trial
    )
    return next(matches, ReportedReplica(replica.index))


def _difference_rows(changes: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {"field": change.field, "former": change.former, "present": change.present}
        for change in changes
    ]


def _differences_text(differences: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{difference['field']} {difference['former'] or 'unset'}"
        f" -> {difference['present'] or 'unset'}"
        for difference in differences
    )
