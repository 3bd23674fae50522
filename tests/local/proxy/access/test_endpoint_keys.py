"""An endpoint that wants a key: a whole gateway in front of an engine that looks at each request's
key."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.proxy.access.endpoint_keys import FOLDER
from gateway.store.backup import write_backup
from tests.support.log_lines import capture_logs
from tests.support.patience import hang_s
from tests.support.running import Running, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

KEY, OTHER, CLIENTS = "sk-endpoint-canary-1", "sk-endpoint-canary-2", "sk-clients-own-canary"
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


class Door:
    """Takes one key at a time, and refuses another one with the words of `words`."""

    def __init__(
        self, key: str, words: Callable[[str], str] = lambda _: "That is not a key of ours."
    ) -> None:
        self.key = key
        self.words = words

    async def __call__(self, call: Call) -> None:
        key = call.headers.get("authorization", "").removeprefix("Bearer ")
        if key != self.key:
            text = json.dumps(
                {
                    "error": {
                        "message": self.words(key),
                        "type": "invalid_request_error",
                        "code": "bad",
                    }
                }
            )
            await call.reply(text.encode(), "401 Unauthorized")
        elif call.head[0].startswith(b"GET"):
            await call.reply(json.dumps({"object": "list", "data": [{"id": "m"}]}).encode())
        else:
            await call.reply(json.dumps({"choices": [{"message": {"content": "hello"}}]}).encode())


def write_key(folder: Path, key: str) -> None:
    place = folder / "data" / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    # The change is one step: a reader in between finds one key or the other.
    draft = place.with_name("draft")
    draft.write_text(f"{key}\n")
    draft.replace(place / "laid-1")


async def detail_with(gateway: Running, words: str) -> str:
    """The detail of the model's state once it has these words."""
    async with asyncio.timeout(hang_s()):
        while words not in (detail := str((await gateway.show("m"))["detail"])):
            await asyncio.sleep(0.02)
    return detail


async def add_model(gateway: Running, url: str, **fields: Any) -> None:
    answer = await gateway.client.post(
        "/admin/models",
        json={"name": "m", "endpoint": url, "endpoint_key": "file:laid-1", **fields},
    )
    assert answer.status_code == 202, answer.text


async def send_request(gateway: Running) -> tuple[int, str]:
    answer = await gateway.client.post(
        CHAT, json=BODY, headers={"authorization": f"Bearer {CLIENTS}", "x-api-key": CLIENTS}
    )
    return answer.status_code, answer.text


