"""Requests that wait for a replica: one bounded queue per model.

The smallest priority goes first. Callers of one priority take turns, and the requests of one caller
go in order of arrival. A class that was overtaken too often gets the next place (`Overtakings`), so
that no class waits for ever.

cause of the wait           at most                        then
every replica is full       Limits.queue_timeout_s         429
no replica is ready         ModelRoute.wait_s              503
the queue is full           -                              the same, immediately

`Exchange.sweep` limits the wait. `Routes` ends it: a queue is checked whenever a replica has
finished a request, the table has changed, or reserves of classes may have fallen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gateway.errors import Overloaded
from gateway.proxy.routing.class_places import Overtakings
from gateway.proxy.routing.model_route import ModelRoute

if TYPE_CHECKING:
    from gateway.proxy.queue_wait import QueueWait

# Places that every queue has, even if the engines take few concurrent requests.
MIN_PLACES = 128
_WINDOW_S = 10.0
_MAX_RETRY_S = 60


class DequeueRate:
    """Requests per second that leave a queue, over the last seconds with a waiting request."""

    def __init__(self) -> None:
        self._counted_since = time.monotonic()
        self._count = 0.0

    def count(self) -> None:
        now = time.monotonic()
        self._count += 1
        if now - self._counted_since > _WINDOW_S:
            # Half of the window is forgotten, and half of its requests.
            self._counted_since = (self._counted_since + now) / 2
            self._count /= 2

    def seconds(self, count: float) -> int:
        """Seconds in which `count` requests leave: at least 1, and 1 as long as none has left."""
        if not self._count:
            return 1
        return min(
            _MAX_RETRY_S,
            max(1, math.ceil(count * (time.monotonic() - self._counted_since) / self._count)),
        )


class Queue:
    """The requests that wait for one model, in order of arrival, with their arrival times. A queue
    exists only while a request waits."""

    def __init__(self) -> None:
        self.waits_by_request: dict[QueueWait, float] = {}
        self.rate = DequeueRate()
        # The waits of each priority and caller, in order of arrival.
        self._lines: dict[tuple[int, str], dict[QueueWait, None]] = {}
        self._admissions = 0
        self._last_turns: dict[str, int] = {}
        self._overtakings = Overtakings()

    def add(self, wait: QueueWait) -> None:
        self.waits_by_request[wait] = time.monotonic()
        self._lines.setdefault((wait.call.priority, wait.caller), {})[wait] = None

    def remove(self, wait: QueueWait) -> None:
        """Remove a request, if it waits here."""
        if self.waits_by_request.pop(wait, None) is None:
            return
        line = self._lines[wait.call.priority, wait.caller]
        del line[wait]
        if not line:
            del self._lines[wait.call.priority, wait.caller]

    def admit(self, wait: QueueWait) -> None:
        """Remove a request that gets a place."""
        self.rate.count()
        self._admissions += 1
        self._last_turns[wait.caller] = self._admissions
        self.record_place(wait.call.priority)
        self.remove(wait)

    @property
    def classes(self) -> set[int]:
        """The priorities of waiting requests."""
        return {priority for priority, _ in self._lines}

    def may_overtake(self, priority: int, has_share: Callable[[int], bool]) -> bool:
        """Whether a request that arrives may take a place immediately, because all others are of
        later classes."""
        is_first = min(self.classes, default=priority + 1) > priority
        return is_first and self.find_overdue(has_share) is None

    def record_place(self, priority: int) -> None:
        """Count the place that a request of that class gets."""
        self._overtakings.record(priority, self.classes)

    def find_overdue(self, has_share: Callable[[int], bool]) -> QueueWait | None:
        """The first request of a class that was overtaken too often. has_share: whether a class
        holds its share of the engines."""
        class_ = self._overtakings.class_in_turn(self.classes, has_share)
        return next(self._callers_in_turn(class_), None) if class_ is not None else None

    def waits_in_turn(self, has_share: Callable[[int], bool]) -> Iterator[QueueWait]:
        """The waiting requests, the next one first. Requests may leave meanwhile."""
        tried_wait = None
        for priority in sorted(self.classes):
            for wait in self._callers_in_turn(priority):
                overdue_wait = self.find_overdue(has_share)
                if overdue_wait is not None and overdue_wait is not tried_wait:
                    tried_wait = overdue_wait
                    yield overdue_wait
                if wait is not tried_wait and wait in self.waits_by_request:
                    yield wait

    def find_last_after(self, priority: int) -> QueueWait | None:
        """The newest request of the last class, if that comes after `priority`."""
        last_priority = max((priority for priority, _ in self._lines), default=priority)
        if last_priority <= priority:
            return None
        return max(
            (
                next(reversed(line))
                for (line_priority, _), line in self._lines.items()
                if line_priority == last_priority
            ),
            key=self.waits_by_request.__getitem__,
        )

    def _callers_in_turn(self, priority: int) -> Iterator[QueueWait]:
        """The requests of one priority, one of each caller in turn."""
        callers = [caller for line_priority, caller in self._lines if line_priority == priority]
        callers.sort(key=lambda caller: self._last_turns.get(caller, 0))
        lines = [iter(list(self._lines[priority, caller])) for caller in callers]
        while lines:
            for line in list(lines):
                wait = next(line, None)
                if wait is None:
                    lines.remove(line)
                else:
                    yield wait

    def retry_after_s(self) -> int:
        """Seconds until half of the waiting requests have left: then the queue has room, and the
        engines still have work."""
        return self.rate.seconds(len(self.waits_by_request) / 2)


def places(route: ModelRoute, limit: int | None) -> int:
    """The number of requests that may wait for a model. `limit`: the setting; None: twice the
    number that its replicas take concurrently."""
    if limit is not None:
        return limit
    return max(MIN_PLACES, 2 * sum(replica.capacity or 0 for replica in route.replicas))


def overload_error(route: ModelRoute, retry_after_s: int, reason: str) -> Overloaded:
    return Overloaded(
        f"The engines of the model '{route.name}' are busy, and {reason}.",
        hint=f"Try again in {retry_after_s} s.",
        param="model",
        retry_after_s=retry_after_s,
    )
