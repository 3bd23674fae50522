"""Detects changes of models, GPUs, keys and engines after each pass, and reports them as events.

The comparison is in gateway/controller/decisions/reports.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from gateway.controller.decisions.reports import (
    ReportedMilestones,
    ReportedModel,
    ReportedReplica,
    events_of_model,
    milestone_of_attempt,
    milestone_of_event,
)
from gateway.controller.events.event_log import EventLog
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_state import status
from gateway.domain.facts import Event, EventKind
from gateway.machine.environment import installed_engines
from gateway.machine.gpu_watch import GpuWatch
from gateway.proxy.access.keyring import StoredKey
from gateway.settings import Settings
from gateway.store.store import Store
from gateway.supervision import ErrorBackoff, SupervisedTask
from gateway.version import __version__

# Seconds between two looks at the installed engines.
_ENGINES_S = 5.0
# A look is followed by a pause of this many times its own duration, at most `_MAX_PAUSE_S`. So a
# storm of passes has a bounded cost.
_PAUSE = 300
_MAX_PAUSE_S = 0.2
# A hot card lowers and raises its clocks every few seconds.
_THROTTLE_REPEAT_S = 60.0
# Ended starts of a replica to look at. No pass ends more.
_MAX_ENDED_STARTS = 4


class Observer:
    """Compares each pass with the last one, and reports the changes as events.

    `models` are those of the loop, by name; `keys` gives the present keys.
    """

    def __init__(
        self,
        events: EventLog,
        models: Mapping[str, ManagedModel],
        gpus: GpuWatch,
        keys: Callable[[], Iterable[StoredKey]],
        settings: Settings,
    ) -> None:
        self._events = events
        self._models = models
        self._gpus = gpus
        self._keys = keys
        self._settings = settings
        self._milestones = ReportedMilestones()
        self._reported_fingerprints: dict[str, tuple[Any, ...]] = {}
        self._now: dict[str, ReportedModel] = {}
        self._lost_gpus: Mapping[str, Any] = {}
        self._errors: dict[tuple[str, int], int] = {}
        self._throttled: dict[str, float] = {}
        self._known_keys: dict[str, StoredKey] = {}
        self._engines: frozenset[str] | None = None
        self._setback = ErrorBackoff("telling events")
        self._next = 0.0
        self._next_look: asyncio.TimerHandle | None = None
        self._looking: SupervisedTask | None = None

    def load_position(self, store: Store) -> list[Event]:
        """Read from the store how far events were reported. Blocks.

        Returns the removals that happened while no gateway ran, for `start`. Raises StoreError.
        """
        bounds = store.events.bounds()
        reported_attempts = store.events.attempt_kinds()
        models = store.events.models()
        oldest_events = store.events.events_after(bounds.oldest - 1, 1)
        oldest_at = oldest_events[0].at if oldest_events else time.time()
        event_ids = {number for number, _ in reported_attempts}
        for number, kind in reported_attempts:
            if (reached := milestone_of_event(kind)) != "":
                self._milestones.record(number, reached)
        for name, model in self._models.items():
            for attempt in (past for replica in model.replicas for past in replica.attempts):
                if attempt.id not in event_ids and attempt.started_at < oldest_at:
                    self._milestones.record(
                        attempt.id, milestone_of_attempt(attempt, is_watched=True)
                    )
            if models.get(name) == "model.added" or model.created_at < oldest_at:
                self._now[name] = _reported_model(model)
        now = time.time()
        removed_names = [
            name
            for name, kind in models.items()
            if kind == "model.added" and name not in self._models
        ]
        self._known_keys = {key.grant.name: key for key in self._keys()}
        return [
            _new_event(now, "model.removed", f"{name} is removed.", model=name)
            for name in removed_names
        ]

    def start(self, endings: list[Event]) -> None:
        """Start on the event loop, which all later calls use too."""
        self._events.append(endings)
        details: dict[str, Any] = {
            "version": __version__,
            "workers": self._settings.workers,
            "models": len(self._models),
        }
        self._publish_event(
            _new_event(
                time.time(), "gateway.started", f"fitserve {__version__} has started.", **details
            )
        )
        self._looking = SupervisedTask(self._look_at_engines, "the look at installed engines")

    def stop(self) -> None:
        """Report the end of the server."""
        self._observe_in_turn()
        self._publish_event(
            _new_event(time.time(), "gateway.stopped", "The gateway stops; engines run on.")
        )
        self._events.drain()

    async def close(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        if self._looking is not None:
            await self._looking.close()

    def report_changes(self) -> None:
        """Look after a pass; at most a few times in a second. Never raises."""
        wait_s = self._next - time.monotonic()
        if wait_s <= 0:
            self._observe_in_turn()
        elif self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(wait_s, self._observe_in_turn)

    def _observe_in_turn(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        self._next_look, start_s = None, time.thread_time()
        if not self._setback.rest_s:
            self._look_at_all()
        self._next = time.monotonic() + min(_MAX_PAUSE_S, _PAUSE * (time.thread_time() - start_s))

    def _look_at_all(self) -> None:
        try:
            now = time.time()
            for name, model in self._models.items():
                fingerprint = _fingerprint(model)
                if fingerprint != self._reported_fingerprints.get(name):
                    self._reported_fingerprints[name] = fingerprint
                    former_model = self._now.get(name)
                    self._now[name] = _reported_model(model)
                    self._events.append(
                        events_of_model(former_model, self._now[name], self._milestones, now)
                    )
            for name in [name for name in self._now if name not in self._models]:
                self._reported_fingerprints.pop(name, None)
                self._events.append(
                    events_of_model(self._now.pop(name), None, self._milestones, now)
                )
            self._look_at_gpus(now)
            self._look_at_keys(now)
        except Exception as error:
            self._setback.record_failure(error)
        else:
            self._setback.clear()

    def _publish_event(self, event: Event) -> None:
        self._events.append((event,))

    def _look_at_gpus(self, now: float) -> None:
        if self._gpus.lost_cards is not self._lost_gpus:
            self._report_losses(now)
        self._report_throttling(now)
        if self._gpus.counts != self._errors:
            self._report_gpu_errors(now)

    def _report_losses(self, now: float) -> None:
        lost_gpus = self._gpus.lost_cards
        for uuid in lost_gpus.keys() - self._lost_gpus.keys():
            loss = lost_gpus[uuid]
            text = f"{uuid} is not used: {loss.message}"
            self._publish_event(
                _new_event(now, "gpu.lost", text, gpu=uuid, reason=loss.message, xid=loss.xid)
            )
        for uuid in self._lost_gpus.keys() - lost_gpus.keys():
            self._publish_event(_new_event(now, "gpu.back", f"{uuid} works again.", gpu=uuid))
        self._lost_gpus = lost_gpus

    def _report_throttling(self, now: float) -> None:
        for uuid, reading in self._gpus.readings.items():
            if not reading.throttled:
                continue
            if uuid not in self._throttled:
                reasons = list(reading.throttled)
                text = f"{uuid} lowers its clocks: {', '.join(reasons)}."
                degrees = reading.temperature_c
                self._publish_event(
                    _new_event(
                        now, "gpu.throttled", text, gpu=uuid, why=reasons, temperature_c=degrees
                    )
                )
            self._throttled[uuid] = now
        for uuid in [
            uuid for uuid, at in self._throttled.items() if not 0 <= now - at <= _THROTTLE_REPEAT_S
        ]:
            del self._throttled[uuid]
            self._publish_event(
                _new_event(now, "gpu.unthrottled", f"{uuid} has its clocks again.", gpu=uuid)
            )

    def _report_gpu_errors(self, now: float) -> None:
        for (uuid, xid), count in dict(self._gpus.counts).items():
            if count != self._errors.get((uuid, xid)):
                self._errors[uuid, xid] = count
                text = f"{uuid} reported Xid {xid} ({self._gpus.meaning(xid)})."
                self._publish_event(
                    _new_event(now, "gpu.error", text, gpu=uuid, xid=xid, count=count)
                )

    def _look_at_keys(self, now: float) -> None:
        keys = {stored_key.grant.name: stored_key for stored_key in self._keys()}
        if keys == self._known_keys:
            return
        for name, key in keys.items():
            if self._known_keys.get(name) is None:
                scopes = list(key.grant.scopes)
                self._publish_event(
                    _new_event(
                        now,
                        "key.added",
                        f"The key {name} may call: {', '.join(scopes)}.",
                        key=name,
                        scopes=scopes,
                    )
                )
        for name in self._known_keys.keys() - keys.keys():
            self._publish_event(
                _new_event(now, "key.removed", f"The key {name} is revoked.", key=name)
            )
        self._known_keys = keys

    async def _look_at_engines(self) -> float:
        engines = await asyncio.to_thread(installed_engines, self._settings.data)
        former_engines = self._engines
        self._engines = engines
        if former_engines is not None:
            now = time.time()
            for name in sorted(engines - former_engines):
                self._publish_event(
                    _new_event(now, "engine.installed", f"{name} is installed.", engine=name)
                )
            for name in sorted(former_engines - engines):
                self._publish_event(
                    _new_event(now, "engine.uninstalled", f"{name} was uninstalled.", engine=name)
                )
        return _ENGINES_S


def _new_event(
    now: float, kind: EventKind, words: str, model: str | None = None, **data: Any
) -> Event:
    return Event(at=now, kind=kind, words=words, model=model, data=data)


def _fingerprint(model: ManagedModel) -> tuple[Any, ...]:
    """All values that can cause an event. The values are replaced, never changed: a cheap
    comparison."""
    fingerprint: tuple[Any, ...] = _MODEL_VALUES(model)
    for replica in model.all_replicas:
        fingerprint += (
            *_REPLICA_VALUES(replica),
            replica.last_ended_id,
            replica.watcher and replica.watcher.observation,
        )
    for endpoint in model.endpoints:
        fingerprint += (endpoint.replica,)
    return fingerprint


_MODEL_VALUES = attrgetter(
    "wish",
    "is_deleting",
    "is_stopped",
    "forgiven_at",
    "generation",
    "change",
    "trial",
    "pause_reason",
    "copy_change",
    "setback.problem",
)
_REPLICA_VALUES = attrgetter("attempt", "status", "progress", "planning.awaited_offers", "eviction")


def _reported_model(model: ManagedModel) -> ReportedModel:
    state, detail = status(model)
    replicas = [
        _reported_replica(replica, pause_reason=model.pause_reason) for replica in model.replicas
    ]
    if model.trial is not None:
        replicas.append(_reported_replica(model.trial, is_trial=True))
    return ReportedModel(
        wish=model.wish,
        state=state,
        detail=detail,
        is_deleting=model.is_deleting,
        is_stopped=model.is_stopped,
        forgiven_at=model.forgiven_at,
        generation=model.generation,
        change=model.change,
        copy_change=model.copy_change,
        replicas=tuple(replicas),
        endpoints={
            endpoint.url: "" if endpoint.replica is not None else endpoint.detail
            for endpoint in model.endpoints
        },
    )


def _reported_replica(
    replica: ReplicaState, *, is_trial: bool = False, pause_reason: str = ""
) -> ReportedReplica:
    eviction_words = ("trials", pause_reason) if pause_reason else None
    if replica.eviction is not None:
        eviction_words = replica.eviction.cause, replica.eviction.reason
    return ReportedReplica(
        index=replica.index,
        attempts=(
            *replica.history[-_MAX_ENDED_STARTS:],
            *([replica.attempt] if replica.attempt is not None else ()),
        ),
        status=replica.status,
        phase=replica.phase,
        watched=replica.watcher.attempt.id if replica.watcher is not None else None,
        awaited_offers=replica.planning.awaited_offers,
        leaving=eviction_words,
        is_trial=is_trial,
    )
