"""The callers that get in: the matrix of scopes, tricks with paths and hosts, guesses, and secrets
that must not be found anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.proxy.access.scopes import SCOPES
from tests.support.key_gateway import gateway, make, unused_script
from tests.support.patience import hang_s
from tests.support.running import Running, running
from tests.support.served import serve_models
from tests.support.upstream import Call, Upstream
from tests.unit.test_security import ADMIN, COLUMNS, routes, told_in_documents

# --- S2: keys ---


# --- S3: scopes ---


API = "an-inference-key-of-this-test"


async def knock(gateway: Running, key: str | None, method: str, path: str) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # Its head alone: some answers have no end.
    async with gateway.client.stream(method, path, headers=headers) as answer:
        return answer.status_code


@pytest.mark.anyio
async def test_s3_each_scope_opens_its_routes_and_no_others(tmp_path: Path) -> None:
    """Every cell of the table in docs/keys.md is asked of the gateway that runs."""
    async with running(tmp_path, unused_script, admin_key=ADMIN, api_key=API) as gateway:
        gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
        scopes: tuple[Any, ...] = ("inference", "read", "admin")
        keys: dict[str, list[str | None]] = {
            scope: [await make(gateway, f"key-{scope}", scopes=[scope])] for scope in scopes
        }
        keys["inference"].append(API)
        keys["admin"].append(ADMIN)
        del gateway.client.headers["authorization"]
        table = told_in_documents()
        assert len(table) > len(SCOPES)
        for call, *cells in table:
            method, _, path = call.partition(" ")
            target = (
                path.replace("{name}", "nobody")
                .replace("{number}", "99")
                .replace("{id}", "resp_x")
                .replace(" ", "-")
            )
            for column, expected_answer in zip(COLUMNS, cells, strict=True):
                for key in keys.get(column, [None]):
                    status = await knock(gateway, key, method, target)
                    assert (
                        "yes" if status not in (401, 403) else str(status)
                    ) == expected_answer, (
                        call,
                        column,
                        status,
                    )
        # A method that a route does not take is not a route.
        assert [
            await knock(gateway, keys[scope][0], "PATCH", "/admin/models") for scope in scopes
        ] == [
            403,
            403,
            405,
        ]


@pytest.mark.anyio
async def test_s11_without_a_key_only_health_answers_and_tells_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script, admin_key=ADMIN) as gateway:
        answers = {}
        for method, path in routes():
            answer = await gateway.client.request(method, path)
            answers[path] = answer
            assert (answer.status_code == 401) == (SCOPES.get((method, path)) != "open"), (
                method,
                path,
            )
            assert "server" not in answer.headers
            assert not re.search(
                r"\d+\.\d+\.\d+|uvicorn|fastapi|starlette",
                answer.text + str(answer.headers),
                re.IGNORECASE,
            )
        assert answers["/healthz"].json() == {"status": "ok"}
        assert answers["/readyz"].json() == {"status": "ok", "problems": []}


# --- S4: paths and hosts ---


async def raw(port: int, data: bytes) -> int:
    """The status that these bytes get."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        line = await asyncio.wait_for(reader.readline(), hang_s())
        return int(line.split()[1])
    finally:
        writer.close()


TARGETS = [
    b"/admin/models",
    b"//admin/models",
    b"/%61dmin/models",
    b"/admin%2fmodels",
    b"/admin%2Fmodels",
    b"/v1/../admin/models",
    b"/v1/%2e%2e/admin/models",
    b"/v1/models/../../admin/models",
    b"/healthz/../admin/models",
    b"/healthz/%2e%2e/admin/models",
    b"/healthz;/../admin/models",
    b"/healthz%2f..%2fadmin%2fmodels",
    b"/admin/models;x=/healthz",
    b"/admin/models?x=/healthz",
    b"/admin/models%3f/healthz",
    b"/admin/models/",
    b"/admin/models%00",
    b"/./admin/models",
    b"http://x/admin/models",
    b"http://x/healthz/../admin/models",
    b"http://x@y/admin/models",
    b"*",
    b"/ADMIN/models",
    b"/admin/models#/healthz",
    b"/metrics",
    b"/metrics/",
    b"//metrics",
    b"/metrics;a",
    b"/admin/keys",
    b"/admin/keys/",
    b"/%2e/admin/keys",
]


