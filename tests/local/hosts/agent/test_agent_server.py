"""Documents of inquiries, which a compromised gateway may make as large as the agent takes."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Engine, Mount
from gateway.domain.image_name import AllowedImages
from gateway.hosts.agent import agent_server
from gateway.hosts.agent.agent_server import Agent
from gateway.hosts.agent.resolved_images import ResolvedImages
from tests.support.memory_host import MemoryHost, World
from tests.support.patience import HANG_S, hang_s
from tests.support.scripted_engine import EngineScript

ENGINE = Engine(
    kind="fake",
    version="1",
    device="cuda",
    image="frob/engine:1",
    container_command=("python3",),
    process_command=("python3",),
)
REF = {"kind": "fake", "version": "1", "image": "frob/engine:1"}
Code = Callable[[str, bytes], AsyncGenerator[bytes, None]]

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(folder: Path, code: Code) -> AsyncIterator[Path]:
    """An agent over a pretended host, whose engines answer by `code`; gives its socket."""
    world = World()
    world.code = code
    agent = Agent(
        MemoryHost(lambda _: EngineScript(), world),
        lambda _: ENGINE,
        Mount(source=str(folder), target="/models"),
        AllowedImages(("frob/*",)),
        ResolvedImages(folder / "resolved"),
    )
    async with agent.serving(folder / "agent.sock"):
        yield folder / "agent.sock"


async def call(socket: Path, **fields: Any) -> dict[str, Any]:
    """The last answer to a call."""
    async with asyncio.timeout(hang_s()):
        reader, writer = await asyncio.open_unix_connection(str(socket))
        try:
            writer.write(json.dumps(fields).encode() + b"\n")
            lines = (await reader.read()).splitlines()
        finally:
            writer.close()
    last: dict[str, Any] = json.loads(lines[-1])
    return last


def inquiry(document: bytes) -> dict[str, Any]:
    packed_text = base64.b64encode(zlib.compress(document)).decode()
    return {"call": "inquire", "engine": REF, "asked": packed_text}


async def test_other_calls_are_answered_while_a_document_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_event, release_event = threading.Event(), threading.Event()
    unpack = agent_server._unpack

    def slow(text: str) -> bytes:
        begin_event.set()
        assert release_event.wait(HANG_S)
        return unpack(text)

    async def code(_: str, document: bytes) -> AsyncGenerator[bytes, None]:
        yield b"%d" % len(document)

    monkeypatch.setattr(agent_server, "_unpack", slow)
    async with serving(tmp_path, code) as socket:
        asking = asyncio.ensure_future(call(socket, **inquiry(b"a" * 1000)))
        assert await asyncio.to_thread(begin_event.wait, HANG_S)
        list_call = asyncio.ensure_future(call(socket, call="list"))
        await asyncio.wait({list_call}, timeout=HANG_S / 2)
        was_answered = list_call.done()
        release_event.set()
        assert was_answered
        assert (await list_call)["answer"] == "done"
        assert (await asking)["answer"] == "done"


async def test_few_documents_are_in_memory_at_the_same_time(tmp_path: Path) -> None:
    most = agent_server._MAX_UNPACKED_DOCUMENTS
    document_count, release_event = 0, asyncio.Event()
    is_full, excess = asyncio.Event(), asyncio.Event()

    async def code(_: str, document: bytes) -> AsyncGenerator[bytes, None]:
        nonlocal document_count
        document_count += 1
        (
            excess
            if document_count > most
            else is_full
            if document_count == most
            else asyncio.Event()
        ).set()
        await release_event.wait()
        document_count -= 1
        yield b"%d" % len(document)

    async with serving(tmp_path, code) as socket:
        calls = [asyncio.ensure_future(call(socket, **inquiry(b"a"))) for _ in range(most + 2)]
        await asyncio.wait_for(is_full.wait(), hang_s())
        # Further calls are answered, so the inquiries beyond the bound have been read.
        for _ in range(3):
            assert (await call(socket, call="list"))["answer"] == "done"
        assert not excess.is_set()
        release_event.set()
        assert {(await call)["answer"] for call in calls} == {"done"}
