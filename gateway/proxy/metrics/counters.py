"""Metrics in Prometheus' text format. `METRICS` is the table of their names, which docs/metrics.md
follows.

Calls of the data plane are counted for each request (`Meter`); `gauges` reads the state
of models, GPUs and the process on demand. The code is written by hand for speed: prometheus_client
takes 12 us per request, this takes 2.

A label never repeats a client's text: `model` is the name of a known model, "" without one, and
"other" beyond MAX_SERIES.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from gateway.errors import FitserveError
from gateway.proxy.access import rate_limits
from gateway.proxy.meter import UNTOLD, Meter
from gateway.proxy.metrics.usage_counter import UsageCounter

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

MAX_SERIES = 10_000
# Endpoints that use tokens; the answers of others, such as speech, have none.
_USES_TOKENS = frozenset(
    ("chat", "classify", "completions", "embeddings", "messages", "rerank", "responses", "score")
)
Bounds = tuple[float, ...]
# Upper bounds in seconds: of whole answers, and of the first byte.
DURATIONS: Bounds = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
FIRST_BYTES: Bounds = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """Row of the table of metrics."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    labels: tuple[str, ...]
    help: str


METRICS: tuple[Metric, ...] = (
    Metric(
        "fitserve_requests_total",
        "counter",
        ("model", "endpoint", "outcome", "status"),
        "Requests that ended. outcome: answered, left (by the client), broken (by the engine),"
        " cancelled (by an operator), refused (by the gateway); status: 2xx, 4xx, 5xx, none.",
    ),
    Metric(
        "fitserve_refusals_total",
        "counter",
        ("code",),
        "Errors that the gateway itself answered with, by their code.",
    ),
    Metric(
        "fitserve_request_duration_seconds",
        "histogram",
        ("model", "endpoint"),
        "From the request to the end of its answer, of those that the gateway did not refuse.",
    ),
    Metric(
        "fitserve_first_byte_seconds",
        "histogram",
        ("model", "endpoint"),
        "From the request to the first byte of its answer's body; of a stream, the first token.",
    ),
    Metric(
        "fitserve_tokens_total",
        "counter",
        ("model", "kind"),
        "Tokens that answers reported; kind: prompt, completion.",
    ),
    Metric("fitserve_requests_in_flight", "gauge", ("model",), "Requests that an engine works on."),
    Metric(
        "fitserve_requests_queued",
        "gauge",
        ("model",),
        "Requests that wait for a replica with room, or for the model.",
    ),
    Metric(
        "fitserve_client_disconnects_total",
        "counter",
        ("model", "phase"),
        "Clients that left before the end; phase: waiting (for the first byte), answering.",
    ),
    Metric(
        "fitserve_upstream_errors_total",
        "counter",
        ("model", "kind"),
        "Failures of engines; kind: unreachable, engine_error (before its answer), broken (in its"
        " answer), 5xx.",
    ),
    Metric(
        "fitserve_transcripts_total",
        "counter",
        ("outcome",),
        "Requests of which a transcript is kept; outcome: written, dropped (the queue was full, or"
        " the disk).",
    ),
    Metric(
        "fitserve_spans_total",
        "counter",
        ("outcome",),
        "Spans of requests; outcome: exported, failed (the collector took none), dropped (the queue"
        " was full).",
    ),
    Metric("fitserve_connections", "gauge", (), "Open connections of clients."),
    Metric("fitserve_models", "gauge", ("state",), "Models by state."),
    Metric(
        "fitserve_replicas",
        "gauge",
        ("model", "state"),
        "Replicas by state; ready replicas get requests.",
    ),
    Metric("fitserve_attempts_total", "counter", ("model",), "Starts of engines."),
    Metric(
        "fitserve_failures_total",
        "counter",
        ("model", "kind"),
        "Starts that failed, by kind of failure (docs/reliability.md).",
    ),
    Metric(
        "fitserve_unloads_total",
        "counter",
        ("model", "why"),
        "Replicas that were unloaded; why: idle (beyond keep_alive), room (for another model),"
        " owner (stopped), load (its copies are more than the load needs).",
    ),
    Metric(
        "fitserve_copies_wanted",
        "gauge",
        ("model",),
        "Copies that the load of a model with a span of copies needs.",
    ),
    Metric(
        "fitserve_copy_changes_total",
        "counter",
        ("model", "cause"),
        "Changes of a model's number of copies; cause: queue, calm, room (for another model),"
        " eviction, failure.",
    ),
    Metric("fitserve_facts", "gauge", ("kind",), "Facts that were learned."),
    Metric(
        "fitserve_gpu_planned_bytes",
        "gauge",
        ("gpu",),
        "Memory of a GPU that the plans of engines reserve.",
    ),
    Metric(
        "fitserve_engine_requests_running",
        "gauge",
        ("model", "replica"),
        "Requests that an engine computes, as the engine reports.",
    ),
    Metric(
        "fitserve_engine_requests_waiting",
        "gauge",
        ("model", "replica"),
        "Requests that wait in an engine, as the engine reports.",
    ),
    Metric(
        "fitserve_engine_kv_cache_use_ratio",
        "gauge",
        ("model", "replica"),
        "The part of an engine's KV cache that is in use; of several ranks the fullest.",
    ),
    Metric(
        "fitserve_engine_draft_acceptance_ratio",
        "gauge",
        ("model", "replica"),
        "The part of drafted tokens that was accepted lately.",
    ),
    Metric(
        "fitserve_engine_preemptions_total",
        "counter",
        ("model", "replica"),
        "Requests that an engine put back because its KV cache was full.",
    ),
    Metric(
        "fitserve_engine_prompt_tokens_total",
        "counter",
        ("model", "replica"),
        "Tokens of prompts that an engine has read.",
    ),
    Metric(
        "fitserve_engine_cached_prompt_tokens_total",
        "counter",
        ("model", "replica"),
        "Tokens of prompts that an engine found in its prefix cache.",
    ),
    Metric(
        "fitserve_engine_generated_tokens_total",
        "counter",
        ("model", "replica"),
        "Tokens that an engine has generated.",
    ),
    Metric(
        "fitserve_engine_first_token_seconds",
        "summary",
        ("model", "replica"),
        "From the arrival of a request at an engine to its first token.",
    ),
    Metric(
        "fitserve_engine_between_tokens_seconds",
        "summary",
        ("model", "replica"),
        "Between two tokens of a request in an engine.",
    ),
    Metric(
        "fitserve_engine_queue_seconds",
        "summary",
        ("model", "replica"),
        "How long requests waited in an engine.",
    ),
    Metric(
        "fitserve_gpu_info",
        "gauge",
        ("gpu", "index", "name"),
        "Always 1; the labels identify the GPU.",
    ),
    Metric(
        "fitserve_gpu_use_ratio",
        "gauge",
        ("gpu",),
        "The part of the last moment in which a kernel ran on a GPU.",
    ),
    Metric(
        "fitserve_gpu_memory_used_bytes",
        "gauge",
        ("gpu",),
        "Memory of a GPU that is in use, by any process.",
    ),
    Metric("fitserve_gpu_memory_bytes", "gauge", ("gpu",), "Memory of a GPU."),
    Metric("fitserve_gpu_temperature_celsius", "gauge", ("gpu",), "Temperature of a GPU."),
    Metric("fitserve_gpu_power_watts", "gauge", ("gpu",), "Power that a GPU takes."),
    Metric("fitserve_gpu_power_limit_watts", "gauge", ("gpu",), "Power that a GPU may take."),
    Metric(
        "fitserve_gpu_throttled",
        "gauge",
        ("gpu", "why"),
        "1 while a GPU lowers its clocks; why: temperature, power supply, hardware.",
    ),
    Metric(
        "fitserve_gpu_lost", "gauge", ("gpu",), "1 for a GPU that is not used because it failed."
    ),
    Metric(
        "fitserve_gpu_errors_total",
        "counter",
        ("gpu", "xid"),
        "Errors (Xids) of a GPU that did not end its use.",
    ),
    Metric("fitserve_loop_age_seconds", "gauge", (), "Since the last pass of the control loop."),
    Metric(
        "fitserve_build_info",
        "gauge",
        ("version", "python"),
        "Always 1; the labels identify the program.",
    ),
    Metric("process_start_time_seconds", "gauge", (), "Start time of the process, in Unix time."),
    Metric("process_cpu_seconds_total", "counter", (), "CPU time of the process."),
    Metric("process_resident_memory_bytes", "gauge", (), "Memory of the process that is in RAM."),
    Metric("process_open_fds", "gauge", (), "Open files, sockets among them."),
    Metric("process_max_fds", "gauge", (), "Most open files."),
)

