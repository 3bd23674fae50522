"""The time of an operation on a warm GPU: median and spread of several samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_SAMPLES = 15
# GPUs raise their clocks within some hundred milliseconds.
_WARMUP_S = 0.3


def time_runs(
    run: Callable[[], object], wait: Callable[[], object], sample_s: float
) -> tuple[float, float]:
    """Median and spread of one run after a warm-up. wait: waits for the end of all runs."""
    run()
    wait()
    start_s = time.perf_counter()
    runs = 0
    while runs < 3 or time.perf_counter() - start_s < _WARMUP_S:
        run()
        wait()
        runs += 1
    return sample_times(run, wait, max(1, round(sample_s * runs / (time.perf_counter() - start_s))))


def sample_times(
    run: Callable[[], object], wait: Callable[[], object], count: int
) -> tuple[float, float]:
    """Median and spread of one run in samples of `count` runs. The spread leaves out the three
    slowest and the three fastest samples."""
    times = []
    for _ in range(_SAMPLES):
        start_s = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        times.append((time.perf_counter() - start_s) / count)
    times.sort()
    median = statistics.median(times)
    return median, (times[-4] - times[3]) / median


def number(
    quantity: str, gpus: list[int], value: float, spread: float, **extra_calls: Any
) -> dict[str, Any]:
    """A measured number as a message."""
    return {"what": quantity, "gpus": gpus, "value": value, "spread": spread, **extra_calls}
