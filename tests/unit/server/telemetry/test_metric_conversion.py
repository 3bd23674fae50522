"""Metrics of OpenTelemetry: each kind of the table, and the counts of a histogram's parts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from opentelemetry.sdk.metrics.export import Gauge, Histogram, Metric, Sum
from opentelemetry.sdk.resources import Resource

from gateway.proxy.metrics.counters import Sample
from gateway.server.telemetry.metric_conversion import metrics_data

SAMPLES: list[Sample] = [
    ("fitserve_tokens_total", ("m", "prompt"), 5),
    ("fitserve_tokens_total", ("m", "completion"), 7),
    ("fitserve_connections", (), 3),
    ("fitserve_first_byte_seconds_bucket", ("m", "chat", "0.1"), 1),
    ("fitserve_first_byte_seconds_bucket", ("m", "chat", "0.5"), 4),
    ("fitserve_first_byte_seconds_bucket", ("m", "chat", "+Inf"), 6),
    ("fitserve_first_byte_seconds_sum", ("m", "chat"), 2.5),
    ("fitserve_first_byte_seconds_count", ("m", "chat"), 6),
    ("fitserve_engine_queue_seconds_sum", ("m", "m-0"), 1.5),
    ("fitserve_engine_queue_seconds_count", ("m", "m-0"), 2),
]


def metric(name: str) -> Metric:
    [resource] = metrics_data(SAMPLES, Resource({}), 10, 20).resource_metrics
    return {metric.name: metric for metric in resource.scope_metrics[0].metrics}[name]


def points(name: str) -> list[Any]:
    return list(metric(name).data.data_points)


def test_counters_are_monotonic_sums() -> None:
    data = metric("fitserve_tokens_total").data
    assert isinstance(data, Sum)
    assert data.is_monotonic
    assert [(dict(point.attributes or {}), point.value) for point in data.data_points] == [
        ({"model": "m", "kind": "prompt"}, 5),
        ({"model": "m", "kind": "completion"}, 7),
    ]
    assert {(p.start_time_unix_nano, p.time_unix_nano) for p in data.data_points} == {(10, 20)}


def test_gauges_stay_gauges() -> None:
    assert isinstance(metric("fitserve_connections").data, Gauge)
    assert [point.value for point in points("fitserve_connections")] == [3]


def test_a_histogram_has_the_counts_between_its_bounds() -> None:
    assert isinstance(metric("fitserve_first_byte_seconds").data, Histogram)
    assert metric("fitserve_first_byte_seconds").unit == "s"
    [point] = points("fitserve_first_byte_seconds")
    assert point.attributes == {"model": "m", "endpoint": "chat"}
    assert list(point.explicit_bounds) == [0.1, 0.5]
    assert list(point.bucket_counts) == [1, 3, 2]
    assert (point.count, point.sum) == (6, 2.5)


def test_a_summary_becomes_two_sums() -> None:
    assert [point.value for point in points("fitserve_engine_queue_seconds_sum")] == [1.5]
    assert [point.value for point in points("fitserve_engine_queue_seconds_count")] == [2]


def test_metrics_without_samples_are_absent() -> None:
    [resource] = metrics_data(SAMPLES[:1], Resource({}), 10, 20).resource_metrics
    assert [metric.name for metric in resource.scope_metrics[0].metrics] == [
        "fitserve_tokens_total"
    ]