@pytest.mark.anyio
async def test_s4_no_spelling_of_a_path_or_host_gains_a_scope(tmp_path: Path) -> None:
    assert tuple(map(int, version("starlette").split(".")[:3])) >= (1, 0, 1)
    async with running(tmp_path, unused_script, admin_key=ADMIN) as gateway:
        gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
        api = await make(gateway, "api-1")
        port = int(gateway.url.rpartition(":")[2])
        for key in (b"", b"authorization: Bearer " + api.encode() + b"\r\n"):
            for target in TARGETS:
                reply = await raw(port, b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (target, key))
                assert reply in (400, 401, 403, 404), (target, key, reply)
            for host in (
                b"x/healthz?",
                b"x#",
                b"x/healthz",
                b"x?/healthz",
                b"healthz@x",
                b"x:80/healthz",
                b"localhost",
            ):
                reply = await raw(
                    port, b"GET /admin/models HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (host, key)
                )
                assert reply in (400, 401, 403), (host, reply)
            for extra in (
                b"x-original-url: /healthz",
                b"x-rewrite-url: /healthz",
                b"x-forwarded-prefix: /healthz",
                b"x-http-method-override: GET",
            ):
                reply = await raw(
                    port, b"GET /admin/models HTTP/1.1\r\nhost: x\r\n%b\r\n%b\r\n" % (extra, key)
                )
                assert reply in (401, 403), (extra, reply)


# --- S13: browsers ---


@pytest.mark.anyio
async def test_s13_other_origins_are_told_nothing_and_cookies_count_for_nothing(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, unused_script, admin_key=ADMIN) as gateway:
        ask = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        good = {"authorization": f"Bearer {ADMIN}", "origin": "https://evil.example"}
        for path in ("/admin/models", "/v1/chat/completions", "/metrics", "/healthz", "/v1/models"):
            for answer in (
                await gateway.client.options(path, headers=ask),
                await gateway.client.options(path, headers=ask | good),
                await gateway.client.get(path, headers=good),
            ):
                assert not [name for name in answer.headers if name.startswith("access-control")]
                assert "set-cookie" not in answer.headers
        for cookie in (f"authorization=Bearer {ADMIN}", f"key={ADMIN}", f"token={ADMIN}"):
            assert (
                await gateway.client.get("/admin/models", headers={"cookie": cookie})
            ).status_code == 401
        for query in (f"key={ADMIN}", f"access_token={ADMIN}", f"token={ADMIN}"):
            assert (await gateway.client.get(f"/admin/models?{query}")).status_code == 401
        # A page cannot send a form: it needs a body in JSON.
        response = await gateway.client.post("/admin/models", data={"name": "a"}, headers=good)
        assert response.status_code == 400


