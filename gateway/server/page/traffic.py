"""What clients asked for and got, as points over time: rates and percentiles, from counters that
only grow."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from gateway.proxy.metrics.counters import FIRST_BYTES, Sample

# Points that are kept: of ten minutes, where one is made every five seconds.
MOST_POINTS = 120


class Flow(TypedDict):
    """Of one model. Rates are per second; seconds to the first byte of an answer are None where
    none began."""

    requests: float
    refused: float
    prompt_tokens: float
    completion_tokens: float
    first_p50_s: float | None
    first_p95_s: float | None


class Point(TypedDict):
    at: float
    models: dict[str, Flow]


@dataclass
class _Count:
    """Of one model, since the counters began."""

    requests: float = 0.0
    refused: float = 0.0
    prompt: float = 0.0
    completion: float = 0.0
    first: list[float] = field(default_factory=lambda: [0.0] * (len(FIRST_BYTES) + 1))
    """Answers whose first byte came within each bound, the sum up to it."""


class Traffic:
    """Points, oldest first. A point tells what happened since the one before."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=MOST_POINTS)
        self._before: dict[str, _Count] | None = None
        self._at = 0.0

    def look(self, samples: Iterable[Sample], at: float) -> Point | None:
        """The next point; None: there is nothing to compare with yet."""
        counts, before, seconds = _counted(samples), self._before, at - self._at
        self._before, self._at = counts, at
        if before is None or seconds <= 0:
            return None
        flows = {
            name: flow(count, before.get(name) or _Count(), seconds)
            for name, count in counts.items()
            if name
        }
        point = Point(at=round(at, 1), models=flows)
        self.points.append(point)
        return point

    def pause(self) -> None:
        """Nobody looks for a while: what happens meanwhile is in no point."""
        self._before = None


def flow(now: _Count, before: _Count, seconds: float) -> Flow:
    firsts = [max(0.0, late - early) for late, early in zip(now.first, before.first, strict=True)]

    def rate(late: float, early: float) -> float:
        # Of workers that ended some counts are lost: never a rate below nothing.
        return round(max(0.0, late - early) / seconds, 3)

    return Flow(
        requests=rate(now.requests, before.requests),
        refused=rate(now.refused, before.refused),
        prompt_tokens=rate(now.prompt, before.prompt),
        completion_tokens=rate(now.completion, before.completion),
        first_p50_s=percentile(firsts, 0.5),
        first_p95_s=percentile(firsts, 0.95),
    )


def percentile(sums: Sequence[float], share: float) -> float | None:
    """Of a histogram by `FIRST_BYTES`, as the sums up to each bound: a straight line between two
    bounds. None: it is empty."""
    total = sums[-1]
    if total <= 0:
        return None
    place = bisect_left(sums, share * total)
    if place >= len(FIRST_BYTES):
        return FIRST_BYTES[-1]
    low, below = (FIRST_BYTES[place - 1], sums[place - 1]) if place else (0.0, 0.0)
    part = (share * total - below) / (sums[place] - below)
    return round(low + part * (FIRST_BYTES[place] - low), 4)


def _counted(samples: Iterable[Sample]) -> dict[str, _Count]:
    bounds = {bound: place for place, bound in enumerate((*map(repr, FIRST_BYTES), "+Inf"))}
    counts: dict[str, _Count] = {}
    for name, labels, value in samples:
        if name == "fitserve_requests_total":
            count = counts.setdefault(labels[0], _Count())
            if labels[2] == "refused":
                count.refused += value
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
