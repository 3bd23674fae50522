"""Workers are killed under their clients: after any break nobody gets bytes of another client or
another key.

TOKENS=100000 in the environment makes the run with unique tokens so long, DEATHS=50 kills so many
workers in each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httptools
import httpx
import pytest

from tests.support.patience import hang_s
from tests.support.served import Served, serve_models, worker_pids
from tests.support.stored_responses import OTHER, OWNER, bearer
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

WORKERS = 3
CLIENTS = 12
TOKENS = int(os.environ.get("TOKENS", "1500"))
DEATHS = int(os.environ.get("DEATHS", "2"))
TOKEN = re.compile(rb"token-[0-9a-f]{32}")


def new_token() -> bytes:
    return f"token-{uuid.uuid4().hex}".encode()


class Engine:
    """Repeats its prompt, whole or in pieces, and keeps its responses with their texts, for anyone
    with their ids."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._bodies: dict[str, bytes] = {}

    async def __call__(self, call: Call) -> None:
        method, path, _ = call.head[0].decode().split(" ")
        if path == "/v1/models":
            await call.reply(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
        elif method == "GET":
            reply_data = self._bodies.get(path.split("/")[3])
            await call.reply(reply_data or b"{}", "200 OK" if reply_data else "404 Not Found")
        elif path == "/v1/responses":
            document = json.loads(call.body)
            id_ = f"resp_{uuid.uuid4().hex}"
            text = self._bodies.get(document.get("previous_response_id", ""), b"").decode()
            reply_data = json.dumps(
                {"id": id_, "object": "response", "says": document["input"], "before": text}
            ).encode()
            self._bodies[id_] = reply_data
            await call.reply(reply_data)
        else:
            await self._chat(call)

    async def _chat(self, call: Call) -> None:
        token, pieces = TOKEN.findall(call.body)[0], self._chance.randrange(4)
        if not pieces:
            await call.reply(b'{"choices":[{"message":{"content":"%b"}}]}' % token)
            return
        await call.start()
        for _ in range(pieces):
            await call.chunk(b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % token)
            await asyncio.sleep(0)
        if self._chance.random() < 0.02:
            call.close()  # as an engine that dies
        else:
            await call.chunk(b"data: [DONE]\n\n")
            await call.end()


@asynccontextmanager
async def gateway_of_workers(folder: Path) -> AsyncIterator[Served]:
    """The model m with two engines, the admin key OWNER and the api key OTHER."""
    async with AsyncExitStack() as stack:
        engines = [Engine(random.Random(seed)) for seed in range(2)]
        urls = [
            f"{(await stack.enter_async_context(Upstream(engine))).url}/v1" for engine in engines
        ]
        running = serve_models(
            folder, {"m": urls}, OWNER, FITSERVE_API_KEY=OTHER, FITSERVE_WORKERS=str(WORKERS)
        )
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            yield gateway
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)


async def deaths(folder: Path, chance: random.Random) -> None:
    """Kill one worker after the other, each when all are there."""
    for _ in range(DEATHS):
        async with asyncio.timeout(hang_s()):
            while len(pids := await asyncio.to_thread(worker_pids, folder / "data")) < WORKERS:
                await asyncio.sleep(0.05)
        await asyncio.sleep(chance.uniform(0.05, 0.3))
        os.kill(chance.choice(pids), signal.SIGKILL)


class Answers:
    """The answers that came over one connection, in order, the last one perhaps broken off."""

    def __init__(self) -> None:
        self.bodies: list[bytearray] = []
        self.ended = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.bodies.append(bytearray())

    def on_body(self, data: bytes) -> None:
        self.bodies[-1] += data

    def on_message_complete(self) -> None:
        self.ended += 1


