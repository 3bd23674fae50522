"""The route /metrics, and gauges read on demand: models, engines, GPUs and this process."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from gateway.controller.copy_sizer import CopySizer
from gateway.controller.evictor import Evictor
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.fleet.model_state import status
from gateway.controller.loop_health import LoopHealth
from gateway.domain import Attempt
from gateway.machine.gpu_watch import GpuWatch
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.metrics.counters import Metrics, Sample, render
from gateway.server.gateway_parts import Gateway, gateway_of
from gateway.version import __version__

if TYPE_CHECKING:
    from gateway.proxy.workers.supervisor import Workers

router = APIRouter()
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    """All metrics in Prometheus' text format."""
    gateway = gateway_of(request)
    text = await gateway.shared_answer("metrics", partial(_metrics_text, gateway))
    return PlainTextResponse(text, media_type=_CONTENT_TYPE)


async def _metrics_text(gateway: Gateway) -> bytes:
    samples = await all_samples(gateway)
    # Many models take tens of milliseconds, which must not delay streams.
    return (await asyncio.to_thread(render, samples)).encode()


async def all_samples(gateway: Gateway) -> list[Sample]:
    """All metrics of the gateway, each name with its labels once."""
    front = gateway.serving
    loop = gateway.loop
    facts = await asyncio.to_thread(gateway.store.fact_counts)
    models = loop.fleet.models
    samples = [
        *front.metrics.samples(),
        *gateway.starts.samples(models),
        *_model_samples(models, front.plane),
        *_loop_samples(loop.evictor, loop.sizer, loop.health),
        *_process_samples(),
    ]
    samples += [*gateway.engine_series.samples(), *_gpu_samples(front.gpus)]
    samples += [("fitserve_facts", (kind,), count) for kind, count in facts.items()]
    if front.telemetry is not None:
        samples += front.telemetry.samples()
    if front.transcripts is not None:
        samples += front.transcripts.samples()
    if front.workers is not None:
        samples = _sum_samples([*samples, *front.workers.samples()])
    return samples


def requests_ended(counted_samples: Metrics, workers: Workers | None) -> dict[str, float]:
    """Number of ended requests so far, by model."""
    ended_counts: dict[str, float] = {}
    for name, labels, value in request_samples(counted_samples, workers):
        if name == "fitserve_requests_total":
            ended_counts[labels[0]] = ended_counts.get(labels[0], 0.0) + value
    return ended_counts


def request_samples(metrics: Metrics, workers: Workers | None) -> list[Sample]:
    """Counts of requests in all processes. A name with its labels may occur several times."""
    return [*metrics.samples(), *(workers.samples() if workers is not None else ())]


def _sum_samples(samples: list[Sample]) -> list[Sample]:
    """Sums over processes of the samples with equal name and labels."""
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for name, labels, value in samples:
        sums[name, labels] = sums.get((name, labels), 0) + value
    return [(name, labels, value) for (name, labels), value in sums.items()]


class StartCounter:
    """Counts each start once, even after the start is forgotten."""

    def __init__(self) -> None:
        self._started_attempts: set[int] = set()
        self._failed_attempts: set[int] = set()
        self._attempts: Counter[str] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()

    def samples(self, models: dict[str, ManagedModel]) -> Iterator[Sample]:
        replicas = [replica for model in models.values() for replica in model.replicas]
        attempts: dict[int, Attempt] = {
            attempt.id: attempt for replica in replicas for attempt in replica.attempts
        }
        for attempt in attempts.values():
            if attempt.id not in self._started_attempts:
                self._attempts[attempt.model] += 1
            if attempt.failure is not None and attempt.id not in self._failed_attempts:
                self._failed_attempts.add(attempt.id)
                self._failures[attempt.model, attempt.failure.kind] += 1
        # Ids are never reused, so forgotten ids are dropped here too.
        self._started_attempts = set(attempts)
        self._failed_attempts &= self._started_attempts
        for model, count in self._attempts.items():
            yield "fitserve_attempts_total", (model,), count
        for labels, count in self._failures.items():
            yield "fitserve_failures_total", labels, count


def _model_samples(models: dict[str, ManagedModel], plane: DataPlane) -> Iterator[Sample]:
    for state, count in Counter(status(model)[0] for model in models.values()).items():
        yield "fitserve_models", (state,), count
    planned_counts: Counter[str] = Counter()
    for name, model in models.items():
        states: Counter[str] = Counter(replica.status.state for replica in model.replicas)
        states.update(endpoint.state for endpoint in model.endpoints)
        for state, count in states.items():
            yield "fitserve_replicas", (name, state), count
        if model.wish.copies is not None and model.wanted_copies is not None:
            yield "fitserve_copies_wanted", (name,), model.wanted_copies
        yield "fitserve_requests_queued", (name,), plane.routes.waiting(name)
        for replica in model.replicas:
            if replica.attempt is not None:
                attempt = replica.attempt
                budget = replica.attempt.plan.memory.budget_bytes
                planned_counts.update(
                    {gpu: min(budget, attempt.promised_bytes(gpu)) for gpu in attempt.plan.gpus}
                )
    for gpu, size in planned_counts.items():
        yield "fitserve_gpu_planned_bytes", (gpu,), size
    yield "fitserve_connections", (), len(plane.connections)


def _loop_samples(evictor: Evictor, sizer: CopySizer, health: LoopHealth) -> Iterator[Sample]:
    for labels, count in evictor.unloads.items():
        yield "fitserve_unloads_total", labels, count
    for model_and_cause, count in sizer.changes.items():
        yield "fitserve_copy_changes_total", model_and_cause, count
    yield "fitserve_loop_age_seconds", (), round(time.monotonic() - health.last_pass, 3)


def _gpu_samples(watch: GpuWatch) -> Iterator[Sample]:
    for uuid, reading in watch.readings.items():
        yield "fitserve_gpu_info", (uuid, str(reading.index), reading.name), 1
        for name, value in (
            ("fitserve_gpu_use_ratio", reading.use),
            ("fitserve_gpu_memory_used_bytes", reading.used_bytes),
            ("fitserve_gpu_memory_bytes", reading.total_bytes),
            ("fitserve_gpu_temperature_celsius", reading.temperature_c),
            ("fitserve_gpu_power_watts", reading.power_w),
            ("fitserve_gpu_power_limit_watts", reading.power_limit_w),
        ):
            if value is not None:
                yield name, (uuid,), value
        for reason in reading.throttled:
            yield "fitserve_gpu_throttled", (uuid, reason), 1
    for uuid in watch.lost_cards:
        yield "fitserve_gpu_lost", (uuid,), 1
    for (uuid, xid), count in dict(watch.counts).items():
        yield "fitserve_gpu_errors_total", (uuid, str(xid)), count


def _process_samples() -> Iterator[Sample]:
    yield "fitserve_build_info", (__version__, platform.python_version()), 1
    # The name before `)` may contain anything; fields 3 and on of proc(5) follow.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    yield "process_start_time_seconds", (), round(booted + int(fields[19]) / _TICKS, 2)
    yield "process_cpu_seconds_total", (), round(time.process_time(), 6)
    yield "process_resident_memory_bytes", (), int(fields[21]) * _PAGE
    yield ("process_open_fds", (), len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    yield "process_max_fds", (), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
