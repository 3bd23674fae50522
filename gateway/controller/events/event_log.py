"""The numbered events of this gateway, stored on disk before any listener gets them.

No queue per listener exists. A listener names the last event that it has, and gets the following
ones from memory or from the store. So a slow listener costs nothing, and may return at any time. If
events are gone, the answer has `gap` set.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.domain.facts import Event
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.store.event_table import Bounds
from gateway.store.store import Store

log = Logger("fitserve.events")

# Seconds between two writes, so that a storm of events needs few transactions.
_WRITE_S = 0.2
# Seconds between two tries while the disk takes nothing.
_RETRY_S = 2.0
# Events that may wait for the disk. Beyond that the oldest are lost.
_MAX_PENDING_EVENTS = 2_000
_MAX_MEMORY_EVENTS = 1_000
_PAGE_EVENTS = 256


class RecordedEvent(NamedTuple):
    """A stored event as its JSON, which is made once for all listeners, and the fields that they
    choose by. The event itself would take four times the memory."""

    number: int
    at: float
    kind: str
    model: str | None
    text: bytes


class EventBatch(NamedTuple):
    """The events after a number.

    `number` is the last event that was looked at. `has_gap`: events are missing, or the number is
    of another gateway.
    """

    events: Sequence[RecordedEvent]
    number: int
    has_gap: bool = False


class EventLog:
    """Numbers events, stores them, and hands them to listeners.

    Used only by the event loop. Call `start` before `append`.
    """

    def __init__(self, store: Store) -> None:
        self.newest_number = self.at_start = 0
        """The newest event's number, now and when the gateway started."""
        self._table = store.events
        self._recent: deque[RecordedEvent] = deque(maxlen=_MAX_MEMORY_EVENTS)
        self._pending_events: deque[Iterable[Event]] = deque(maxlen=_MAX_PENDING_EVENTS)
        self._arrival = asyncio.Event()
        self._record_event = asyncio.Event()
        self._is_failing = self._is_recording = self._is_ending = False
        self._writing: asyncio.Task[None] | None = None
        self._recording: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        try:
            self.newest_number = self.at_start = (
                await asyncio.to_thread(self._table.bounds)
            ).newest
        except StoreError as error:
            log.warning("earlier events could not be read", error=str(error))
        self._writing = asyncio.create_task(self._write_batches())

    def append(self, events: Iterable[Event]) -> None:
        """Record events soon.

        The iterable is consumed later in a thread, so its inputs must not change.
        """
        self._pending_events.append(events)
        self._arrival.set()

    async def close(self) -> None:
        """Write the events that wait, if the disk takes them."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})
        if self._recording is not None:
            await asyncio.wait({self._recording})
        await self._record()

    async def bounds(self) -> Bounds:
        return await asyncio.to_thread(self._table.bounds)

    async def last(self, limit: int, model: str | None) -> list[Event]:
        return await asyncio.to_thread(self._table.last, limit, model)

    async def events_after(self, number: int, model: str | None = None) -> EventBatch:
        """The next events after this number, or none. Number 0 begins with the oldest event. Raises
        StoreError."""
        if number == self.newest_number:
            return EventBatch((), number)
        if number == 0:
            number = max(0, (await self.bounds()).oldest - 1)
        recent = self._recent
        if recent and recent[0].number <= number + 1 <= self.newest_number:
            # Numbers have no holes.
            first = number + 1 - recent[0].number
            window = [
                recent[position]
                for position in range(first, min(first + _PAGE_EVENTS, len(recent)))
            ]
            return EventBatch(
                [recorded for recorded in window if model in (None, recorded.model)],
                window[-1].number,
            )
        bounds = await self.bounds()
        if number > bounds.newest or number + 1 < bounds.oldest:
            return EventBatch((), bounds.newest, has_gap=True)
        events = await asyncio.to_thread(
            lambda: _recorded_events(self._table.events_after(number, _PAGE_EVENTS, model))
        )
        last = events[-1].number if events else 0
        # Events may have come since the bounds were read.
        return EventBatch(events, last if len(events) == _PAGE_EVENTS else max(last, bounds.newest))

    async def next(self, number: int, limit: int, model: str | None) -> list[Event]:
        return await asyncio.to_thread(self._table.events_after, number, limit, model)

    async def wait_for_events(self, within_s: float) -> bool:
        """Wait for more events or the end. False: nothing came within the time."""
        try:
            async with asyncio.timeout(within_s):
                await self._record_event.wait()
        except TimeoutError:
            return False
        return True

    def drain(self) -> None:
        """End the log: listeners get the remaining events, and then the end."""
        self._is_ending = True
        self._notify_readers()

    def is_over(self, number: int) -> bool:
        """Whether no event follows this one."""
        return self._is_ending and (
            self._is_failing
            or (
                number == self.newest_number and not self._pending_events and not self._is_recording
            )
        )

    async def _write_batches(self) -> None:
        while True:
            await self._arrival.wait()
            self._arrival.clear()
            # A cancellation must not interrupt the write: events taken from the queue would be
            # lost.
            self._recording = asyncio.create_task(self._record())
            is_written = await asyncio.shield(self._recording)
            await asyncio.sleep(_WRITE_S if is_written else _RETRY_S)
            if not is_written:
                self._arrival.set()

    async def _record(self) -> bool:
        batch = [*self._pending_events]
        self._pending_events.clear()
        if not batch:
            return True
        self._is_recording = True
        added = []
        try:
            added = await asyncio.to_thread(self._add, batch)
        except StoreError as error:
            if not self._is_failing:
                log.warning("events could not be recorded", error=str(error))
            self._is_failing = True
            self._pending_events.extendleft(reversed(batch))
            return False
        else:
            self._is_failing = False
            self._cache_recent(added)
        finally:
            self._is_recording = False
            if added or self._is_failing or self._is_ending:
                self._notify_readers()
        return True

    def _cache_recent(self, added: list[RecordedEvent]) -> None:
        if added:
            if self._recent and added[0].number != self._recent[-1].number + 1:
                # Another process has written events: a gateway that took over, or that was
                # replaced.
                self._recent.clear()
            self._recent.extend(added)
            self.newest_number = added[-1].number

    def _add(self, batches: list[Iterable[Event]]) -> list[RecordedEvent]:
        """Write events, in a thread. `batches` then holds the events made, for the next try. Raises
        StoreError."""
        for position, events in enumerate(batches):
            try:
                batches[position] = [*events]
            except Exception:
                log.exception("an event could not be made")
                batches[position] = ()
        events_to_add = [event for events in batches for event in events]
        return (
            _recorded_events(self._table.add(events_to_add, time.time())) if events_to_add else []
        )

    def _notify_readers(self) -> None:
        self._record_event.set()
        self._record_event = asyncio.Event()


def _recorded_events(events: Iterable[Event]) -> list[RecordedEvent]:
    return [
        RecordedEvent(event.id, event.at, event.kind, event.model, event.model_dump_json().encode())
        for event in events
    ]
