"""The choice of the meter: with or without an access log and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.proxy.metrics.access_log import AccessLog
from gateway.proxy.metrics.counters import Metrics

if TYPE_CHECKING:
    from gateway.proxy.tracing.span_buffer import SpanBuffer


def request_metrics(
    *, has_access_log: bool, trace_ratio: float | None, spans: SpanBuffer | None = None
) -> Metrics:
    """The meter of a data plane.

    trace_ratio: the part of requests that is traced; None: traces are off, and none of their
        modules is imported.
    spans: the queue of spans; None: another one.
    """
    if trace_ratio is None:
        return AccessLog() if has_access_log else Metrics()
    from gateway.proxy.tracing.span_buffer import SpanBuffer
    from gateway.proxy.tracing.traced_metrics import TracedAccessLog, TracedMetrics

    meter = TracedAccessLog if has_access_log else TracedMetrics
    return meter(trace_ratio, spans or SpanBuffer())
