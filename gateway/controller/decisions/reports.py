"""The events that lie between two states of a model. Pure.

Events follow from recorded and observed state, not from the code path. So each event is reported
once, for any cause. Events that a dying gateway could not report are reported at the next start:
`ReportedStages` remembers the last report of each start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.controller.decisions.changes import diff_plans, diff_wishes
from gateway.controller.decisions.reconcile import Rest
from gateway.domain import Attempt, Change, Choice, Offer, Plan, Wish
from gateway.domain.facts import Event, EventKind
from gateway.domain.phases import detail_beside
from gateway.domain.units import in_words, plural

Stage = Literal["", "chosen", "started", "ready", "ended"]
"""How far a start was reported."""

_STAGES: dict[str, Stage] = {
    "plan.chosen": "chosen",
    "plan.fallback": "chosen",
    "plan.shrunk": "chosen",
    "engine.started": "started",
    "engine.ready": "ready",
    "engine.failed": "ended",
    "engine.stopped": "ended",
}
_STAGE_ORDER: tuple[Stage, ...] = ("", "chosen", "started", "ready", "ended")
# Prefixes of phases that have events of their own.
_WEIGHTS, _IMAGE = ("Downloading ", "Checking "), ("pulling ", "unpacking ")


@dataclass(frozen=True, slots=True)
class ReportedReplica:
    """One replica.

    `attempts` are the last few, oldest first, with the live one. `watched` is the attempt whose
    engine is seen to run. `leaving` is the reason of its eviction, as a word and as a sentence.
    """

    index: int
    attempts: tuple[Attempt, ...] = ()
    status: Rest = field(default_factory=lambda: Rest("starting"))
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
    replicas: tuple[ReportedReplica, ...] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict)


class ReportedStages:
    """The reported stage of each start, by attempt number."""

    def __init__(self) -> None:
        self._stages: dict[int, Stage] = {}

    def stage(self, attempt: Attempt) -> Stage:
        return self._stages.get(attempt.id, "")

    def note(self, number: int, stage: Stage) -> None:
        self._stages[number] = stage
        if len(self._stages) > 2 * _ENDED_STARTS_MAX:
            ended = sorted(number for number, stage in self._stages.items() if stage == "ended")
            for attempt_id in ended[:_ENDED_STARTS_MAX]:
                del self._stages[attempt_id]


# Ended starts to remember. A state holds the last few of each replica.
_ENDED_STARTS_MAX = 10_000


def stage_of(kind: str) -> Stage:
    """The stage that an event of this kind reports; "" if none."""
    return _STAGES.get(kind, "")


def stage(attempt: Attempt, *, is_watched: bool) -> Stage:
    """How far a start has come."""
    if not attempt.is_live:
        return "ended"
    return "ready" if attempt.state == "ready" else "started" if is_watched else "chosen"


def events_of_model(
    before: ReportedModel | None, after: ReportedModel | None, reported: ReportedStages, now: float
) -> Iterator[Event]:
    """The events between two states of a model; None: the model does not exist.

    `reported` is brought up to date while the events are consumed.
    """
    if after is None:
        if before is not None:
            name = before.wish.name
            if not before.is_deleting:
                yield Event(
                    at=now, kind="model.removing", model=name, words=f"{name} is being removed."
                )
            yield Event(at=now, kind="model.removed", model=name, words=f"{name} is removed.")
        return
    yield from _wish_events(before, after, now)
    for replica in after.replicas:
        yield from _replica_events(after, _earlier_replica(before, replica), replica, reported, now)
    yield from _endpoint_events(before, after, now)
    if before is not None and before.state != after.state:
        detail = detail_beside(after.state, after.detail)
        text = f"{after.wish.name} {_STATE_VERBS.get(after.state, f'is {after.state}')}" + (
            f": {detail}" if detail else "."
        )
        data = {"state": after.state, "before": before.state, "detail": after.detail}
        yield Event(at=now, kind="model.state", model=after.wish.name, words=text, data=data)


# States whose name is no adjective.
_STATE_VERBS = {"no_plan": "has no plan", "backing_off": "is backing off"}


def _wish_events(before: ReportedModel | None, after: ReportedModel, now: float) -> Iterator[Event]:
    wish, name = after.wish, after.wish.name

    def event(kind: EventKind, text: str, **data: Any) -> Event:
        return Event(at=now, kind=kind, model=name, words=text, data=data)

    if before is None:
        data = {"source": wish.source} if wish.source else {"endpoints": list(wish.endpoints)}
        yield event(
            "model.added", f"{name} is added: {wish.source or ', '.join(wish.endpoints)}.", **data
        )
        before = ReportedModel(wish)
    change, old = after.change, before.change
    if change is not None and (old is None or old.generation != change.generation):
        differences = _differences(diff_wishes(wish, change.wish))
        yield event(
            "model.changing",
            f"{name} is being changed: {_describe(differences)}.",
            differences=differences,
        )
    if (
        change is not None
        and change.refused
        and not (old is not None and old.generation == change.generation and old.refused)
    ):
        yield event(
            "model.change_refused",
            f"{name} stays as it was: {change.refused}",
            reason=change.refused,
        )
    if before.wish != wish and (differences := _differences(diff_wishes(before.wish, wish))):
        yield event(
            "model.changed",
            f"{name} is changed: {_describe(differences)}.",
            differences=differences,
        )
    if after.is_deleting and not before.is_deleting:
        yield event("model.removing", f"{name} is being removed.")
    if after.is_stopped != before.is_stopped:
        kind: EventKind = "model.stopped" if after.is_stopped else "model.started"
        yield event(kind, f"Its owner {'stops' if after.is_stopped else 'starts'} {name}.")
    if after.forgiven_at != before.forgiven_at:
        yield event("model.retried", f"{name} is tried again. Earlier failures no longer count.")


def _replica_events(
    model: ReportedModel,
    before: ReportedReplica,
    after: ReportedReplica,
    reported: ReportedStages,
    now: float,
) -> Iterator[Event]:
    for place, attempt in enumerate(after.attempts):
        is_watched = after.watched == attempt.id
        was, now_is = reported.stage(attempt), stage(attempt, is_watched=is_watched)
        if was != now_is and _STAGE_ORDER.index(was) < _STAGE_ORDER.index(now_is):
            reported.note(attempt.id, now_is)
            earlier = after.attempts[place - 1] if place else None
            yield from _start_events(model, after, earlier, attempt, was, now)

        if now_is == was == "ready":
            yield from _late_abilities(model, before, attempt, after.index, now)

    def event(kind: EventKind, text: str, **data: Any) -> Event:
        live = after.live
        number = live.id if live is not None else None
        return Event(
            at=now,
            kind=kind,
            model=name,
            replica=after.index,
            attempt=number,
            words=text,
            data=data,
        )

    name, status = model.wish.name, after.status
    yield from (
        event(kind, text, **data) for kind, text, data in _phase_events(name, before, after)
    )
    if after.awaited_offers and after.awaited_offers != before.awaited_offers:
        takes = [offer.words for offer in after.awaited_offers]
        yield event("plan.waits", f"{name} waits for others: {'; '.join(takes)}.", takes=takes)
    if after.leaving is not None and before.leaving is None and not after.is_trial:
        why, text = after.leaving
        copy = (
            f"Copy {after.index + 1} of {name}"
            if sum(not sibling.is_trial for sibling in model.replicas) > 1
            else name
        )
        yield event("model.leaving", f"{copy} is unloaded: {text}.", why=why)
    yield from (
        event(kind, text, **data)
        for kind, text, data in _status_events(name, before.status, status, now)
    )


def _late_abilities(
    model: ReportedModel, before: ReportedReplica, attempt: Attempt, index: int, now: float
) -> Iterator[Event]:
    """The abilities that an engine has shown after it was ready, as some answers take long."""
    earlier_abilities = next(
        (former_attempt for former_attempt in before.attempts if former_attempt.id == attempt.id),
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
    name: str, before: Rest, status: Rest, now: float
) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
    if status == before:
        return
    has_changed = (status.state, status.reason) != (before.state, before.reason)
    reason = {"reason": status.reason}
    if status.state == "no_plan" and has_changed:
        yield "plan.none", f"There is no plan for {name}: {status.reason}", reason
    elif status.state == "backing_off" and status.recheck_at is not None:
        wait = in_words(max(0.0, status.recheck_at - now))
        text = f"{name} is started again in {wait}, {status.reason}"
        yield "engine.retry", text, {"at": status.recheck_at, **reason}
    elif status.state == "quarantined" and has_changed:
        yield "engine.quarantined", f"{name} is not started again: {status.reason}", reason
    elif status.state == "unreachable" and before.state != "unreachable":
        yield "engine.frozen", f"An engine of {name} gets no requests: {status.reason}", reason
    elif status.state == "ready" and before.state == "unreachable":
        yield "engine.answers", f"An engine of {name} answers again.", {}


def _start_events(
    model: ReportedModel,
    replica: ReportedReplica,
    earlier: Attempt | None,
    attempt: Attempt,
    was: Stage,
    now: float,
) -> Iterator[Event]:
    """The events of a start that were not reported yet."""
    name, plan = model.wish.name, attempt.plan

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

    if was == "":
        kind, text, data = _plan_event(name, earlier, attempt)
        yield event(kind, text, attempt.started_at, **data, trial=replica.is_trial)
    if was in ("", "chosen") and (replica.watched == attempt.id or attempt.ready_at is not None):
        yield event(
            "engine.started",
            f"{plan.engine} of {name} runs.",
            engine=str(plan.engine),
            instance=attempt.instance_name,
        )
    if was in ("", "chosen", "started") and attempt.ready_at is not None:
        tested = attempt.abilities
        abilities = tested.model_dump(mode="json") if tested is not None else {}
        text = f"{name} answers, even to a full prefill batch and to many requests at once."
        yield event("engine.proven", text, attempt.ready_at, abilities=abilities)
        took_s = round(attempt.ready_at - attempt.started_at, 3)
        ready = {"took_s": took_s, "fingerprint": attempt.fingerprint, "grade": "verified"}
        yield event(
            "engine.ready",
            f"{name} is ready after {in_words(max(0.0, took_s))}.",
            attempt.ready_at,
            **ready,
        )
    if attempt.failure is not None:
        failure = attempt.failure
        text = f"{name} failed ({failure.kind}): {failure.message}"
        details = failure.model_dump(mode="json", exclude_defaults=True)
        yield event(
            "engine.failed",
            text,
            attempt.ended_at or now,
            engine=str(plan.engine),
            failure=details,
        )
    elif not attempt.is_live:
        why, reason = _stop_reason(model, replica)
        text = f"An engine of {name} stops: {reason}."
        yield event("engine.stopped", text, attempt.ended_at or now, why=why, reason=reason)


def _plan_event(
    name: str, earlier: Attempt | None, attempt: Attempt
) -> tuple[EventKind, str, dict[str, Any]]:
    """The kind, sentence and data of the event about a start's plan."""
    plan = attempt.plan
    data: dict[str, Any] = {
        "engine": str(plan.engine),
        "gpus": list(plan.gpus),
        "fingerprint": attempt.fingerprint,
        "grade": plan.grade,
        "why": _choices(plan),
        "memory_bytes": plan.memory.budget_bytes,
        "kv_tokens": plan.memory.kv_tokens,
        "warnings": list(plan.warnings),
    }
    place = plural(len(plan.gpus), "GPU") if plan.gpus else "the CPU"
    cause = f"{plan.engine} on {place}, context {plan.max_model_len.value}"
    if earlier is not None and earlier.failure is not None:
        differences = _differences(diff_plans(earlier.plan, plan))
        data |= {
            "after": earlier.failure.kind,
            "attempt_before": earlier.id,
            "differences": differences,
        }
        changes = _describe(differences) or "the same plan again"
        return (
            "plan.fallback",
            f"{name} is tried again after {earlier.failure.kind}: {changes}.",
            data,
        )
    if (
        plan.cap is not None
        and earlier is not None
        and plan.memory.kv_tokens < earlier.plan.memory.kv_tokens
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


def _choices(plan: Plan) -> dict[str, Any]:
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
    name: str, before: ReportedReplica, after: ReportedReplica
) -> Iterator[tuple[EventKind, str, dict[str, Any]]]:
    """The event about a start that goes on. Figures that change every second are left out."""
    live = after.live
    old, new = _head(before.phase), _head(after.phase)
    if old == new or live is None or live.state == "ready":
        return
    if old.startswith(_WEIGHTS) and not new.startswith(_WEIGHTS):
        yield (
            "weights.downloaded",
            f"The weights of {name} are here.",
            {"source": live.plan.model.source},
        )
    if new.startswith(_WEIGHTS):
        if not old.startswith(_WEIGHTS):
            yield (
                "weights.downloading",
                f"{after.phase}, for {name}.",
                {"source": live.plan.model.source, "detail": after.phase},
            )
    elif new.startswith(_IMAGE):
        if not old.startswith(_IMAGE):
            yield (
                "engine.pulling",
                f"{after.phase}, for {name}.",
                {"engine": str(live.plan.engine), "detail": after.phase},
            )
    elif new:
        yield "engine.phase", f"{name}: {after.phase}", {"phase": new, "detail": after.phase}


