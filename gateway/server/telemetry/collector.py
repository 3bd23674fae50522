"""The collector of OpenTelemetry: exporters by OTLP over HTTP or gRPC.

The only module besides the conversions that imports OpenTelemetry, and only where a collector is
configured. Standard variables (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`,
`OTEL_EXPORTER_OTLP_CERTIFICATE`) hold too.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.proxy.metrics.counters import Sample
from gateway.proxy.tracing.request_span import RequestSpan
from gateway.server.telemetry.metric_conversion import metrics_data
from gateway.server.telemetry.span_conversion import readable_span
from gateway.settings import Settings
from gateway.version import __version__

_EXPORT_S = 5.0


class Collector:
    """Sends spans and metrics, from one thread each. A send takes seconds where nobody answers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._resource = _resource()
        self._started_ns = time.time_ns()
        self._spans = self._span_exporter() if settings.exports("traces") else None
        self._metrics = self._metric_exporter() if settings.exports("metrics") else None
        # The gateway reports failures itself, and no line may repeat the `tracestate` of a client.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def send_spans(self, spans: Sequence[RequestSpan]) -> bool:
        """Send spans. Returns whether the collector took them."""
        if self._spans is None:
            return False
        readable_spans = [readable_span(span, self._resource) for span in spans]
        return self._spans.export(readable_spans) is SpanExportResult.SUCCESS

    def send_metrics(self, samples: Iterable[Sample]) -> bool:
        """Send metrics. Returns whether the collector took them."""
        if self._metrics is None:
            return False
        data = metrics_data(samples, self._resource, self._started_ns, time.time_ns())
        return self._metrics.export(data, _EXPORT_S * 1000) is MetricExportResult.SUCCESS

    def close(self) -> None:
        """End all sends. A send under way fails."""
        for exporter in (self._spans, self._metrics):
            if exporter is not None:
                exporter.shutdown()

    def _span_exporter(self) -> SpanExporter:
        arguments = self._arguments("traces")
        if self._settings.otlp_protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
                OTLPSpanExporter as GrpcSpanExporter,
            )

            return GrpcSpanExporter(**arguments)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(**arguments)

    def _metric_exporter(self) -> MetricExporter:
        arguments = self._arguments("metrics")
        if self._settings.otlp_protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
                OTLPMetricExporter as GrpcMetricExporter,
            )

            return GrpcMetricExporter(**arguments)
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter(**arguments)

    def _arguments(self, signal: str) -> dict[str, Any]:
        """Arguments that the exporters of all signals have."""
        settings = self._settings
        url = settings.otlp_endpoint
        return {
            "endpoint": url if settings.otlp_protocol == "grpc" else _signal_url(url, signal),
            "headers": settings.collector_headers,
            "timeout": _EXPORT_S,
        }


def _signal_url(url: str, signal: str) -> str:
    """The address of a signal over HTTP. Source: OTLP 1.9, section OTLP/HTTP request."""
    return f"{url.rstrip('/')}/v1/{signal}"


def _resource() -> Resource:
    attributes = {"service.version": __version__, "service.instance.id": socket.gethostname()}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = "fitserve"
    return Resource.create(attributes)
