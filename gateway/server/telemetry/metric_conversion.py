"""Metrics of OpenTelemetry from the samples of /metrics.

Names stay those of docs/metrics.md. A summary without quantiles becomes two sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from gateway.proxy.metrics import counters
from gateway.proxy.metrics.counters import METRICS, Sample
from gateway.server.telemetry.span_conversion import SCOPE

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_Labels = tuple[str, ...]
_Values = dict[_Labels, float]


def metrics_data(
    samples: Iterable[Sample], resource: Resource, started_ns: int, now_ns: int
) -> MetricsData:
    """All samples. `started_ns`: the time since which counters count."""
    values_by_name: dict[str, _Values] = {}
    for name, labels, value in samples:
        values_by_name.setdefault(name, {})[labels] = value
    points = _Points(values_by_name, started_ns, now_ns)
    metrics = [metric for row in METRICS for metric in points.metrics(row)]
    scope = ScopeMetrics(scope=SCOPE, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


class _Points:
    """Data points of one moment."""

    def __init__(self, values_by_name: dict[str, _Values], started_ns: int, now_ns: int) -> None:
        self._values_by_name = values_by_name
        self._started_ns = started_ns
        self._now_ns = now_ns

    def metrics(self, row: counters.Metric) -> list[Metric]:
        """The metrics of a row of the table; [] without samples."""
        if row.kind == "histogram":
            points = self._histogram_points(row)
            data = Histogram(points, _CUMULATIVE)
            return [Metric(row.name, row.help, _unit(row.name), data)] if points else []
        endings = ("_sum", "_count") if row.kind == "summary" else ("",)
        metrics = []
        for ending in endings:
            name = f"{row.name}{ending}"
            points_of_name = self._number_points(name, row.labels)
            if points_of_name:
                metrics.append(
                    Metric(
                        name,
                        row.help,
                        "" if ending == "_count" else _unit(row.name),
                        Gauge(points_of_name)
                        if row.kind == "gauge"
                        else Sum(points_of_name, _CUMULATIVE, is_monotonic=True),
                    )
                )
        return metrics

    def _number_points(self, name: str, labels: _Labels) -> list[NumberDataPoint]:
        return [
            NumberDataPoint(
                attributes=dict(zip(labels, values, strict=True)),
                start_time_unix_nano=self._started_ns,
                time_unix_nano=self._now_ns,
                value=value,
            )
            for values, value in self._values_by_name.get(name, {}).items()
        ]

    def _histogram_points(self, row: counters.Metric) -> list[HistogramDataPoint]:
        buckets: dict[_Labels, list[tuple[float, float]]] = {}
        for (*labels, bound), count in self._values_by_name.get(f"{row.name}_bucket", {}).items():
            limit = math.inf if bound == "+Inf" else float(bound)
            buckets.setdefault(tuple(labels), []).append((limit, count))
        sums = self._values_by_name.get(f"{row.name}_sum", {})
        return [
            self._histogram_point(
                dict(zip(row.labels, labels, strict=True)), sorted(pairs), sums[labels]
            )
            for labels, pairs in buckets.items()
        ]

    def _histogram_point(
        self, attributes: dict[str, str], pairs: list[tuple[float, float]], total: float
    ) -> HistogramDataPoint:
        """A point from bounds with the count of all values up to each."""
        counts = [int(count) for _, count in pairs]
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=self._started_ns,
            time_unix_nano=self._now_ns,
            count=counts[-1],
            sum=total,
            bucket_counts=[
                count - lower_count
                for lower_count, count in zip([0, *counts[:-1]], counts, strict=True)
            ],
            explicit_bounds=[bound for bound, _ in pairs if bound != math.inf],
            # Samples have no extremes.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )


def _unit(name: str) -> str:
    """The unit by UCUM."""
    name = name.removesuffix("_total")
    units = {"_seconds": "s", "_bytes": "By", "_ratio": "1", "_celsius": "Cel", "_watts": "W"}
    return next((unit for ending, unit in units.items() if name.endswith(ending)), "")
