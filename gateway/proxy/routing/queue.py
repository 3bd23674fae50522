"""Requests that wait for a replica: one bounded queue per model, first come, first served.

cause of the wait           at most                        then
every replica is full       Limits.queue_timeout_s         429
no replica is ready         ModelRoute.wait_s              503
the queue is full           -                              the same, at once

`Exchange.sweep` limits the wait. `Routes` ends it: a queue is checked whenever a replica has
finished a request, or the table has changed.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from gateway.errors import Overloaded
from gateway.proxy.routing.model_route import ModelRoute

if TYPE_CHECKING:
    from gateway.proxy.queue_wait import QueueWait

# Places that every queue has, even if the engines take few requests at once.
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

    def retry_after_s(self) -> int:
        """Seconds until half of the waiting requests have left: then the queue has room, and the
        engines still have work."""
        return self.rate.seconds(len(self.waits_by_request) / 2)


def places(route: ModelRoute, limit: int | None) -> int:
    """The number of requests that may wait for a model. `limit`: the setting; None: twice the
    number that its replicas take at once."""
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
