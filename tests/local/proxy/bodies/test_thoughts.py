"""Thoughts of a chat answer have one name for clients, whatever engine serves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.dataplane import CHAT, DONE, Gateway, http_client, model
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

THOUGHTS = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}


async def as_sglang(call: Call) -> None:
    """Answers with SGLang's name; a stream in pieces that divide it."""
    answer = {"id": "c", "choices": [{"message": THOUGHTS, "finish_reason": "stop"}]}
    if not json.loads(call.body).get("stream"):
        await call.reply(json.dumps(answer, separators=(",", ":")).encode())
        return
    await call.start()
    for text in ("two ", "and two"):
        delta = {"choices": [{"delta": {"reasoning_content": text}, "finish_reason": None}]}
        data = b"data: " + json.dumps(delta, separators=(",", ":")).encode() + b"\n\n"
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        for start in range(0, len(chunk), 11):
            await call.send(chunk[start : start + 11])
    await call.chunk(DONE)
    await call.end()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        yield server


@pytest.mark.parametrize(("engine", "name"), [("reasoning_content", "reasoning"),
                                              ("reasoning", "reasoning_content")])  # fmt: skip
async def test_a_client_reads_one_name(gateway: Gateway, engine: str, name: str) -> None:
    """An engine with the usual name is passed on as it is, even where it uses another."""
    async with Upstream(as_sglang) as upstream, http_client(gateway) as client:
        route = model(upstream.url)
        replicas = tuple(replace(replica, thoughts=engine) for replica in route.replicas)
        gateway.route(replace(route, replicas=replicas))
        history = {"role": "assistant", "content": "", "reasoning": "hm"}
        body = {"model": "m", "messages": [history]}
        for _ in range(2):  # the second answer is read by the head of the first
            answer = (await client.post(CHAT, json=body)).json()
            assert answer["choices"][0]["message"][name] == "two and two"
        document = json.loads(upstream.requests[-1].partition(b"\r\n\r\n")[2])
        assert document["messages"][0][engine] == "hm"
        text = (await client.post(CHAT, json={**body, "stream": True})).text
        events = [line.removeprefix("data: ") for line in text.splitlines() if line][:-1]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert [delta[name] for delta in deltas] == ["two ", "and two"]
        await gateway.wait_until_settled()
