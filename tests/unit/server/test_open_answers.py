"""Answers under way, and the end of their callers' keys."""

from __future__ import annotations

import asyncio
import time

import pytest
from starlette.types import Message

from gateway.server.open_answers import OpenAnswer
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio


async def never_receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_an_answer_ends_with_the_key_of_its_caller() -> None:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    answer = OpenAnswer(lambda: True, never_receive, send, time.time() + 0.01)
    await answer.send({"type": "http.response.start", "status": 200, "headers": []})
    message = await asyncio.wait_for(answer.receive(), hang_s())
    assert message["type"] == "http.disconnect"
    await answer.close()
    assert messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
