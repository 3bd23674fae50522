"""`fitserve batches` against a whole gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.batch_calls import batch_input, make_batch, run_batch, sdk
from tests.support.commands import fitserve
from tests.support.key_gateway import ADMIN, gateway, make
from tests.support.upstream import Call

pytestmark = pytest.mark.anyio


async def run(url: str, *words: str, key: str = ADMIN) -> tuple[int, str]:
    """The exit code of the command, and the text that it prints."""
    result = await asyncio.to_thread(
        fitserve, "batches", *words, FITSERVE_URL=url, FITSERVE_KEY=key
    )
    return result.returncode, result.stdout + result.stderr


async def test_batches_of_a_key_are_listed_and_shown(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _), sdk(server.url, ADMIN) as client:
        ended_batch = await run_batch(client, batch_input(3))
        failed_batch = await run_batch(client, batch_input(1) + b"no JSON\n")
        code, text = await run(server.url, "ls")
        rows = [line.split() for line in text.splitlines()]
        assert (code, rows[0][:5]) == (0, ["BATCH", "STATE", "ANSWERED", "FAILED", "LINES"])
        assert [row[:5] for row in rows[1:]] == [
            [failed_batch.id, "failed", "0", "0", "0"],
            [ended_batch.id, "completed", "3", "0", "3"],
        ]
        _, text = await run(server.url, "ls", "--last", "1")
        assert ended_batch.id not in text
        assert "Older batches exist" in text
        _, text = await run(server.url, "show", ended_batch.id)
        assert "3 answered, 0 failed, 3 in all" in text
        assert str(ended_batch.output_file_id) in text
        _, text = await run(server.url, "show", failed_batch.id)
        assert "line 2: " in text
        _, text = await run(server.url, "show", ended_batch.id, "--json")
        assert json.loads(text)["request_counts"]["completed"] == 3
        secret = await make(server, "other")
        _, text = await run(server.url, "ls", key=secret)
        assert "Your key has no batches" in text
        code, text = await run(server.url, "show", ended_batch.id, key=secret)
        assert (code, ended_batch.id in text) == (1, True)


async def test_a_batch_is_cancelled_by_its_key(tmp_path: Path) -> None:
    async def wait(call: Call) -> None:
        await call.closed.wait()

    async with gateway(tmp_path, wait) as (server, _), sdk(server.url, ADMIN) as client:
        batch = await make_batch(client, batch_input(3))
        code, text = await run(server.url, "cancel", batch.id)
        assert code == 0
        assert "cancel" in text.splitlines()[1]
        code, text = await run(server.url, "cancel", "batch_unknown")
        assert code == 1