def _head(phase: str) -> str:
    return phase.partition(": ")[0]


def _endpoint_events(
    before: ReportedModel | None, after: ReportedModel, now: float
) -> Iterator[Event]:
    states = before.endpoints if before is not None else {}
    for url, why in after.endpoints.items():
        state_before = states.get(url)
        name = after.wish.name
        if not why and state_before != "":
            yield Event(
                at=now,
                kind="endpoint.reached",
                model=name,
                words=f"{name}: {url} answers.",
                data={"url": url},
            )
        elif why and state_before == "":
            yield Event(
                at=now,
                kind="endpoint.lost",
                model=name,
                words=f"{name}: {why}",
                data={"url": url, "reason": why},
            )


def _earlier_replica(before: ReportedModel | None, replica: ReportedReplica) -> ReportedReplica:
    """The earlier state of the same replica."""
    replicas = before.replicas if before is not None else ()
    matches = (
        candidate
        for candidate in replicas
        if candidate.index == replica.index and candidate.is_trial == replica.is_trial
    )
    return next(matches, ReportedReplica(replica.index))


def _differences(changes: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"what": change.what, "old": change.old, "new": change.new} for change in changes]


def _describe(differences: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{difference['what']} {difference['old'] or 'unset'} -> {difference['new'] or 'unset'}"
        for difference in differences
    )
