"""Metrics of engines, read from their /metrics every ten seconds, under one name for all engine
kinds.

The names of each engine version come from `counters` and `series` of its profile. A scrape of the
gateway causes no request to an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.watch.engine_client import NoAnswerError
from gateway.controller.watch.watcher import Watcher
from gateway.domain import Engine, EngineRef
from gateway.engines.common.speed.client_traffic import highest, sum_series
from gateway.errors import FitserveError
from gateway.proxy.metrics.counters import Sample
from gateway.supervision import SupervisedTask

_READ_S = 10.0
# Each engine is read less often if there are very many.
_MAX_READS_PER_S = 10
_TIMEOUT_S = 5.0
# vLLM writes 100 KB for a model with one rank.
_MAX_BYTES = 1024 * 1024
_OK = 200

# Names in profiles. A pair is the sum and the count of a time.
_GAUGES = {
    "running": "fitserve_engine_requests_running",
    "waiting": "fitserve_engine_requests_waiting",
    "kv_use": "fitserve_engine_kv_cache_use_ratio",
    "accept_rate": "fitserve_engine_draft_acceptance_ratio",
}
_COUNTERS = {
    "preempted": "fitserve_engine_preemptions_total",
    "prompt": "fitserve_engine_prompt_tokens_total",
    "cached": "fitserve_engine_cached_prompt_tokens_total",
    "written": "fitserve_engine_generated_tokens_total",
}
_TIMES = {
    ("first_s", "requests"): "fitserve_engine_first_token_seconds",
    ("between_s", "between"): "fitserve_engine_between_tokens_seconds",
    ("queued_s", "requests"): "fitserve_engine_queue_seconds",
}


@dataclass
class _Read:
    """Values of one engine, by the names in its profile."""

    engine: Engine
    values: dict[str, float] = field(default_factory=dict)


class EngineSeries:
    """Reads the metrics of engines, and gives them common names.

    models: all, by name.
    profile: the facts of an engine version.
    """

    def __init__(
        self, models: Mapping[str, ManagedModel], profile: Callable[[EngineRef], Engine]
    ) -> None:
        self._models = models
        self._profile = profile
        self._reads: dict[str, _Read] = {}
        self._reading = SupervisedTask(self._read_all, "reading the metrics of engines")

    def samples(self) -> Iterator[Sample]:
        for model, replica in self._ready_replicas():
            read = self._reads.get(_series_name(replica))
            if read is None:
                continue
            values = read.values
            labels = (model, str(replica.index))
            for key, name in (_GAUGES | _COUNTERS).items():
                if key in values:
                    yield name, labels, values[key]
            for (total, count), name in _TIMES.items():
                if total in values and count in values:
                    yield f"{name}_sum", labels, values[total]
                    yield f"{name}_count", labels, values[count]

    async def close(self) -> None:
        await self._reading.close()

    def _ready_replicas(self) -> Iterator[tuple[str, ReplicaState]]:
        for name, model in self._models.items():
            for replica in model.replicas:
                if (
                    replica.attempt is not None
                    and replica.attempt.state == "ready"
                    and replica.watcher is not None
                ):
                    yield name, replica

    async def _read_all(self) -> float:
        ready = [replica for _, replica in self._ready_replicas()]
        reads = await asyncio.gather(*(self._read(replica) for replica in ready))
        self._reads = {
            _series_name(replica): read
            for replica, read in zip(ready, reads, strict=True)
            if read is not None
        }
        return max(_READ_S, len(ready) / _MAX_READS_PER_S)

    async def _read(self, replica: ReplicaState) -> _Read | None:
        attempt = replica.attempt
        watcher = replica.watcher
        if attempt is None or watcher is None:
            return None
        former_read = self._reads.get(attempt.instance_name)
        try:
            engine = (
                former_read.engine
                if former_read is not None
                else await asyncio.to_thread(self._profile, attempt.plan.engine)
            )
            body = await _metrics(watcher) if engine.counters or engine.series else b""
        except (NoAnswerError, FitserveError):
            return None
        return _Read(
            engine,
            _series_values(body, engine, former_read.values if former_read is not None else {}),
        )


async def _metrics(watcher: Watcher) -> bytes:
    """The engine's metrics in the Prometheus form; b"": it has none. Raises NoAnswerError."""
    answer = await watcher.client.get(f"{watcher.url}/metrics", _TIMEOUT_S, _MAX_BYTES)
    # SGLang has none without --enable-metrics.
    return answer.body if answer.status == _OK else b""


def _series_values(
    body: bytes, engine: Engine, former_values: Mapping[str, float]
) -> dict[str, float]:
    series = dict(engine.series)
    use = series.pop("kv_use", None)
    values = {**(sum_series(body, engine.counters) or {}), **(sum_series(body, series) or {})}
    if use is not None and (fullest := highest(body, use)) is not None:
        # The fullest rank limits the engine.
        values["kv_use"] = fullest
    drafted = values.get("drafted", 0.0) - former_values.get("drafted", 0.0)
    if drafted > 0 and "accepted" in values:
        values["accept_rate"] = (
            max(0.0, values["accepted"] - former_values.get("accepted", 0.0)) / drafted
        )
    return values


def _series_name(replica: ReplicaState) -> str:
    return replica.attempt.instance_name if replica.attempt is not None else ""
