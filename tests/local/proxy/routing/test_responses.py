"""Whose a response of /v1/responses is: over real sockets, with engines that would give it to
anyone with its id."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from gateway.proxy.access.auth import Keys
from gateway.proxy.routing import responses
from gateway.proxy.routing.responses import Responses
from gateway.secret import Secret
from tests.support.dataplane import Gateway, http_client, model, stage
from tests.support.stored_responses import ASKED, OTHER, OWNER, Engine, bearer, make, uses
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(Keys(Secret(OWNER), Secret(OTHER))) as running:
        yield running


@pytest.mark.parametrize("replicas", [1, 3])
async def test_another_keys_response_is_answered_like_an_unknown_id(
    gateway: Gateway, replicas: int
) -> None:
    engines = [Engine() for _ in range(replicas)]
    async with stage(gateway, *engines) as upstreams, http_client(gateway) as client:
        for owner, other_key in ((OWNER, OTHER), (OTHER, OWNER)):
            for id_ in (await make(client, owner), await make(client, owner, stream=True)):
                before = [len(upstream.requests) for upstream in upstreams]
                refusal = await uses(client, other_key, id_)
                assert [status for status, _ in refusal] == [404] * 5
                assert refusal == await uses(client, other_key, "resp_nobodys")
                # No engine was asked.
                assert [len(upstream.requests) for upstream in upstreams] == before
                assert [status for status, _ in await uses(client, owner, id_)] == [200] * 5


async def test_nobody_takes_a_response_by_naming_one_like_it(gateway: Gateway) -> None:
    async with stage(gateway, Engine()) as [upstream], http_client(gateway) as client:
        victim = await make(client, OWNER)
        response_id = await make(client, OTHER, metadata={"id": victim})
        assert response_id != victim
        for fields in (
            {"request_id": victim},
            {"request_id": "x", "metadata": {"id": victim}},
            {"request_id": 5},
        ):
            before = len(upstream.requests)
            answer = await client.post(
                "/v1/responses", json={**ASKED, **fields}, headers=bearer(OTHER)
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
            assert len(upstream.requests) == before
        assert [status for status, _ in await uses(client, OTHER, victim)] == [404] * 5
        # Where it names nothing that is kept, it is the engine's affair.
        answer = await client.post(
            "/v1/responses", json={**ASKED, "request_id": None}, headers=bearer(OTHER)
        )
        assert answer.status_code == 200


async def test_a_response_that_is_not_stored_has_no_owner(gateway: Gateway) -> None:
    async with stage(gateway, Engine()) as [upstream], http_client(gateway) as client:
        stored_id, other_id = await make(client, OWNER), await make(client, OWNER, store=False)
        before = len(upstream.requests)
        response = await client.get(f"/v1/responses/{other_id}", headers=bearer(OWNER))
        assert response.status_code == 404
        assert '"store": false' in response.json()["error"]["message"]
        assert len(upstream.requests) == before
        assert (await client.get(f"/v1/responses/{stored_id}", headers=bearer(OWNER))).is_success


async def test_an_engine_keeps_a_bounded_memory_of_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines never drop a response: where one is full, further answers are not stored."""
    monkeypatch.setattr(responses, "STORE_BYTES", 64 * 1024)
    engine = Engine()
    with Gateway(Keys(Secret(OWNER), Secret(OTHER))) as gateway:
        async with stage(gateway, engine) as [upstream], http_client(gateway) as client:
            await fill(engine, upstream, client)


async def fill(engine: Engine, upstream: Upstream, client: httpx.AsyncClient) -> None:
    text = "x" * 20_000
    first = [await make(client, OWNER, input=text) for _ in range(3)]
    assert engine.ids == set(first)
    last = await make(client, OWNER, input=text, previous_response_id=first[0])
    assert engine.ids == set(first)
    document = json.loads(upstream.requests[-1].partition(b"\r\n\r\n")[2])
    assert document == {
        **ASKED, "input": text, "previous_response_id": first[0], "store": False
    }  # fmt: skip
    assert [status for status, _ in await uses(client, OWNER, first[2])] == [200] * 5
    assert (await client.get(f"/v1/responses/{last}", headers=bearer(OWNER))).status_code == 404
    responses, seed = Responses(), 7
    responses.add(seed, 40_000, 9_000_000, is_stream=True)
    assert responses.is_full(seed)
    assert not responses.is_full(8)  # the next engine


async def test_a_refusal_of_this_endpoint_is_not_remembered_as_a_response(gateway: Gateway) -> None:
    async def refuses(call: Call) -> None:
        await call.reply(b'{"id":"resp_error"}', "400 Bad Request")

    async with stage(gateway, refuses), http_client(gateway) as client:
        assert (
            await client.post("/v1/responses", json=ASKED, headers=bearer(OWNER))
        ).status_code == 400
        assert (await client.get("/v1/responses/resp_error", headers=bearer(OWNER))).json()[
            "error"
        ]["code"] == "not_found"


async def test_a_response_of_an_engine_that_is_gone_is_unknown(gateway: Gateway) -> None:
    async with stage(gateway, Engine()), http_client(gateway) as client:
        id_ = await make(client, OWNER)
        gateway.route(model("http://127.0.0.1:9", name="n"))
        assert (await client.get(f"/v1/responses/{id_}", headers=bearer(OWNER))).json()["error"][
            "code"
        ] == "not_found"