@pytest.mark.anyio
async def test_s13_no_get_changes_anything(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        await make(server, "app")

        def stored_rows() -> list[Any]:
            with contextlib.closing(sqlite3.connect(tmp_path / "data" / "fitserve.db")) as db:
                return [
                    db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
                    for table in ("models", "attempts", "facts", "keys")
                ]

        rows_before = stored_rows()
        assert rows_before[0]
        assert rows_before[3]
        for method, path in routes():
            if method in ("GET", "HEAD"):
                await knock(server, None, method, path.replace("{name:path}", "a"))
        assert stored_rows() == rows_before


# --- S14: guesses ---


@pytest.mark.anyio
async def test_s14_good_clients_beside_a_guesser_are_not_affected(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        app = await make(server, "app")
        statuses = [
            await knock(server, f"guess-{number}", "GET", "/v1/models") for number in range(15)
        ]
        statuses += [
            await knock(server, f"guess-{number}", "GET", "/admin/models") for number in range(5)
        ]
        assert statuses == [401] * 10 + [429] * 10
        response = await server.client.get("/v1/models", headers={"authorization": "Bearer guess"})
        assert 0 < int(response.headers["retry-after"]) <= 60
        # From the same address: a key that was made cannot be guessed, the admin's was used before;
        # no key is not a guess.
        assert await knock(server, app, "GET", "/v1/models") == 200
        # The client's own header has the admin key.
        assert await knock(server, None, "GET", "/admin/models") == 200
        async with httpx.AsyncClient(
            base_url=server.url, trust_env=False, timeout=hang_s()
        ) as stranger:
            assert (await stranger.get("/v1/models")).status_code == 401


# --- S10: secrets ---

CANARIES = {
    name: f"canary-{name}-7f3a9c"
    for name in ("admin", "api", "hf", "prompt", "answer", "wrong", "query")
}


@pytest.mark.anyio
async def test_s10_secrets_are_found_nowhere(tmp_path: Path) -> None:
    """Keys, the token for downloads and prompts: not in the log (the access log is on, at debug),
    the database, the files, the metrics, the errors, nor in the headers that engines get."""

    async def script(call: Call) -> None:
        if call.requests[-1].startswith(b"GET"):
            await call.reply(
                json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
            )
        elif b"break" in call.body:
            await call.start()
            await call.chunk(b"data: " + CANARIES["answer"].encode() + b"\n\n")
            call.close()
        else:
            await call.reply(
                json.dumps({"choices": [{"message": {"content": CANARIES["answer"]}}]}).encode()
            )

    extra = {
        "FITSERVE_API_KEY": CANARIES["api"],
        "FITSERVE_HF_TOKEN": CANARIES["hf"],
        "FITSERVE_ACCESS_LOG": "true",
    }
    extra["FITSERVE_LOG_LEVEL"] = "debug"
    async with Upstream(script) as upstream:
        key, answers = await asyncio.to_thread(_talk, tmp_path, upstream.url, extra)
        heads = [request.partition(b"\r\n\r\n")[0] for request in upstream.requests]
    secrets = [*CANARIES.values(), key, key.removeprefix("fs-")]
    assert len(heads) > 3
    places = await asyncio.to_thread(
        lambda: {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    )
    assert {"gateway.log", "fitserve.db", "keys.json"} <= set(places)
    assert b'"outcome":"broken"' in places["gateway.log"]
    places |= {f"told {number}": text for number, text in enumerate(answers)}
    places |= {f"engine {number}": head for number, head in enumerate(heads)}
    for secret in secrets:
        assert [name for name, content in places.items() if secret.encode() in content] == [], (
            secret
        )


Request = tuple[str, str, dict[str, str], Any]


def bad_requests(words: list[dict[str, str]]) -> list[Request]:
    """(method, path, headers, body) of requests with wrong keys or bodies, and of lists, whose
    answers could repeat a secret."""
    chat, messages, wrong = "/v1/chat/completions", "/v1/messages", CANARIES["wrong"]
    admin, api = ({"authorization": f"Bearer {CANARIES[name]}"} for name in ("admin", "api"))
    query = CANARIES["query"]
    good_body = {"model": "m", "messages": words}
    return [
        ("POST", chat, {"authorization": f"Bearer {wrong}"}, good_body),
        ("POST", chat, {"authorization": f"Basic {wrong}"}, good_body),
        ("POST", chat, {"x-api-key": wrong}, good_body),
        ("POST", chat, api, {"messages": words}),
        ("POST", chat, api, {"model": 5, "messages": words}),
        ("POST", chat, api, {"model": "none", "messages": words}),
        ("POST", messages, api, {"model": "none", "messages": words}),
        ("POST", messages, {"x-api-key": wrong}, good_body),
        ("GET", f"/admin/models?key={query}", {}, None),
        ("GET", f"/v1/models?key={query}", {}, None),
        ("GET", "/admin/models", api, None),
        ("GET", "/admin/models", admin, None),
        ("GET", "/admin/models/m", admin, None),
        ("GET", "/admin/keys", admin, None),
        ("GET", "/admin/facts", admin, None),
        ("GET", "/metrics", admin, None),
    ]


def _talk(folder: Path, url: str, extra: dict[str, str]) -> tuple[str, list[bytes]]:
    """Uses a gateway well and badly; the key that was made there, and its answers beside those of
    the engine."""
    words = [{"role": "user", "content": CANARIES["prompt"]}]
    admin, api = ({"authorization": f"Bearer {CANARIES[name]}"} for name in ("admin", "api"))
    answers: list[bytes] = []
    with (
        serve_models(folder, {"m": [f"{url}/v1"]}, CANARIES["admin"], **extra) as gateway,
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=hang_s()) as client,
    ):
        key = str(client.post("/admin/keys", json={"name": "app"}, headers=admin).json()["key"])
        chat = "/v1/chat/completions"
        for headers in (admin, api, {"authorization": f"Bearer {key}"}):
            assert (
                client.post(
                    chat, json={"model": "m", "messages": words}, headers=headers
                ).status_code
                == 200
            )
        # A stream that breaks ends with its connection, which its head could not announce: the next
        # request is not to use it.
        closing_headers = api | {"connection": "close"}
        response = client.post(
            chat, json={"model": "m", "messages": words, "x": "break"}, headers=closing_headers
        )
        assert response.content.count(b"engine_error") == 1
        for method, path, headers, body in bad_requests(words):
            answer = client.request(method, path, headers=headers, json=body)
            answers.append(answer.content + str(answer.headers).encode())
        raw_body = f'{{"model": "m", "messages": "{CANARIES["prompt"]}'
        answers.append(client.post(chat, content=raw_body, headers=api).content)
        assert client.get("/metrics", headers=admin).status_code == 200
    return key, answers
