"""Calls that are given up between relays, with node services that answer late and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.hosts.cluster.link import LinkServer
from gateway.hosts.cluster.relay import SOCKET_VARIABLE, Relay
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio


class Reference:
    """The outcome of a call to an actor, which runs on when its caller leaves."""

    def __init__(self, outcome: Awaitable[Any]) -> None:
        self._task = asyncio.ensure_future(outcome)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._task).__await__()


class Actor:
    """A relay as Ray shows it to other processes. read: replaces its method."""

    def __init__(self, relay: Relay, read: Callable[..., Any] | None = None) -> None:
        self._relay = relay
        self._read = read

    def __getattr__(self, name: str) -> Any:
        method = self._read if name == "read" and self._read else getattr(self._relay, name)
        return SimpleNamespace(remote=lambda *values: Reference(method(*values)))


class LateNode:
    """A node service that answers when the test lets it."""

    def __init__(self) -> None:
        self.call = asyncio.Event()
        self.answer = asyncio.Event()
        self.end = asyncio.Event()
        """Set: the connection of the call was closed."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        self.call.set()
        await self.answer.wait()
        with suppress(OSError):
            writer.write(b"answer\n")
            await writer.drain()
            await reader.read()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        self.end.set()


@asynccontextmanager
async def late_node(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[LateNode, Relay]]:
    node = LateNode()
    monkeypatch.setenv(SOCKET_VARIABLE, str(folder / name))
    async with await asyncio.start_unix_server(node.serve, folder / name):
        async with asyncio.timeout(hang_s()):
            yield node, Relay()
            await node.end.wait()


async def test_a_copy_that_is_given_up_early_closes_its_source(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        late_node(tmp_path, "one", monkeypatch) as (source, source_relay),
        late_node(tmp_path, "two", monkeypatch) as (target, relay),
    ):
        target.answer.set()
        number, _ = await relay.call(b"{}\n", Actor(source_relay), b"{}\n")
        await source.call.wait()
        await relay.close(number)
        source.answer.set()
        await source.end.wait()


async def test_an_error_of_a_source_closes_it(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: int) -> bytes:
        raise RuntimeError

    async with (
        late_node(tmp_path, "one", monkeypatch) as (source, source_relay),
        late_node(tmp_path, "two", monkeypatch) as (target, relay),
    ):
        target.answer.set()
        source.answer.set()
        number, _ = await relay.call(b"{}\n", Actor(source_relay, fail), b"{}\n")
        await source.end.wait()
        await relay.close(number)


async def test_a_call_that_is_given_up_early_is_closed(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = type("RayError", (Exception,), {})
    exceptions = SimpleNamespace(RayError=error, ActorDiedError=error)
    link = LinkServer(SimpleNamespace(exceptions=exceptions))
    async with late_node(tmp_path, "one", monkeypatch) as (node, relay):
        link._nodes["one"] = {"state": "alive"}
        link._relays["one"] = Actor(relay)

        async def drain() -> None:
            pass

        writer: Any = SimpleNamespace(write=lambda _: None, drain=drain)
        calling = asyncio.ensure_future(link._pass("one", b"{}\n", writer, "", b""))
        await node.call.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        node.answer.set()
        await node.end.wait()
