"""The places of an engine for each class of requests, by the recent load of earlier classes. Pure.

A smaller number goes first. Of an engine that runs R requests concurrently:

reserve     places that a class leaves to earlier ones: their recent peak, and for classes after
            `normal` at least a tenth of R
share       an eighth of R, and at least one: the most that no reserve takes from a class
turn        one of TURN places: a class that holds less than its share gets it, whatever earlier
            classes wait

So earlier classes find a free place up to their recent peak, and no class waits for ever. A class
without earlier ones has all places, and a quarter of R that follow within the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gateway.keys import LAST_PRIORITY, PRIORITIES

TURN = 8
# The part of R that classes after `normal` always leave to others. A batch alone loses no more
# than that part.
_FREE_PART = 10
# The time in which a peak counts for half. Conversations pause for that long.
HALF_LIFE_S = 60.0
# The classes of one engine whose earlier ones are observed: the last ones that asked for a place.
MAX_CLASSES = 16


def running_requests(capacity: int) -> int:
    """The requests that an engine runs concurrently. capacity: these, and a quarter to follow."""
    return max(1, capacity * 4 // 5)


def class_share(capacity: int) -> int:
    """The places that each class may hold next to any number of earlier requests."""
    return max(1, running_requests(capacity) // TURN)


def capacity_for(priority: int, capacity: int) -> int:
    """The requests that an engine has at most when one of that class begins, without a peak of
    earlier classes."""
    if priority <= PRIORITIES["normal"]:
        return capacity
    running_count = running_requests(capacity)
    return max(1, running_count - max(1, running_count // _FREE_PART))


class Peak:
    """The recent peak of a count. It halves in HALF_LIFE_S."""

    def __init__(self, count: int, now: float) -> None:
        self._count = float(count)
        self._at = now

    def record(self, count: int, now: float) -> None:
        self._count = max(float(count), self._decayed_count(now))
        self._at = now

    def count(self, now: float) -> int:
        return round(self._decayed_count(now))

    def _decayed_count(self, now: float) -> float:
        return self._count * math.pow(0.5, max(0.0, now - self._at) / HALF_LIFE_S)


class ClassLoad:
    """The requests of one engine by class, and the peaks of those before each class.

    Requests of priority 0 are not counted: they are the others of all requests.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._peaks: dict[int, Peak] = {}

    @property
    def is_empty(self) -> bool:
        return not self._counts

    def start_request(self, priority: int, requests: int, now: float) -> None:
        """Count a request. requests: all of the engine, with this one."""
        if priority:
            self._counts[priority] = self._counts.get(priority, 0) + 1
        for later_priority, peak in self._peaks.items():
            if later_priority > priority:
                peak.record(self.count_before(later_priority, requests), now)

    def finish_request(self, priority: int) -> None:
        if priority not in self._counts:
            return
        self._counts[priority] -= 1
        if not self._counts[priority]:
            del self._counts[priority]

    def count_before(self, priority: int, requests: int) -> int:
        """The requests of earlier classes. requests: all of the engine."""
        count = sum(number for class_, number in self._counts.items() if class_ < priority)
        if priority > 0:
            count += max(0, requests - sum(self._counts.values()))
        return count

    def first_class(self, requests: int) -> int:
        """The first class with a request. requests: all of the engine."""
        has_normal = requests > sum(self._counts.values())
        return min([*self._counts, *([0] if has_normal else [])], default=LAST_PRIORITY)

    def peak_before(self, priority: int, requests: int, now: float) -> int:
        """The recent peak of `count_before`. The first question begins its observation."""
        count = self.count_before(priority, requests)
        peak = self._peaks.pop(priority, None)
        if peak is None:
            peak = Peak(count, now)
            if len(self._peaks) >= MAX_CLASSES:
                del self._peaks[next(iter(self._peaks))]
        self._peaks[priority] = peak
        return max(count, peak.count(now))

    def limit(self, priority: int, capacity: int, requests: int, now: float) -> int:
        """The requests of the engine below which one of that class may begin. No later class has
        a higher limit."""
        limit = capacity_for(priority, capacity)
        self.peak_before(priority, requests, now)
        running_count = running_requests(capacity)
        most_reserve = running_count - class_share(capacity)
        for class_, peak in self._peaks.items():
            if class_ <= priority:
                count = self.count_before(class_, requests)
                if reserve := min(max(count, peak.count(now)), most_reserve):
                    limit = min(limit, running_count, count + running_count - reserve)
        return limit

    def has_share(self, priority: int, capacity: int, requests: int) -> bool:
        """Whether that class and later ones hold the share of a class."""
        return requests - self.count_before(priority, requests) >= class_share(capacity)

    def kept_places(self, requests: int, now: float) -> int:
        """The free places that are kept for earlier classes."""
        kept_counts = [
            peak.count(now) - self.count_before(priority, requests)
            for priority, peak in self._peaks.items()
        ]
        return max(0, *kept_counts) if kept_counts else 0


class Overtakings:
    """The places that earlier classes got since the last place of each waiting class."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def record(self, priority: int, waiting_classes: Iterable[int]) -> None:
        """Count a place that a request of that class got. waiting_classes: those with a waiting
        request."""
        self._counts = {
            class_: 0 if class_ == priority else self._counts.get(class_, 0) + (class_ > priority)
            for class_ in waiting_classes
        }

    def class_in_turn(
        self, waiting_classes: Iterable[int], has_share: Callable[[int], bool]
    ) -> int | None:
        """The class that gets the next place before earlier ones: the one overtaken most often,
        unless it has its share; None for none."""
        classes = [class_ for class_ in waiting_classes if self._counts.get(class_, 0) >= TURN - 1]
        classes.sort(key=lambda class_: (-self._counts[class_], class_))
        return next((class_ for class_ in classes if not has_share(class_)), None)
