"""Answers under way, which end when the key of their caller is revoked, changed or over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Receive, Send


class OpenAnswer:
    """A request for reading whose answer may have no end: its application sees a client that left
    once `cancel` was called, and the answer is then completed."""

    def __init__(
        self,
        is_allowed: Callable[[], bool],
        receive: Receive,
        send: Send,
        ends_at: float | None = None,
    ) -> None:
        """Needs the event loop.

        is_allowed: whether the caller may still read the answer.
        ends_at: Unix time from which on the caller may not; None: no such time.
        """
        self.is_allowed = is_allowed
        self._receive = receive
        self._send = send
        self._end_event = asyncio.Event()
        self._next: asyncio.Task[Message] | None = None
        self._has_started = self._is_complete = False
        self._timer = (
            None
            if ends_at is None
            else asyncio.get_running_loop().call_later(ends_at - time.time(), self.cancel)
        )

    def cancel(self) -> None:
        self._end_event.set()

    async def receive(self) -> Message:
        """The next message for the application."""
        if self._next is None:
            self._next = asyncio.create_task(self._read())
        end_wait = asyncio.create_task(self._end_event.wait())
        try:
            pending_tasks: set[asyncio.Task[Any]] = {self._next, end_wait}
            await asyncio.wait(pending_tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            end_wait.cancel()
        if self._end_event.is_set() or not self._next.done():
            return {"type": "http.disconnect"}
        message = self._next.result()
        self._next = None
        return message

    async def _read(self) -> Message:
        return await self._receive()

    async def send(self, message: Message) -> None:
        self._has_started = True
        if message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    async def close(self) -> None:
        """Complete an answer that was ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None:
            self._next.cancel()
        if self._end_event.is_set() and self._has_started and not self._is_complete:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class OpenAnswers:
    """The answers of one application, in its event loop."""

    def __init__(self) -> None:
        self._answers: set[OpenAnswer] = set()

    def add(self, answer: OpenAnswer) -> None:
        self._answers.add(answer)

    async def remove(self, answer: OpenAnswer) -> None:
        self._answers.discard(answer)
        await answer.close()

    def close_revoked_answers(self) -> None:
        """End the answers whose callers may no longer read them."""
        for answer in self._answers:
            if not answer.is_allowed():
                answer.cancel()
