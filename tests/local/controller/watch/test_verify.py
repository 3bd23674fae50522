"""The difference between a hanging and a busy engine, when its clients hear nothing."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway.controller.watch.engine_client import EngineClient
from gateway.controller.watch.engine_questions import is_alive
from tests.support.dataplane import until
from tests.support.makers import plan
from tests.support.patience import wait_until
from tests.support.scripted_engine import EngineScript, FakeEngine

pytestmark = pytest.mark.anyio

LONG = {"model": "m", "prompt": [1] * 3000, "max_tokens": 1}


async def lives(engine: FakeEngine) -> bool:
    return await is_alive(EngineClient(4), f"http://127.0.0.1:{engine.port}", "m", plan(), 0.5)


async def test_an_engine_that_reads_a_long_prompt_before_anything_else_lives() -> None:
    script = EngineScript(model="m", prefill_tokens_per_second=20)
    async with (
        FakeEngine(script, print) as engine,
        httpx.AsyncClient(trust_env=False, timeout=None) as client,
    ):
        asking = asyncio.create_task(
            client.post(f"http://127.0.0.1:{engine.port}/v1/completions", json=LONG)
        )
        await until(lambda: engine.cached > 0)
        assert await lives(engine)
        assert not asking.done()
        asking.cancel()
        await asyncio.wait({asking})


async def test_an_engine_that_answers_the_smallest_request_lives() -> None:
    async with FakeEngine(EngineScript(model="m"), print) as engine:
        assert await wait_until("the engine lives", lambda: lives(engine))


async def test_an_engine_that_answers_nothing_and_whose_cache_does_not_fill_hangs() -> None:
    async with FakeEngine(EngineScript(model="m", hang_after=0), print) as engine:
        assert not await lives(engine)
