"""A client that keeps asking."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import openai

from tests.e2e.conftest import Gateway
from tests.support.patience import hang_s

CLIENTS = 8


# So that each stream goes on while a change begins, and most end after it.
TOKENS, PER_SECOND = 100, 50


@contextlib.asynccontextmanager
async def keep_asking(gateway: Gateway) -> AsyncIterator[Counter[str]]:
    """Clients that ask all the time, half of them for streams: whole answers by kind. Any error of
    the SDK fails the test."""
    counts, over = Counter[str](), asyncio.Event()
    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=4 * hang_s()
    ) as client:

        async def ask(streams: bool) -> None:
            fields: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": TOKENS}
            while not over.is_set():
                if streams:
                    chunks = [
                        chunk
                        async for chunk in await client.completions.create(**fields, stream=True)
                    ]
                    assert chunks[-1].choices[0].finish_reason, "the stream broke off"
                    counts["streams"] += 1
                else:
                    assert (await client.completions.create(**fields)).choices[0].finish_reason
                    counts["answers"] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(ask(number % 2 == 0))
            yield counts
            over.set()
