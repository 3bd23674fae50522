"""Answers that requests share: one rendering for all requests meanwhile, of no earlier state."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gateway.server.shared_answer import SharedAnswer

pytestmark = pytest.mark.anyio


async def test_requests_during_a_rendering_share_a_later_one() -> None:
    state, began, free = b"1", 0, asyncio.Event()

    async def render() -> bytes:
        nonlocal began
        began += 1
        state_at_start = state
        await free.wait()
        return state_at_start

    answer = SharedAnswer(render)
    first_task = asyncio.create_task(answer.body())
    while not began:
        await asyncio.sleep(0)
    state = b"2"
    later = [asyncio.create_task(answer.body()) for _ in range(200)]
    await asyncio.sleep(0)
    free.set()
    assert await first_task == b"1"
    bodies = await asyncio.gather(*later)
    assert set(bodies) == {b"2"}
    assert began == 2
    assert await answer.body() is bodies[0]  # unread answers without a change share their memory


async def test_a_client_that_leaves_ends_no_rendering_of_others() -> None:
    free = asyncio.Event()

    async def render() -> bytes:
        await free.wait()
        return b"x"

    answer = SharedAnswer(render)
    leaving, staying = (asyncio.create_task(answer.body()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving
    free.set()
    assert await staying == b"x"
