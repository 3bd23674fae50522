"""A model is changed under load behind several workers: its clients, which are those of the openai
SDK, see nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines
from tests.e2e.test_workers import start_gateway
from tests.support.patience import HANG_S, hang_s

pytestmark = pytest.mark.anyio

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


async def wait_for_change(gateway: Gateway, new_context: int) -> dict[str, Any]:
    """The model, once its context is another one and the engine from before is gone."""
    answer = await asyncio.to_thread(
        gateway.client.patch, "/admin/models/m", json={"max_context": new_context}
    )
    assert answer.status_code == 202, answer.text

    def wait_for_end() -> Any:
        view = gateway.show("m")
        serves = (
            view["state"] == "ready"
            and view["change"] is None
            and view["plan"]["max_model_len"]["value"] == new_context
        )
        return serves and len(engines(gateway)) == 1 and view

    view: dict[str, Any] = await asyncio.to_thread(wait_for, "the change", wait_for_end, 4 * HANG_S)
    return view


async def test_no_answer_fails_and_no_stream_breaks_while_a_model_is_changed(
    tmp_path: Path,
) -> None:
    with start_gateway(tmp_path, "--tokens-per-second", str(PER_SECOND)) as gateway:
        async with keep_asking(gateway) as counts:
            for context in (2048, 1024):
                view = await wait_for_change(gateway, context)
                assert view["attempts"][-1]["max_model_len"] == context
            counter = Counter(counts)
            # The one that came last answers too.
            await asyncio.to_thread(
                wait_for, "answers of the last one", lambda: len(counts - counter) == 2
            )
        assert set(counts) == {"streams", "answers"}
        assert [attempt["failure"] for attempt in view["attempts"]] == [None, None, None]
