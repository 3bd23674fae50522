"""Requests that wait until a replica can take them: one queue per model, bounded, first come first
served.

why it waits                at most                        then
every replica is full       Limits.queue_timeout_s         429
no replica is ready         ModelRoute.wait_s              503
the queue is full           -                              the same, at once

How long is the request's own affair (`Exchange.sweep`); when it can go is told by `Routes`, which
looks at a queue whenever a replica has done something or the table has changed.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from gateway.errors import Overloaded
from gateway.proxy.routing.table import ModelRoute

if TYPE_CHECKING:
    from gateway.proxy.queue_wait import QueueWait

# What may always wait, however little the engines take at once.
LEAST_PLACES = 128
_WINDOW_S = 10.0
_LONGEST_S = 60


class Pace:
    """How many per second go, over the last seconds in which somebody waited."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._gone = 0.0

    def went(self) -> None:
        now = time.monotonic()
        self._gone += 1
        if now - self._since > _WINDOW_S:
            # Half of the window is forgotten, and half of the requests that went in this time.
            self._since = (self._since + now) / 2
            self._gone /= 2

    def seconds(self, count: float) -> int:
        """In which so many go: at least 1, and 1 too as long as none has gone."""
        if not self._gone:
            return 1
        return min(
            _LONGEST_S, max(1, math.ceil(count * (time.monotonic() - self._since) / self._gone))
        )


class Queue:
    """The requests that wait for one model, in order of coming, each with the time when it came. A
    queue exists only while a request waits."""

    def __init__(self) -> None:
        self.waiting: dict[QueueWait, float] = {}
        self.pace = Pace()

    def retry_after_s(self) -> int:
        """The time until half of the waiting requests will have gone: then the queue has room, and
        the engines still have work."""
        return self.pace.seconds(len(self.waiting) / 2)


def places(route: ModelRoute, most: int | None) -> int:
    """How many requests may wait for a model. `most`: the number in the settings; None: twice as
    many as its replicas take at once."""
    if most is not None:
        return most
    return max(LEAST_PLACES, 2 * sum(replica.capacity or 0 for replica in route.replicas))


def overloaded(route: ModelRoute, retry_after_s: int, why: str) -> Overloaded:
    return Overloaded(
        f"The engines of the model '{route.name}' are busy, and {why}.",
        hint=f"Try again in {retry_after_s} s.",
        param="model",
        retry_after_s=retry_after_s,
    )
