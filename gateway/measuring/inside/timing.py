"""How long something takes on a GPU that is warm: the median of several samples, and how much they
differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_SAMPLES = 15
# GPUs raise their clocks within some hundred milliseconds.
_WARM_S = 0.3


def seconds(
    run: Callable[[], object], wait: Callable[[], object], sample_s: float
) -> tuple[float, float]:
    """Median of one run and its spread, warm. wait: until all that was asked for is done."""
    run()
    wait()
    begun, runs = time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - begun < _WARM_S:
        run()
        wait()
        runs += 1
    return sampled(run, wait, max(1, round(sample_s * runs / (time.perf_counter() - begun))))


def sampled(
    run: Callable[[], object], wait: Callable[[], object], count: int
) -> tuple[float, float]:
    """The same of `count` runs a sample. The three slowest and the three fastest samples may be
    accidents, which the median does not see."""
    found = []
    for _ in range(_SAMPLES):
        begun = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        found.append((time.perf_counter() - begun) / count)
    found.sort()
    median = statistics.median(found)
    return median, (found[-4] - found[3]) / median


def number(what: str, gpus: list[int], value: float, spread: float, **more: Any) -> dict[str, Any]:
    return {"what": what, "gpus": gpus, "value": value, "spread": spread, **more}
