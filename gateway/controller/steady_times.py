"""Times of the wall clock on the monotonic clock, which nobody sets."""

from __future__ import annotations

import time


class SteadyTimes:
    """Translates each time when it is first seen. A later setting of the clock changes nothing.

    A time in the future was noted before the clock was set back, and counts as now.
    """

    def __init__(self) -> None:
        self._earlier: dict[tuple[str, float], float] = {}
        self._times: dict[tuple[str, float], float] = {}
        self._wall = self._now = 0.0

    def begin(self) -> tuple[float, float]:
        """Begin a pass. Returns its time by both clocks: monotonic, wall.

        Times that the last pass did not ask for are forgotten.
        """
        self._earlier, self._times = self._times, {}
        self._now, self._wall = time.monotonic(), time.time()
        return self._now, self._wall

    def steady(self, name: str, at: float) -> float:
        """The time `at` of the model `name`, in monotonic seconds."""
        key = name, at
        if key not in self._times:
            earlier = self._earlier.get(key)
            passed_s = max(0.0, self._wall - at)
            self._times[key] = self._now - passed_s if earlier is None else earlier
        return self._times[key]
