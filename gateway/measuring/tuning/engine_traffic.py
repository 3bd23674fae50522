"""Speed of serving engines from their own counters, in stretches of time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.watch.engine_client import NoAnswerError
from gateway.domain import Attempt, Engine, EngineRef, TrafficSums
from gateway.engines.common.speed.client_traffic import (
    MIN_STRETCHES,
    Counts,
    sum_series,
    traffic_between,
)
from gateway.errors import FitserveError

# Seconds between two reads of an engine's counters.
READ_INTERVAL_S = 30.0
_TIMEOUT_S = 5.0
# vLLM writes 100 KB for a model with one rank.
_MAX_BYTES = 1024 * 1024
# Only the newest stretches count: they describe the engine as it is now.
_MAX_STRETCHES = 20
_OK_STATUS = 200
_NOT_FOUND_STATUS = 404
# A comparison needs a plan, so it is made every few minutes.
MIN_NEW_STRETCHES = 10
# The first requests compile kernels, so they do not count.
_WARMUP_S = 60.0


@dataclass
class _Readings:
    """The readings of one engine.

    new_stretches: the number of stretches since the last report.
    is_reported: whether its stretches were reported at least once.
    """

    names: Mapping[str, str] | None = None
    counts: Counts | None = None
    neighbours: Mapping[str, float] | None = None
    read_at: float = 0.0
    is_silent: bool = False
    stretches: deque[TrafficSums] = field(default_factory=lambda: deque(maxlen=_MAX_STRETCHES))
    new_stretches: int = 0
    is_reported: bool = False


class ServedTraffic:
    """Reads the counters of all models' engines.

    is_working: whether a model works on a client's request.
    request_counts: ended requests by model.
    profile: the profile of an engine version.
    """

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        is_working: Callable[[str], bool],
        request_counts: Callable[[], Mapping[str, float]],
        profile: Callable[[EngineRef], Engine],
    ) -> None:
        self._models = models
        self.is_working = is_working
        self.request_counts = request_counts
        self._profile = profile
        self._engines: dict[str, _Readings] = {}

    async def read(self, model: ManagedModel) -> None:
        """Read the counters of the model's engines that are due."""
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
            if not readings.is_silent and time.monotonic() - readings.read_at >= READ_INTERVAL_S:
                readings.read_at = time.monotonic()
                await self._read_counters(replica, attempt, readings)

    def forget(self) -> None:
        """Drop the readings of engines that stopped serving."""
        serving_names = {
            attempt.instance_name for model in self._models.values() for attempt in model.serving
        }
        self._engines = {
            name: readings for name, readings in self._engines.items() if name in serving_names
        }

    def due(self, model: ManagedModel) -> tuple[TrafficSums, ...]:
        """The stretches of the model's engines once enough of them are new, else none. All replicas
        have the same plan."""
        engines = [
            self._engines[attempt.instance_name]
            for attempt in model.serving
            if attempt.instance_name in self._engines
        ]
        minimum = (
            MIN_NEW_STRETCHES
            if any(readings.is_reported for readings in engines)
            else MIN_STRETCHES
        )
        if sum(readings.new_stretches for readings in engines) < minimum:
            return ()
        for readings in engines:
            readings.new_stretches = 0
            readings.is_reported = True
        return tuple(stretch for readings in engines for stretch in readings.stretches)

    async def _read_counters(
        self, replica: ReplicaState, attempt: Attempt, readings: _Readings
    ) -> None:
        neighbours = self._neighbours(replica, attempt)
        neighbours_before = readings.neighbours
        counts = await self._counts(replica, attempt, readings)
        is_undisturbed = (
            neighbours is not None
            and neighbours == neighbours_before == self._neighbours(replica, attempt)
        )
        is_cold = time.time() - (attempt.ready_at or 0.0) < _WARMUP_S
        if counts is not None and readings.counts is not None and is_undisturbed:
            stretch = traffic_between(readings.counts, counts)
            if stretch is not None:
                readings.stretches.append(stretch)
                readings.new_stretches += 1
        readings.counts = None if is_cold else counts
        readings.neighbours = neighbours

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
                readings.is_silent = not readings.names
                return None
            answer = await watcher.client.get(f"{watcher.url}/metrics", _TIMEOUT_S, _MAX_BYTES)
        except (NoAnswerError, FitserveError):
            return None
        # An engine without counters has none later.
        readings.is_silent = answer.status == _NOT_FOUND_STATUS
        return sum_series(answer.body, readings.names) if answer.status == _OK_STATUS else None

    def _neighbours(self, replica: ReplicaState, attempt: Attempt) -> Mapping[str, float] | None:
        """Ended requests of other models on the same GPUs. None while one of them starts, stops or
        works."""
        gpus = set(attempt.plan.gpus)
        counts = dict[str, float]()
        ended_counts = self.request_counts()
        for name, model in self._models.items():
            for replica_beside in model.all_replicas:
                shares = any(
                    gpus & set(attempt_beside.plan.gpus)
                    for attempt_beside in replica_beside.attempts
                    if attempt_beside.is_live
                )
                if replica_beside is replica or not shares:
                    continue
                if (
                    replica_beside.engine_phase != "settled"
                    or model.is_deleting
                    or self.is_working(name)
                ):
                    return None
                counts[name] = ended_counts.get(name, 0.0)
        return counts
