"""Traffic of clients as points over time: rates and percentiles, from counters that only grow."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from gateway.proxy.metrics.counters import FIRST_BYTES, Sample

# A longer time between two counts is not a measurement: the machine slept, or the gateway was
# stopped.
MAX_GAP_S = 30.0
# Most points kept: ten minutes at one point every five seconds.
MAX_POINTS = 120


class TrafficRates(TypedDict):
    """Traffic of one model. Rates are per second; seconds to the first byte are None without an
    answer."""

    requests: float
    refused: float
    prompt_tokens: float
    completion_tokens: float
    first_p50_s: float | None
    first_p95_s: float | None


class TrafficPoint(TypedDict):
    """The traffic of all models at one time.

    `models`: those whose counts changed.
    """

    at: float
    models: dict[str, TrafficRates]


@dataclass
class _Count:
    """Counters of one model."""

    requests: float = 0.0
    refused_requests: float = 0.0
    prompt: float = 0.0
    completion: float = 0.0
    first: list[float] = field(default_factory=lambda: [0.0] * (len(FIRST_BYTES) + 1))
    """Cumulative counts of answers by the bound of their first byte."""


class TrafficHistory:
    """Points, oldest first. Each covers the time since the previous one."""

    def __init__(self) -> None:
        self.points: deque[TrafficPoint] = deque(maxlen=MAX_POINTS)
        self._former_counts: dict[str, _Count] | None = None
        self._at = 0.0

    def add(self, samples: Iterable[Sample], time: float) -> TrafficPoint | None:
        """The next point; None: there is no earlier count to compare with, or none for long."""
        counts = _count_samples(samples)
        former_counts = self._former_counts
        seconds = time - self._at
        self._former_counts = counts
        self._at = time
        if former_counts is None or not 0 < seconds <= MAX_GAP_S:
            return None
        flows = {
            name: flow(count, former_counts.get(name) or _Count(), seconds)
            for name, count in counts.items()
            if name and count != former_counts.get(name)
        }
        point = TrafficPoint(at=round(time, 1), models=flows)
        # A clock that was set back leaves later points behind.
        while self.points and self.points[-1]["at"] >= point["at"]:
            self.points.pop()
        self.points.append(point)
        return point


def flow(current_count: _Count, former_count: _Count, seconds: float) -> TrafficRates:
    firsts = [
        max(0.0, new_sum - old_sum)
        for new_sum, old_sum in zip(current_count.first, former_count.first, strict=True)
    ]

    def rate(new_sum: float, old_sum: float) -> float:
        # Counts of ended workers may be lost, but a rate is never negative.
        return round(max(0.0, new_sum - old_sum) / seconds, 3)

    return TrafficRates(
        requests=rate(current_count.requests, former_count.requests),
        refused=rate(current_count.refused_requests, former_count.refused_requests),
        prompt_tokens=rate(current_count.prompt, former_count.prompt),
        completion_tokens=rate(current_count.completion, former_count.completion),
        first_p50_s=percentile(firsts, 0.5),
        first_p95_s=percentile(firsts, 0.95),
    )


def percentile(sums: Sequence[float], share: float) -> float | None:
    """Percentile of a histogram with cumulative counts by `FIRST_BYTES`, interpolated linearly
    within a bucket. None: it is empty."""
    total = sums[-1]
    if total <= 0:
        return None
    bucket = bisect_left(sums, share * total)
    if bucket >= len(FIRST_BYTES):
        return FIRST_BYTES[-1]
    low, count_below = (FIRST_BYTES[bucket - 1], sums[bucket - 1]) if bucket else (0.0, 0.0)
    part = (share * total - count_below) / (sums[bucket] - count_below)
    return round(low + part * (FIRST_BYTES[bucket] - low), 4)


def _count_samples(samples: Iterable[Sample]) -> dict[str, _Count]:
    bounds = {bound: bucket for bucket, bound in enumerate((*map(repr, FIRST_BYTES), "+Inf"))}
    counts: dict[str, _Count] = {}
    for name, labels, value in samples:
        if name == "fitserve_requests_total":
            count = counts.setdefault(labels[0], _Count())
            if labels[2] == "refused":
                count.refused_requests += value
            else:
                count.requests += value
        elif name == "fitserve_tokens_total":
            count = counts.setdefault(labels[0], _Count())
            if labels[1] == "prompt":
                count.prompt += value
            else:
                count.completion += value
        elif name == "fitserve_first_byte_seconds_bucket":
            counts.setdefault(labels[0], _Count()).first[bounds[labels[2]]] += value
    return counts
