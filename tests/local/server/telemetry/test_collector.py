"""Spans and metrics by OTLP over real HTTP and gRPC sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from gateway.server.telemetry.collector import Collector
from gateway.settings import Settings
from tests.support.dataplane import refused_url
from tests.support.otlp_receiver import (
    GrpcReceiver,
    HttpReceiver,
    Receiver,
    attributes,
    request_span,
)

ROUTES = {"http": HttpReceiver, "grpc": GrpcReceiver}


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def receiver(protocol: str) -> Iterator[Receiver]:
    with ROUTES[protocol]() as running:
        yield running


def collector(url: str, protocol: Any, **settings: Any) -> Collector:
    return Collector(Settings(otlp_endpoint=url, otlp_protocol=protocol, **settings))


def test_a_span_arrives_with_its_fields(receiver: Receiver, protocol: str) -> None:
    sent = request_span(parent_id=b"\0" * 7 + b"\5", trace_state="vendor=1")
    with closing(collector(receiver.url, protocol, otlp_headers="X-Team=red, y=z=1")) as exporter:
        assert exporter.send_spans([sent, request_span(request_id="r2")])
    span, second = receiver.spans()
    assert (span.name, span.kind) == ("chat m", span.SPAN_KIND_SERVER)
    assert (span.trace_id, span.span_id) == (sent.trace_id, sent.span_id)
    assert (span.parent_span_id, span.trace_state) == (sent.parent_id, "vendor=1")
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (sent.started_ns, sent.ended_ns)
    assert attributes(span)["gen_ai.usage.input_tokens"] == 7
    assert attributes(span)["fitserve.queue.duration"] == 0.1
    assert [event.name for event in span.events] == ["fitserve.sent", "fitserve.first_token"]
    assert (second.parent_span_id, attributes(second)["fitserve.request.id"]) == (b"", "r2")
    [resource] = {attributes(spans.resource)["service.name"] for spans in receiver.resource_spans()}
    assert resource == "fitserve"
    assert (receiver.headers[0]["x-team"], receiver.headers[0]["y"]) == ("red", "z=1")


def test_metrics_arrive_with_their_kinds(receiver: Receiver, protocol: str) -> None:
    samples = [
        ("fitserve_tokens_total", ("m", "prompt"), 5.0),
        ("fitserve_connections", (), 3.0),
        ("fitserve_first_byte_seconds_bucket", ("m", "chat", "0.1"), 1.0),
        ("fitserve_first_byte_seconds_bucket", ("m", "chat", "+Inf"), 3.0),
        ("fitserve_first_byte_seconds_sum", ("m", "chat"), 2.5),
    ]
    with closing(collector(receiver.url, protocol, otlp_signals="metrics")) as exporter:
        assert exporter.send_metrics(samples)
        assert not exporter.send_spans([request_span()])
    metrics = receiver.metrics()
    [tokens] = metrics["fitserve_tokens_total"].sum.data_points
    assert (tokens.as_double, attributes(tokens)) == (5.0, {"model": "m", "kind": "prompt"})
    [connections] = metrics["fitserve_connections"].gauge.data_points
    assert connections.as_double == 3.0
    [first_byte] = metrics["fitserve_first_byte_seconds"].histogram.data_points
    assert (list(first_byte.bucket_counts), list(first_byte.explicit_bounds)) == ([1, 2], [0.1])
    assert not first_byte.HasField("min")
    assert receiver.spans() == []


def test_a_state_that_is_none_is_dropped_without_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with HttpReceiver() as receiver, closing(collector(receiver.url, "http")) as exporter:
        assert exporter.send_spans([request_span(trace_state="canary, of=a=client")])
    assert [span.trace_state for span in receiver.spans()] == [""]
    assert not [record for record in caplog.records if "canary" in record.getMessage()]


def test_a_collector_that_refuses_is_a_failure() -> None:
    with HttpReceiver(status=400) as receiver, closing(collector(receiver.url, "http")) as exporter:
        assert not exporter.send_spans([request_span()])


def test_a_dead_collector_is_a_failure(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.server.telemetry.collector._EXPORT_S", 0.2)
    with closing(collector(refused_url(), protocol)) as exporter:
        assert not exporter.send_spans([request_span()])