def request(token: bytes) -> bytes:
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % token
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer"
        f" {OTHER}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(
    gateway: Served, chance: random.Random, tokens_left: list[int], counts: Counter[str]
) -> None:
    """Connections one after the other, some with several requests at once, some left in the middle
    of an answer."""
    while tokens_left[0] > 0:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        except OSError:
            continue
        with contextlib.suppress(ConnectionError):
            for _ in range(chance.randrange(1, 30)):
                tokens = [new_token() for _ in range(chance.choice((1, 1, 1, 2, 3)))]
                tokens_left[0] -= len(tokens)
                answers = Answers()
                writer.write(b"".join(map(request, tokens)))
                leaves = chance.random() < 0.05
                while answers.ended < len(tokens) and not (leaves and answers.bodies):
                    data = await asyncio.wait_for(reader.read(65536), hang_s())
                    if not data:
                        break
                    answers.feed(data)
                for token, body in zip(tokens, answers.bodies, strict=False):
                    body_tokens = set(TOKEN.findall(body))
                    counts["crossed"] += bool(body_tokens - {token})
                    counts["own"] += body_tokens == {token}
                if answers.ended < len(tokens):
                    counts["broken off"] += 1
                    break
        writer.close()


async def test_each_answer_reaches_its_own_client_despite_deaths(tmp_path: Path) -> None:
    async with gateway_of_workers(tmp_path) as gateway:
        tokens_left, counts = [TOKENS], Counter[str]()
        clients = asyncio.gather(
            *(ask(gateway, random.Random(seed), tokens_left, counts) for seed in range(CLIENTS))
        )
        await deaths(tmp_path, random.Random(1))
        await clients
    sys.stdout.write(f"{dict(counts)}\n")
    assert not counts["crossed"], counts
    assert counts["own"] > TOKENS / 2, counts


async def owns(
    client: httpx.AsyncClient,
    key: str,
    secrets: dict[str, set[bytes]],
    ids_by_key: dict[str, list[str]],
) -> Counter[str]:
    """Makes a response, goes on from one of its own, and tries those of the other keys. Returns the
    outcome."""
    counts: Counter[str] = Counter()

    async def send(method: str, path: str, body: Any = None) -> httpx.Response | None:
        try:
            return await client.request(method, path, json=body, headers=bearer(key))
        except httpx.TransportError:
            counts["broken off"] += 1
            return None

    secret = new_token()
    secrets[key].add(secret)
    before = ids_by_key[key][-1:]
    fields = {"previous_response_id": before[0]} if before else {}
    answer = await send("POST", "/v1/responses", {"model": "m", "input": secret.decode(), **fields})
    if answer is not None:
        assert answer.status_code == 200, answer.text
        ids_by_key[key].append(answer.json()["id"])
        assert set(TOKEN.findall(answer.content)) <= secrets[key]
        counts["made"] += 1
    for id_ in ids_by_key[key][-1:]:
        answer = await send("GET", f"/v1/responses/{id_}")
        if answer is not None:
            assert answer.status_code == 200, answer.text
            assert set(TOKEN.findall(answer.content)) <= secrets[key]
            counts["own"] += 1
    for id_ in [ids[-1] for owner, ids in ids_by_key.items() if owner != key and ids]:
        body = {"model": "m", "input": secret.decode(), "previous_response_id": id_}
        for answer in (
            await send("GET", f"/v1/responses/{id_}"),
            await send("POST", "/v1/responses", body),
        ):
            if answer is not None:
                assert answer.status_code == 404, answer.text
                assert not TOKEN.findall(answer.content), answer.text
                counts["refused"] += 1
    return counts


async def test_a_key_sees_its_own_responses_alone_despite_deaths(tmp_path: Path) -> None:
    async with (
        gateway_of_workers(tmp_path) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=hang_s(), trust_env=False) as client,
    ):
        keys = [OWNER, OTHER]
        for number in range(2):
            answer = await client.post(
                "/admin/keys", json={"name": f"k{number}"}, headers=bearer(OWNER)
            )
            keys.append(answer.json()["key"])
        foreign_ids: dict[str, set[bytes]] = {key: set() for key in keys}
        ids_by_key: dict[str, list[str]] = {key: [] for key in keys}
        dying = asyncio.create_task(deaths(tmp_path, random.Random(2)))

        async def use(key: str) -> Counter[str]:
            counts: Counter[str] = Counter()
            while not dying.done() or not (counts["own"] and counts["refused"]):
                counts += await owns(client, key, foreign_ids, ids_by_key)
            return counts

        use_counts = sum(await asyncio.gather(*map(use, keys)), Counter[str]())
        await dying
    sys.stdout.write(f"{dict(use_counts)}\n")
    assert use_counts["own"] > len(keys), use_counts
