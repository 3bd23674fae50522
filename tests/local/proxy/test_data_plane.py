"""State that all connections share, where one of them fails."""

from __future__ import annotations

import asyncio

import pytest

from gateway.proxy.limits import FIRST_BYTE_S
from tests.support.dataplane import Gateway, until
from tests.support.patience import HANG_S

pytestmark = pytest.mark.anyio


class Failing:
    """A connection with a bug."""

    exchange = None
    looks = 0

    def sweep(self, now: float) -> None:
        self.looks += 1
        raise RuntimeError

    def leave(self) -> None: ...

    def stop(self) -> None: ...


async def test_a_connection_that_fails_does_not_end_the_limits_of_the_others() -> None:
    with Gateway(stands_still=True) as gateway:
        failing = Failing()
        clients = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(4)]
        await until(lambda: len(gateway.plane.connections) == 4)
        gateway.plane.connections.add(failing)  # type: ignore[arg-type]
        gateway.later(FIRST_BYTE_S + 1)
        for reader, writer in clients:
            assert await asyncio.wait_for(reader.read(), HANG_S) == b""
            writer.close()
        # The clock goes on too: nobody looks by hand here.
        looks = failing.looks
        await until(lambda: failing.looks > looks + 1)
