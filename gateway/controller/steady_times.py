"""Times of the wall clock on the monotonic clock, which no user sets."""

from __future__ import annotations

import time
from collections.abc import Collection


class MonotonicTimes:
    """Translates each time when it is first seen. A later setting of the clock changes nothing.

    A time in the future was noted before the clock was set back, and counts as now.
    """

    def __init__(self) -> None:
        self._former_times: dict[str, dict[float, float]] = {}
        self._times: dict[str, dict[float, float]] = {}
        self._wall = self._now = 0.0

    def start_pass(self, names: Collection[str]) -> tuple[float, float]:
        """Begin a pass. Returns its time by both clocks: monotonic, wall.

        Models that are not among `names` are forgotten. Of a model that the pass asks for, the
        times that the pass does not ask for are forgotten too.
        """
        if len(self._times) > len(names):
            self._times = {name: times for name, times in self._times.items() if name in names}
        self._former_times = {}
        self._now, self._wall = time.monotonic(), time.time()
        return self._now, self._wall

    def convert_time(self, name: str, at: float) -> float:
        """The time `at` of the model `name`, in monotonic seconds."""
        if name not in self._former_times:
            self._former_times[name], self._times[name] = self._times.get(name, {}), {}
        times = self._times[name]
        if at not in times:
            earlier_at = self._former_times[name].get(at)
            passed_s = max(0.0, self._wall - at)
            times[at] = self._now - passed_s if earlier_at is None else earlier_at
        return times[at]
