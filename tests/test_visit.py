"""Where work may be cancelled when its client leaves, and where it may not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.serve.visit import Visit

pytestmark = [pytest.mark.unit, pytest.mark.anyio]


class Client:
    """Leaves when told to; takes what is sent unless it is told to block."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.blocks = False
        self.took = 0

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.blocks:
            await asyncio.Event().wait()
        self.took += 1

    def visit(self) -> Visit:
        return Visit(self.receive, self.send)


async def leaves_in(client: Client) -> None:
    """The client leaves, and the visit has the time to notice."""
    client.left.set()
    for _ in range(10):
        await asyncio.sleep(0)


async def test_work_is_cancelled_where_it_waits_for_the_engine() -> None:
    client = Client()
    visit = client.visit()

    async def work() -> None:
        await visit.trace("http11.receive_response_headers.started", {})
        await leaves_in(client)
        client.took = 1

    await asyncio.wait_for(visit.run(work()), 5)
    assert client.took == 0


@pytest.mark.parametrize("then", ["http11.send_request_headers.started", "send"])
async def test_work_that_must_not_be_interrupted_goes_on_to_the_next_place_where_it_may(then: str) -> None:
    client = Client()
    visit = client.visit()
    reached = []

    async def work() -> None:
        await visit.trace("http11.receive_response_body.started", {})
        await visit.trace("http11.receive_response_body.complete", {})
        await leaves_in(client)
        reached.append("closed")
        client.blocks = True
        if then == "send":
            await visit.send({"type": "http.response.body"})
        else:
            await visit.trace(then, {})
        reached.append("went on")

    await asyncio.wait_for(visit.run(work()), 5)
    assert reached == ["closed"]


async def test_work_is_cancelled_where_the_client_does_not_read() -> None:
    client = Client()
    client.blocks = True
    visit = client.visit()
    sending = asyncio.create_task(visit.run(visit.send({"type": "http.response.start"})))
    await leaves_in(client)
    await asyncio.wait_for(sending, 5)
    assert client.took == 0


async def test_after_a_send_the_work_is_as_interruptible_as_before() -> None:
    client = Client()
    visit = client.visit()
    reached = []

    async def work() -> None:
        await visit.send({"type": "http.response.start"})
        await leaves_in(client)
        reached.append("closed")

    await asyncio.wait_for(visit.run(work()), 5)
    assert (client.took, reached) == (1, ["closed"])


async def test_an_error_of_the_work_is_raised_and_its_end_is_the_end() -> None:
    async def fails() -> None:
        raise ValueError("x")

    async def ends() -> None:
        pass

    await asyncio.wait_for(Client().visit().run(ends()), 5)
    with pytest.raises(ValueError, match="x"):
        await asyncio.wait_for(Client().visit().run(fails()), 5)