_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}

# name, values of the labels, value
Sample = tuple[str, tuple[str, ...], float]

_DURATIONS, _FIRST_BYTES = ((*map(repr, bounds), "+Inf") for bounds in (DURATIONS, FIRST_BYTES))
_CLASSES = ("none", "1xx", "2xx", "3xx", "4xx", "5xx")


class _Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[str, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0


class _Series:
    """Counts of one model at one endpoint."""

    __slots__ = ("completion", "duration", "first_byte", "in_flight", "outcomes", "prompt")

    def __init__(self) -> None:
        self.in_flight = self.prompt = self.completion = 0
        self.outcomes: dict[tuple[str, int], int] = {}
        self.duration = _Histogram(_DURATIONS)
        self.first_byte = _Histogram(_FIRST_BYTES)


class Metrics(Meter):
    """Counts requests. Only the event loop that serves requests may call these methods."""

    def __init__(self) -> None:
        self.usage = UsageCounter()
        self._series: dict[tuple[str, str], _Series] = {}
        self._refusals: dict[str, int] = {}
        self._disconnects: dict[tuple[str, str], int] = {}
        self._upstream: dict[tuple[str, str], int] = {}

    def count_start(self, exchange: Exchange) -> None:
        series = self._series.get((exchange.model, exchange.endpoint.name)) or self._series_of(
            exchange
        )
        exchange.counters = series
        series.in_flight += 1

    def count_first_byte(self, exchange: Exchange) -> None:
        series: _Series = exchange.counters or self._series_of(exchange)
        histogram = series.first_byte
        seconds = exchange.first_byte_at - exchange.started_at
        histogram.counts[bisect_left(FIRST_BYTES, seconds)] += 1
        histogram.total += seconds

    def count_refusal(self, exchange: Exchange, error: FitserveError) -> None:
        outcomes = self._series_of(exchange).outcomes
        outcome = ("refused", error.status // 100)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if error.code == "engine_error":
            self._count_failure(exchange.model, "engine_error")
        self._refusals[error.code] = self._refusals.get(error.code, 0) + 1

    def count_rejection(self, error: FitserveError, id_: str, address: str) -> None:  # noqa: ARG002
        self._refusals[error.code] = self._refusals.get(error.code, 0) + 1

    def count_end(self, exchange: Exchange) -> None:
        series: _Series = exchange.counters or self._series_of(exchange)
        series.in_flight -= 1
        if exchange.outcome == "unreachable":
            self._count_failure(exchange.model, "unreachable")

    def count_completion(self, exchange: Exchange) -> None:
        """Count an ended request by outcome, duration and tokens."""
        outcome = exchange.outcome
        status = exchange.answer.status // 100
        if outcome == "refused":
            return  # `count_refusal` follows
        series: _Series = exchange.counters or self._series_of(exchange)
        duration = series.duration
        result = (outcome, status)
        series.outcomes[result] = series.outcomes.get(result, 0) + 1
        seconds = exchange.plane.loop.time() - exchange.started_at
        duration.counts[bisect_left(DURATIONS, seconds)] += 1
        duration.total += seconds
        prompt, completion, cached_tokens = exchange.usage if status == 2 else UNTOLD
        series.prompt += prompt or 0
        series.completion += completion or 0
        if exchange.replica is not None:
            is_untold = prompt is None and status in (0, 2)
            estimated = _estimate(exchange, completion) if is_untold else None
            self.usage.count(
                exchange.key.name, exchange.model, prompt, completion, cached_tokens, estimated
            )
        if status == 5:
            self._count_failure(exchange.model, "5xx")
        if outcome == "answered":
            return
        if outcome == "broken":
            self._count_failure(exchange.model, "broken")
        elif outcome == "left":
            phase = (exchange.model, "answering" if exchange.first_byte_at else "waiting")
            self._disconnects[phase] = self._disconnects.get(phase, 0) + 1

    def _series_of(self, exchange: Exchange) -> _Series:
        key = (exchange.model, exchange.endpoint.name)
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= MAX_SERIES:
                key = ("other", key[1])
            series = self._series.setdefault(key, _Series())
        return series

    def drain_spans(self) -> tuple[tuple[Any, ...], ...]:
        """The spans of ended requests since the last take; none without traces."""
        return ()

    def _count_failure(self, model: str, kind: str) -> None:
        self._upstream[model, kind] = self._upstream.get((model, kind), 0) + 1

    def samples(self) -> Iterator[Sample]:
        """The present values of the metrics of requests."""
        in_flight: dict[str, int] = {}
        tokens: dict[tuple[str, str], int] = {}
        for (model, endpoint), series in self._series.items():
            if model:  # requests without a known model reach no engine
                in_flight[model] = in_flight.get(model, 0) + series.in_flight
                for kind, count in (("prompt", series.prompt), ("completion", series.completion)):
                    tokens[model, kind] = tokens.get((model, kind), 0) + count
            for (outcome, status), count in series.outcomes.items():
                yield "fitserve_requests_total", (model, endpoint, outcome, _CLASSES[status]), count
            yield from _buckets(
                "fitserve_request_duration_seconds", (model, endpoint), series.duration
            )
            yield from _buckets("fitserve_first_byte_seconds", (model, endpoint), series.first_byte)
        for model, count in in_flight.items():
            yield "fitserve_requests_in_flight", (model,), count
        for labels, count in tokens.items():
            yield "fitserve_tokens_total", labels, count
        for code, count in self._refusals.items():
            yield "fitserve_refusals_total", (code,), count
        for labels, count in self._disconnects.items():
            yield "fitserve_client_disconnects_total", labels, count
        for labels, count in self._upstream.items():
            yield "fitserve_upstream_errors_total", labels, count


def _buckets(name: str, labels: tuple[str, ...], histogram: _Histogram) -> Iterator[Sample]:
    """Samples of a histogram: `name`_bucket with the bound as additional label, _sum and _count."""
    sums = list(accumulate(histogram.counts))
    if not sums[-1]:
        return
    bucket = f"{name}_bucket"
    for bound, count in zip(histogram.bounds, sums, strict=True):
        yield bucket, (*labels, bound), count
    yield f"{name}_sum", labels, histogram.total
    yield f"{name}_count", labels, sums[-1]


def render(samples: Iterable[Sample]) -> str:
    """Prometheus' text format 0.0.4: every metric of the table, in its order."""
    samples_by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        samples_by_name.setdefault(sample[0], []).append(sample)
    lines: list[str] = []
    for metric in METRICS:
        lines += (f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}")
        endings = _SUFFIXES.get(metric.kind, ("",))
        for ending in endings:
            names = (*metric.labels, "le") if ending == "_bucket" else metric.labels
            for name, labels, value in samples_by_name.pop(metric.name + ending, ()):
                pairs = ",".join(
                    f'{key}="{_escape_label(label)}"'
                    for key, label in zip(names, labels, strict=True)
                )
                lines.append(f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}")
    assert not samples_by_name, f"not in the table: {', '.join(samples_by_name)}"  # noqa: S101
    return "\n".join((*lines, ""))


def _escape_label(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _estimate(exchange: Exchange, completion: int | None) -> int:
    """The tokens that no engine reports, from the bytes of the request and of its answer.
    completion: reported tokens of the answer."""
    if exchange.endpoint.name not in _USES_TOKENS or exchange.endpoint.body != "json":
        return 0
    sizes = exchange.received_bytes, exchange.sent_bytes if completion is None else 0
    return rate_limits.estimate(*sizes, is_stream=exchange.answer.has_events, limit=sum(sizes))
