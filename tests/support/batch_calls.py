"""Calls of the official openai SDK for batches: input files, the end of a batch, its results.

batch = await run_batch(client, batch_input(10)); results(await content(client,
batch.output_file_id))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import openai
from openai.types import Batch

from tests.support.patience import Patience, hang_s

CHAT: Final = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["a", "b"]},
}


def batch_line(custom_id: str, endpoint: str = CHAT, model: str = "a", **fields: Any) -> bytes:
    """A line of an input, with further fields of its body."""
    body = {"model": model, **BODIES[endpoint], **fields}
    row = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}
    return json.dumps(row).encode() + b"\n"


def batch_input(count: int, endpoint: str = CHAT, **fields: Any) -> bytes:
    return b"".join(batch_line(f"line-{number}", endpoint, **fields) for number in range(count))


def sdk(url: str, key: str = "no key") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=hang_s())


async def make_batch(
    client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **fields: Any
) -> Batch:
    file = await client.files.create(file=("input.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


async def until_status(
    client: openai.AsyncOpenAI, batch: Batch, statuses: Iterable[str] = ENDS, factor: float = 1
) -> Batch:
    """The batch in one of these states. factor: of the usual deadline."""
    patience = Patience(factor * hang_s())
    while batch.status not in statuses:
        assert not patience.is_over(), batch
        await asyncio.sleep(patience.pause_s(0.02))
        batch = await client.batches.retrieve(batch.id)
    return batch


async def until_count(client: openai.AsyncOpenAI, batch: Batch, count: int) -> None:
    """Wait until so many lines of a batch are answered."""
    patience = Patience()
    while batch.request_counts is None or batch.request_counts.completed < count:
        assert not patience.is_over(), batch
        await asyncio.sleep(patience.pause_s(0.02))
        batch = await client.batches.retrieve(batch.id)


async def run_batch(
    client: openai.AsyncOpenAI, content: bytes, endpoint: str = CHAT, **fields: Any
) -> Batch:
    return await until_status(client, await make_batch(client, content, endpoint, **fields))


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[Mapping[str, Any]]:
    """The lines of a result file; none for no file."""
    if file_id is None:
        return []
    content = (await client.files.content(file_id)).content
    return [json.loads(line) for line in content.splitlines()]


def ids(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The ids of results, in order of the input."""
    return sorted((row["custom_id"] for row in rows), key=lambda id_: int(id_.rpartition("-")[2]))
