"""Reads the counters of engines that serve, and keeps the stretches of time that tell how fast they
answer their clients."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.watch.engine_client import NoAnswerError
from gateway.domain import Attempt, Engine, EngineRef, Served
from gateway.engines.common.speed.served import LEAST_STRETCHES, Counts, between, counted
from gateway.errors import FitserveError

# Between two looks at the counters of an engine.
READ_S = 30.0
_WITHIN_S = 5.0
# vLLM writes 100 KB of a model with one rank.
_MOST_BYTES = 1024 * 1024
# What was last seen tells of the engine as it is now.
_KEPT = 20
_OK, _NOT_FOUND = 200, 404
# To compare them takes a plan, so that it is done every few minutes.
AGAIN_STRETCHES = 10
# The first requests compile what was not compiled at the start.
_COLD_S = 60.0


@dataclass
class _Readings:
    """Of one engine. fresh: stretches since they were last looked at together; told: they once
    were."""

    names: Mapping[str, str] | None = None
    counts: Counts | None = None
    neighbours: Mapping[str, float] | None = None
    at: float = 0.0
    silent: bool = False
    stretches: deque[Served] = field(default_factory=lambda: deque(maxlen=_KEPT))
    fresh: int = 0
    told: bool = False


class Traffic:
    """models: all, by name. working: whether an engine of a model works for a client. asked:
    requests that ended, by model. profile: what is
    known of an engine version."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        working: Callable[[str], bool],
        asked: Callable[[], Mapping[str, float]],
        profile: Callable[[EngineRef], Engine],
    ) -> None:
        self._models = models
        self._working = working
        self._asked = asked
        self._profile = profile
        self._engines: dict[str, _Readings] = {}

    async def read(self, model: ManagedModel) -> None:
        """Look at the engines of the model, as far as it is time."""
        for replica in model.replicas:
            attempt = replica.attempt
            if (
                attempt is None
                or not attempt.serves
                or attempt.plan.speed is None
                or replica.watcher is None
            ):
                continue
            readings = self._engines.setdefault(attempt.instance_name, _Readings())
            if not readings.silent and time.monotonic() - readings.at >= READ_S:
                readings.at = time.monotonic()
                await self._read(replica, attempt, readings)

    def forget(self) -> None:
        """What is known of engines that serve no more."""
        serving = {
            attempt.instance_name for model in self._models.values() for attempt in model.serving
        }
        self._engines = {
            name: readings for name, readings in self._engines.items() if name in serving
        }

    def due(self, model: ManagedModel) -> tuple[Served, ...]:
        """What the engines of the model gave their clients, once enough of that is new; all copies
        have the same plan."""
        engines = [
            self._engines[one.instance_name]
            for one in model.serving
            if one.instance_name in self._engines
        ]
        wanted = AGAIN_STRETCHES if any(one.told for one in engines) else LEAST_STRETCHES
        if sum(one.fresh for one in engines) < wanted:
            return ()
        for one in engines:
            one.fresh, one.told = 0, True
        return tuple(stretch for one in engines for stretch in one.stretches)

    async def _read(self, replica: ReplicaState, attempt: Attempt, readings: _Readings) -> None:
        neighbours, before = self._neighbours(replica, attempt), readings.neighbours
        counts = await self._counts(replica, attempt, readings)
        undisturbed = neighbours is not None and neighbours == before == self._neighbours(
            replica, attempt
        )
        cold = time.time() - (attempt.ready_at or 0.0) < _COLD_S
        if counts is not None and readings.counts is not None and undisturbed:
            stretch = between(readings.counts, counts)
            if stretch is not None:
                readings.stretches.append(stretch)
                readings.fresh += 1
        readings.counts, readings.neighbours = None if cold else counts, neighbours

    async def _counts(
        self, replica: ReplicaState, attempt: Attempt, readings: _Readings
    ) -> Counts | None:
        watcher = replica.watcher
        try:
            if readings.names is None:
                readings.names = (
                    await asyncio.to_thread(self._profile, attempt.plan.engine)
                ).counters
            if not readings.names or watcher is None:
                readings.silent = not readings.names
                return None
            answer = await watcher.client.get(f"{watcher.url}/metrics", _WITHIN_S, _MOST_BYTES)
        except (NoAnswerError, FitserveError):
            return None
        # What does not count now does not later.
        readings.silent = answer.status == _NOT_FOUND
        return counted(answer.body, readings.names) if answer.status == _OK else None

    def _neighbours(self, replica: ReplicaState, attempt: Attempt) -> Mapping[str, float] | None:
        """What other models on the same GPUs have answered; None while one of them starts, ends or
        works, or nobody knows the GPUs."""
        gpus, found, asked = set(attempt.plan.gpus), dict[str, float](), self._asked()
        for name, model in self._models.items():
            for other in model.all_replicas:
                shares = any(gpus & set(one.plan.gpus) for one in other.attempts if one.live)
                if other is replica or not shares:
                    continue
                if other.stage != "stands" or model.deleting or self._working(name):
                    return None
                found[name] = asked.get(name, 0.0)
        return found
