"""Random secrets in every setting, wish and header that takes one, and all that a gateway writes
afterwards."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.patience import Patience, hang_s
from tests.support.served import serve_models
from tests.support.upstream import Call, Upstream

# Letters of regular expressions and of URLs that a header takes behind `Bearer `.
VISIBLE = "".join(chr(number) for number in range(0x21, 0x7F))
ALPHABETS = (string.ascii_letters + string.digits, ".*+?()[]{}|^$\\", "%+/=&;:@", VISIBLE)
PART = 10


def plant_secret(chance: random.Random, length: int = 40, letters: str = "") -> str:
    return "".join(chance.choices(letters or chance.choice(ALPHABETS), k=length))


def forms(secret: str) -> Iterator[bytes]:
    """The secret as formats write it, whole and in its first and last characters."""
    for part in (secret, secret[:PART], secret[-PART:]):
        for text in (part, repr(part)[1:-1], json.dumps(part)[1:-1], quote(part, safe="")):
            yield text.encode()
    yield base64.b64encode(f"user:{secret}".encode())


async def refuse(call: Call) -> None:
    """An endpoint that repeats the refused request, in a text that is cut, or lists its models."""
    header = call.headers.get("authorization", "")
    if header.startswith("Bearer ") and "refused" in call.requests[-1].decode("latin-1"):
        body = json.dumps({"error": {"message": f"{'x' * 50} the key {header[7:]} is unknown"}})
        await call.reply(body.encode(), "401 Unauthorized")
    else:
        await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')


def settings(chance: random.Random) -> tuple[dict[str, str], list[str]]:
    """Settings with secrets, and the secrets."""
    secrets = {
        name: plant_secret(chance)
        for name in ("admin", "api", "token", "path", "query", "lab", "user")
    }
    secrets["path"], secrets["query"] = (plant_secret(chance, 40, ALPHABETS[0]) for _ in range(2))
    secrets["user"] = plant_secret(chance, 40, ALPHABETS[0])
    signing = base64.b64encode(chance.randbytes(32)).decode()
    variables = {
        "FITSERVE_API_KEY": secrets["api"],
        "FITSERVE_HF_TOKEN": secrets["token"],
        "FITSERVE_HF_ENDPOINT": f"http://me:{secrets['user']}@127.0.0.1:9",
        "FITSERVE_WEBHOOK": f"http://127.0.0.1:9/{secrets['path']}?k={secrets['query']}",
        "FITSERVE_WEBHOOK_SECRET": f"whsec_{signing}",
        "FITSERVE_ENDPOINT_KEY_LAB": secrets["lab"],
        "FITSERVE_ACCESS_LOG": "true",
        "FITSERVE_LOG_LEVEL": "debug",
    }
    return variables | {"admin": secrets["admin"]}, [*secrets.values(), signing]


def calls(chance: random.Random, admin: str, url: str) -> Iterator[tuple[Any, list[str]]]:
    """Requests with secrets where users put them by mistake, and these secrets."""
    bearer = {"authorization": f"Bearer {admin}"}
    secret = plant_secret(chance)
    wishes: list[dict[str, Any]] = [
        {"endpoint": f"http://user:{quote(secret, safe='')}@127.0.0.1:9/v1"},
        {"endpoint": "http://127.0.0.1:9/v1", "endpoint_key": secret},
        {"endpoint": "http://127.0.0.1:9/v1", "endpoint_key": [secret]},
        {"source": "org/name", "env": {"HF_TOKEN": secret}},
        {"source": "org/name", "flags": {"hf-token": secret}},
        {"source": "org/name", "flags": {"api-key": secret}},
    ]
    for wish in wishes:
        yield ("POST", "/admin/models", bearer, {"name": "w", **wish}), [secret]
    yield (
        ("POST", "/admin/plan", bearer, {"source": "org/name", "env": {"HF_TOKEN": secret}}),
        [secret],
    )
    basic = base64.b64encode(f"user:{secret}".encode()).decode()
    for headers in (
        {"authorization": f"Basic {basic}"},
        {"authorization": f"Bearer {secret}"},
        {"authorization": secret},
        {"x-api-key": secret},
        {**bearer, "cookie": f"session={quote(secret, safe='')}"},
        {**bearer, "proxy-authorization": f"Basic {basic}"},
    ):
        for path in ("/v1/models", "/admin/models", "/metrics", "/healthz", "/nowhere"):
            yield ("GET", path, headers, None), [secret, basic]
        chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        yield ("POST", "/v1/chat/completions", headers, chat), [secret, basic]
    key = {"name": "lab", "endpoint": f"{url}/refused/v1", "endpoint_key": _LAB}
    yield ("POST", "/admin/models", bearer, key), []


_LAB = "env:FITSERVE_ENDPOINT_KEY_LAB"
SHOWN = ("models", "models/lab", "keys", "facts", "events?follow=false", "usage", "requests")


def use(folder: Path, url: str, seed: int) -> tuple[list[str], dict[str, bytes]]:
    """Use a gateway with secrets: these, and all that was written."""
    chance = random.Random(seed)
    variables, secrets = settings(chance)
    admin = variables.pop("admin")
    content_by_place: dict[str, bytes] = {}
    with (
        serve_models(folder, {"m": [f"{url}/v1"]}, admin, **variables) as gateway,
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=hang_s()) as client,
    ):
        for number, ((method, path, headers, body), answer_secrets) in enumerate(
            calls(chance, admin, url)
        ):
            answer = client.request(method, path, headers=headers, json=body)
            content_by_place[f"{number} {method} {path}"] = (
                answer.content + str(answer.headers).encode()
            )
            secrets += answer_secrets
        bearer = {"authorization": f"Bearer {admin}"}
        patience = Patience()
        while "refused the key" not in client.get("/admin/models/lab", headers=bearer).text:
            assert not patience.is_over()
            time.sleep(patience.pause_s(0.05))
        key = client.post("/admin/keys", json={"name": "made"}, headers=bearer).json()["key"]
        for path in (*(f"/admin/{name}" for name in SHOWN), "/metrics", "/v1/models"):
            answer = client.get(path, headers=bearer)
            assert answer.status_code == 200, path
            content_by_place[path] = answer.content
        content_by_place["backup"] = client.get("/admin/backup", headers=bearer).content
    for path in folder.rglob("*"):
        if path.is_file():
            content_by_place[str(path.relative_to(folder))] = path.read_bytes()
    return [*secrets, key], content_by_place


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(2))
async def test_no_planted_secret_is_written_anywhere(tmp_path: Path, seed: int) -> None:
    async with Upstream(refuse) as upstream:
        secrets, content_by_place = await asyncio.to_thread(use, tmp_path, upstream.url, seed)
    assert {"gateway.log", "data/fitserve.db", "/metrics", "/admin/models/lab"} <= set(
        content_by_place
    )
    leaks = [
        (secret, form, place)
        for secret in secrets
        for form in set(forms(secret))
        for place, content in content_by_place.items()
        if form in content
    ]
    assert not leaks
