"""The export of spans and metrics, off the way of requests.

Spans wait in a bounded queue, from which a thread takes them. A collector that does not answer
costs spans, which are counted, and never a request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from gateway.errors import SettingsError
from gateway.logging import Logger
from gateway.machine.collector_reach import EXTRA_HINT, connection_problem
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.tracing.span_buffer import SpanBuffer
from gateway.settings import Settings
from gateway.supervision import SupervisedTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.proxy.tracing.request_span import RequestSpan

log = Logger("fitserve.telemetry")

_PERIOD_S = 0.5
_METRICS_PERIOD_S = 30.0
# Spans of one send.
_BATCH = 512
# Seconds for the last spans when the gateway ends.
_LAST_SPANS_S = 6.0


class SpanSink(Protocol):
    """The receiver of spans and metrics (`collector.Collector`)."""

    def send_spans(self, spans: Sequence[RequestSpan]) -> bool: ...
    def send_metrics(self, samples: Iterable[Sample]) -> bool: ...
    def close(self) -> None: ...


class Telemetry:
    """Exports the spans of a queue and, where asked, metrics.

    spans: the queue. A data plane of this process, or the reports of workers, fill it.
    counts_drops: the queue is filled by workers, whose own meters count only their own drops.
    """

    def __init__(
        self,
        sink: SpanSink,
        address: str,
        spans: SpanBuffer,
        *,
        exports_metrics: bool,
        counts_drops: bool,
    ) -> None:
        self.spans = spans
        self._sink = sink
        self._address = address
        self._exports_metrics = exports_metrics
        self._counts_drops = counts_drops
        self._exported_count = 0
        self._failed_count = 0
        self._failing_signals: set[str] = set()
        self._stop_event = threading.Event()
        # A daemon, as a send that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._measuring: SupervisedTask | None = None
        self._collect: Callable[[], Awaitable[list[Sample]]]

    def start(self, collect: Callable[[], Awaitable[list[Sample]]]) -> None:
        """Start the export. `collect` gives the samples of /metrics."""
        self._collect = collect
        self._thread.start()
        if self._exports_metrics:
            self._measuring = SupervisedTask(self._export_metrics, "exporting metrics")

    async def close_metrics(self) -> None:
        """End the export of metrics, because their sources end."""
        if self._measuring is not None:
            await self._measuring.close()

    async def close(self) -> None:
        """Send the last spans, and end."""
        await self.close_metrics()
        self._stop_event.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _LAST_SPANS_S)
        await asyncio.to_thread(self._sink.close)

    def samples(self) -> Iterator[Sample]:
        yield "fitserve_spans_total", ("exported",), self._exported_count
        yield "fitserve_spans_total", ("failed",), self._failed_count
        if self._counts_drops:
            yield "fitserve_spans_total", ("dropped",), self.spans.dropped_count

    def _run(self) -> None:
        problem = connection_problem(self._address)
        if problem:
            log.warning(
                "the collector does not answer; spans are dropped until it does",
                collector=self._address,
                reason=problem,
                hint="Start it, or correct FITSERVE_OTLP_ENDPOINT.",
            )
        while not self._stop_event.wait(_PERIOD_S):
            self._export_spans()
        self._export_spans()

    def _export_spans(self) -> None:
        """Send all spans of the queue. A failed send ends it until the next period."""
        while spans := self.spans.drain(_BATCH):
            try:
                is_taken = self._sink.send_spans(spans)
            except Exception:
                log.exception("spans could not be sent")
                is_taken = False
            self._report("spans", is_taken=is_taken)
            if not is_taken:
                self._failed_count += len(spans)
                return
            self._exported_count += len(spans)

    async def _export_metrics(self) -> float:
        """Send all metrics once. The seconds until the next time."""
        samples = await self._collect()
        is_taken = await asyncio.to_thread(self._sink.send_metrics, samples)
        self._report("metrics", is_taken=is_taken)
        return _METRICS_PERIOD_S

    def _report(self, signal: str, *, is_taken: bool) -> None:
        """Log the first failure of a row of them, and its end."""
        if is_taken and signal in self._failing_signals:
            self._failing_signals.discard(signal)
            log.info(f"the collector takes {signal} again", collector=self._address)
        elif not is_taken and signal not in self._failing_signals:
            self._failing_signals.add(signal)
            log.warning(
                f"the collector takes no {signal}; they are dropped until it does",
                collector=self._address,
                hint="Look at its log, and at FITSERVE_OTLP_PROTOCOL and FITSERVE_OTLP_HEADERS.",
            )


def build_telemetry(settings: Settings, *, has_workers: bool) -> Telemetry:
    """The export to the collector of the settings. Raises SettingsError."""
    try:
        from gateway.server.telemetry.collector import Collector

        collector = Collector(settings)
    except ModuleNotFoundError as error:
        raise SettingsError(
            "FITSERVE_OTLP_ENDPOINT is set, and the library of OpenTelemetry is not installed"
            f" ({error.name}).",
            hint=EXTRA_HINT,
        ) from None
    return Telemetry(
        collector,
        settings.otlp_endpoint,
        SpanBuffer(),
        exports_metrics=settings.exports("metrics"),
        counts_drops=has_workers,
    )
