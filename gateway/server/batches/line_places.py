"""Places for concurrent lines of all batches: in all, by model, by key, and in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gateway.keys import PRIORITIES
from gateway.proxy.access.auth import Key
from gateway.proxy.routing.class_places import capacity_for
from gateway.proxy.routing.model_route import ModelRoute

# Lines beyond the places of the engines, which wait in the queue: the next one starts immediately.
_WAITING_LINES = 8
# Concurrent lines for a model without engines. Their requests load the model.
_FIRST_LINES = 2
# Lines at an engine whose capacity is unknown.
_UNKNOWN_CAPACITY = 32
# Bytes of concurrent requests. A larger line waits until it is alone.
MAX_BYTES = 16 * 1024 * 1024
# New routes and engines are noticed after this time at the latest.
_LOOK_S = 1.0


def lines_at_once(route: ModelRoute | None) -> int:
    """The concurrent lines of a model: as many as batches may fill, and some that wait."""
    if route is None or not route.replicas:
        return _FIRST_LINES
    places = sum(
        _UNKNOWN_CAPACITY
        if replica.capacity is None
        else capacity_for(PRIORITIES["batch"], replica.capacity)
        for replica in route.replicas
    )
    return places + _WAITING_LINES


def lines_of_key(key: Key | None) -> float:
    """The concurrent lines of a key. Another request of the key finds a place next to them."""
    limit = None if key is None or key.limit is None else key.limit.in_flight
    return math.inf if limit is None else max(1, limit - 1)


class LinePlace(NamedTuple):
    """The place of a line. size: bytes of its request."""

    owner: str
    model: str
    size: int


class LinePlaces:
    """Places that change hands in one event loop. Batches that wait get them in turn."""

    def __init__(
        self,
        most_lines: int,
        lines_of_model: Callable[[str], int],
        lines_of_owner: Callable[[str], float],
    ) -> None:
        """most_lines: the limit of all models.
        lines_of_model, lines_of_owner: the most lines at present.
        """
        self._most_lines = most_lines
        self._lines_of_model = lines_of_model
        self._lines_of_owner = lines_of_owner
        self._models: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._bytes = 0
        self._turns: dict[asyncio.Event, None] = {}

    @property
    def count(self) -> int:
        """The lines that have a place."""
        return self._models.total()

    async def wait(self, place: LinePlace) -> None:
        """Wait until there is a place. The caller takes it before anything else runs."""
        if self._has_room(place):
            return
        # The turn is kept while others find room, so that the first in line is the next.
        turn = asyncio.Event()
        self._turns[turn] = None
        try:
            while not self._has_room(place):
                turn.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await turn.wait()
        finally:
            del self._turns[turn]

    def acquire(self, place: LinePlace) -> None:
        self._models[place.model] += 1
        self._owners[place.owner] += 1
        self._bytes += place.size

    def release(self, place: LinePlace) -> None:
        for counts, name in ((self._models, place.model), (self._owners, place.owner)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
        self._bytes -= place.size
        for turn in self._turns:
            turn.set()

    def _has_room(self, place: LinePlace) -> bool:
        return (
            self._models.total() < self._most_lines
            and self._models[place.model] < self._lines_of_model(place.model)
            and self._owners[place.owner] < self._lines_of_owner(place.owner)
            and (not self._bytes or self._bytes + place.size <= MAX_BYTES)
        )