async def test_the_key_goes_with_every_request_to_the_endpoint_and_nowhere_else(
    tmp_path: Path,
) -> None:
    write_key(tmp_path, KEY)

    async def leads_elsewhere(call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            await call.reply(b'{"data": [{"id": "m"}]}')
        else:
            await call.reply(
                b"", "307 Temporary Redirect", f"location: {other_upstream.url}{CHAT}\r\n"
            )

    async with (
        running(tmp_path, healthy) as gateway,
        Upstream(Door(KEY)) as engine,
        Upstream(Door(KEY)) as other_upstream,
    ):
        await add_model(gateway, engine.url)
        await gateway.until("m", "ready")
        assert (await send_request(gateway))[0] == 200
        stream_answer = await gateway.client.post(CHAT, json={**BODY, "stream": True})
        assert stream_answer.status_code == 200
        heads = [request.partition(b"\r\n\r\n")[0].lower() for request in engine.requests]
        assert {head.split()[1] for head in heads} == {b"/v1/models", CHAT.encode()}
        assert all(head.count(b"\r\nauthorization: bearer " + KEY.encode()) == 1 for head in heads)
        assert not any(CLIENTS.encode() in request for request in engine.requests)
        assert (await gateway.client.delete("/admin/models/m")).status_code == 202
        await gateway.wait_until_gone("m")
        async with Upstream(leads_elsewhere) as target:
            await add_model(gateway, target.url)
            await gateway.until("m", "ready")
            assert (await send_request(gateway))[0] == 502
        assert other_upstream.calls == []


@pytest.mark.parametrize("echoes", [False, True])
async def test_a_key_that_is_refused_is_reported_in_words_and_never_shown(
    tmp_path: Path, echoes: bool
) -> None:
    door = Door(
        KEY,
        (
            (lambda key: f"Incorrect API key provided: {key}.")
            if echoes
            else (lambda _: "That is not a key of ours.")
        ),
    )
    with capture_logs() as logs:
        async with running(tmp_path, healthy, access_log=True) as gateway, Upstream(door) as engine:
            url = engine.url
            await add_model(gateway, url)
            states = [
                await detail_with(
                    gateway, f"the key for {url} cannot be read: its file: No such file"
                )
            ]
            write_key(tmp_path, OTHER)
            states.append(
                await detail_with(
                    gateway,
                    f"{url} refused the key: "
                    + ("it answers 401" if echoes else "That is not a key of ours."),
                )
            )
            status, text = await send_request(gateway)
            assert (status, "refused the key" in text) == (503, True)
            states.append(text)
            write_key(tmp_path, KEY)
            await gateway.until("m", "ready")
            assert (await send_request(gateway))[0] == 200
            # The endpoint's key is another one: until that is noticed, clients hear that it is not
            # theirs.
            door.key = "sk-something-else"
            status, text = await send_request(gateway)
            assert status in (502, 503)
            states.append(text)
            await gateway.until("m", "unreachable")
            write_key(tmp_path, door.key)
            await gateway.until("m", "ready")
            assert (await send_request(gateway))[0] == 200
            # And back, in the middle of a client's connection.
            door.key, before = KEY, len(engine.requests)
            async with asyncio.timeout(hang_s()):
                while (answer := await send_request(gateway))[0] == 200:
                    await asyncio.sleep(0)
            assert len(engine.requests) > before
            states.append(answer[1])
            states += [
                (await gateway.client.get(path)).text
                for path in (
                    "/admin/models",
                    "/admin/models/m",
                    "/admin/events?follow=false",
                    "/v1/models",
                    "/metrics",
                )
            ]
            view = await gateway.show("m")
            assert view["wish"]["endpoint_key"] == "file:laid-1"
            backup = tmp_path / "backup"
            with backup.open("wb") as into:
                await asyncio.to_thread(write_backup, tmp_path / "data", into, "0")
    places = {
        path.name: path.read_bytes() for path in (tmp_path / "data").iterdir() if path.is_file()
    }
    assert "fitserve.db" in places
    everything = "\n".join([*states, repr(logs), *(repr(content) for content in places.values())])
    for secret in (KEY, OTHER, "sk-something-else", CLIENTS):
        assert secret not in everything
    # Its place is for the operator of the gateway.
    assert not any("laid-1" in text for text in states[:5])


async def test_a_503_tells_where_nothing_is_and_a_variable_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, healthy) as gateway, Upstream(Door(KEY)) as engine:
        name = "FITSERVE_ENDPOINT_KEY_LAB"
        await add_model(gateway, engine.url, endpoint_key=f"env:{name}")
        await detail_with(gateway, "cannot be read: the variable is not set")
        status, text = await send_request(gateway)
        assert (status, name in text) == (503, False)
        monkeypatch.setitem(os.environ, name, KEY)
        await gateway.until("m", "ready")
        # Another place for the key, in the middle of traffic: nobody waits for the look at it.
        write_key(tmp_path, KEY)
        response = await gateway.client.patch(
            "/admin/models/m", json={"endpoint_key": "file:laid-1"}
        )
        assert (response.status_code, response.json()["restarts_engines"]) == (200, False)
        assert response.json()["wish"] == [
            {"field": "endpoint_key", "former": f"env:{name}", "present": "file:laid-1"}
        ]
        for _ in range(20):
            assert (await send_request(gateway))[0] == 200
        assert (
            await gateway.client.patch("/admin/models/m", json={"endpoint_key": None})
        ).status_code == 200
        await detail_with(gateway, "answers 401: it needs a key, and the model has no endpoint_key")


async def test_a_key_itself_is_refused_and_not_repeated(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        for body in (
            {"endpoint": "http://h:1/v1", "endpoint_key": KEY},
            {"source": "/m", "endpoint_key": "file:laid-1"},
        ):
            answer = await gateway.client.post("/admin/models", json={"name": "m", **body})
            assert answer.status_code == 400, answer.text
            assert KEY not in answer.text
            assert answer.json()["error"]["param"] == "endpoint_key"
