"""Connections to an engine: the time that they may take."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from typing import cast

import pytest
import uvloop

from gateway.proxy import upstream_pool
from gateway.proxy.exchange import Exchange
from gateway.proxy.upstream_connection import UpstreamConnection
from gateway.proxy.upstream_pool import UpstreamPool
from tests.support.patience import HANG_S


class RecordedDial:
    """An exchange that waits for its connection."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def send_request(self, connection: UpstreamConnection) -> None:
        connection.drop()
        self.outcome.set_result("connected")

    def unreachable(self, error: Exception) -> None:
        self.outcome.set_result(repr(error))


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=1)


async def _dial(address: tuple[str, int], stall_s: float) -> str:
    """The outcome of a dial by a process that stands still for so long in the middle."""
    pool = UpstreamPool("http://{}:{}".format(*address), asyncio.get_running_loop(), 256)
    exchange = RecordedDial()
    pool.connect(cast("Exchange", exchange))
    await asyncio.sleep(0)  # The dial begins.
    time.sleep(stall_s)  # noqa: ASYNC251
    return await asyncio.wait_for(exchange.outcome, HANG_S)


def test_a_gateway_that_stood_still_blames_no_engine(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_pool, "CONNECT_TIMEOUT_S", 0.5)
    with listener:
        assert uvloop.run(_dial(listener.getsockname(), stall_s=1)) == "connected"


def test_an_engine_that_accepts_no_connection_is_given_up(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_pool, "CONNECT_TIMEOUT_S", 0.5)
    with listener:
        # The queue of a listener with a backlog of one takes two connections.
        clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        assert "TimeoutError" in uvloop.run(_dial(listener.getsockname(), stall_s=0))
        for client in clients:
            client.close()


def _itself(connection: UpstreamConnection) -> UpstreamConnection:
    return connection


async def _idle_connections(listener: socket.socket, limit: int, count: int) -> list[bool]:
    """Whether each of `count` connections is closed after all of them were given back in turn."""
    loop = asyncio.get_running_loop()
    address = "http://{}:{}".format(*listener.getsockname())
    pool = UpstreamPool(address, loop, limit)
    connections = []
    for _ in range(count):
        connection = UpstreamConnection(pool)
        await loop.create_connection(partial(_itself, connection), *listener.getsockname())
        connections.append(connection)
    for connection in connections:
        pool.release(connection)
    closed = [connection.transport.is_closing() for connection in connections]
    pool.close()
    return closed


@pytest.mark.parametrize(
    ("limit", "closed"),
    [(0, [True, True, True]), (2, [True, False, False]), (3, [False, False, False])],
)
def test_idle_connections_beyond_the_limit_are_closed_the_oldest_first(
    limit: int, closed: list[bool]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert uvloop.run(_idle_connections(listener, limit, 3)) == closed
