"""Callers by the header of a trusted proxy; over real sockets, where this machine is the proxy."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.errors import SettingsError
from gateway.server.app import create_app
from gateway.settings import Settings
from tests.support.key_gateway import ADMIN, gateway, unused_script
from tests.support.patience import Patience, hang_s
from tests.support.running import Running, running
from tests.support.served import serve_models

PROXY: dict[str, Any] = {
    "proxy_user_header": "Remote-User",
    "proxy_groups_header": "Remote-Groups",
    "proxy_addresses": "127.0.0.1",
    "roles": "admin=ann read=group:staff,rob inference=group:staff",
}
ANN = {"remote-user": "ann"}
STAFF = {"remote-user": "sue", "remote-groups": "x, staff"}


async def status(server: Running, method: str, path: str, headers: dict[str, str]) -> int:
    return (await server.client.request(method, path, headers=headers)).status_code


async def page_key(server: Running, headers: dict[str, str]) -> Any:
    answer = await server.client.post("/auth/token", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


@pytest.mark.anyio
async def test_roles_open_the_admin_api_to_the_users_of_a_proxy(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script, **PROXY) as server:
        rob = {"remote-user": "rob"}
        for headers, expected in ((ANN, (200, 200)), (STAFF, (200, 403)), (rob, (200, 403))):
            statuses = [
                await status(server, "GET", path, headers)
                for path in ("/admin/models", "/admin/keys")
            ]
            assert tuple(statuses) == expected
        nobody = await server.client.get("/admin/models", headers={"remote-user": "nobody"})
        assert nobody.status_code == 403
        assert "FITSERVE_ROLES" in nobody.json()["error"]["message"]


@pytest.mark.anyio
async def test_nothing_is_open_without_an_identity_or_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script, **PROXY) as server:
        for method, path in (
            ("GET", "/admin/models"),
            ("GET", "/metrics"),
            ("POST", "/admin/models"),
            ("GET", "/v1/models"),
            ("POST", "/auth/token"),
        ):
            assert await status(server, method, path, {}) == 401
        assert await status(server, "GET", "/healthz", {}) == 200
        ways = await server.client.get("/auth/ways")
        assert ways.json() == {"proxy": True, "login": False}


@pytest.mark.anyio
async def test_a_spoofed_header_is_refused_with_any_key(tmp_path: Path) -> None:
    settings = PROXY | {"proxy_addresses": "10.9.8.7,fd00::/8"}
    async with gateway(tmp_path, **settings) as (server, _):
        for extra in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": f"Bearer {ADMIN}"},
            {"x-forwarded-for": "10.9.8.7", "forwarded": "for=10.9.8.7", "x-real-ip": "10.9.8.7"},
            {"x-fitserve-client": "10.9.8.7"},
        ):
            for path in ("/admin/models", "/admin/keys"):
                assert await status(server, "GET", path, {**ANN, **extra}) == 403
            assert await status(server, "POST", "/auth/token", {**ANN, **extra}) == 403
        assert await status(server, "GET", "/admin/models", {}) == 200  # the admin key alone


@pytest.mark.anyio
async def test_a_key_decides_alone(tmp_path: Path) -> None:
    async with gateway(tmp_path, **PROXY) as (server, _):
        key = (await server.client.post("/admin/keys", json={"name": "app"})).json()["key"]
        for authorization, expected in ((f"Bearer {key}", 403), ("Bearer wrong", 401)):
            headers = {**ANN, "authorization": authorization}
            assert await status(server, "GET", "/admin/keys", headers) == expected


@pytest.mark.anyio
async def test_two_headers_of_a_name_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script, **PROXY) as server:
        for name in ("remote-user", "remote-groups"):
            twice = [("remote-user", "sue"), (name, "ann"), (name, "staff")]
            answer = await server.client.get("/admin/models", headers=twice)
            assert answer.status_code == 400
        assert await status(server, "GET", "/admin/models", {"remote_user": "ann"}) == 400


@pytest.mark.anyio
async def test_a_foreign_page_cannot_use_an_identity(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script, origins="https://app.example", **PROXY) as server:
        for extra in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"origin": "https://app.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            for method, path in (
                ("GET", "/admin/models"),
                ("POST", "/admin/models"),
                ("POST", "/auth/token"),
                ("POST", "/auth/logout"),
            ):
                assert await status(server, method, path, {**ANN, **extra}) == 403, (path, extra)
        own_page = {**ANN, "origin": server.url, "sec-fetch-site": "same-origin"}
        assert await status(server, "GET", "/admin/models", own_page) == 200


@pytest.mark.anyio
async def test_the_key_of_a_page_has_the_role_and_asks_models(tmp_path: Path) -> None:
    async with gateway(tmp_path, **PROXY) as (server, upstream):
        del server.client.headers["authorization"]
        token = await page_key(server, STAFF)
        assert (token["name"], token["scopes"]) == ("sue", ["inference", "read"])
        assert not token["can_sign_out"]
        headers = {"authorization": f"Bearer {token['key']}"}
        body = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}
        answer = await server.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert await status(server, "GET", "/admin/models", headers) == 200
        assert await status(server, "GET", "/admin/keys", headers) == 403
        sent = [call for call in upstream.requests if call.startswith(b"POST")][-1].lower()
        assert b"remote-user" not in sent
        assert token["key"].lower().encode() not in sent
        usage = await server.client.get("/admin/usage?by=key", headers=ANN)
        assert "user:sue" in usage.text


@pytest.mark.anyio
async def test_the_history_names_the_person(tmp_path: Path) -> None:
    async with gateway(tmp_path, **PROXY) as (server, _):
        del server.client.headers["authorization"]
        change = await server.client.patch("/admin/models/a", json={"aliases": ["x"]}, headers=ANN)
        assert change.status_code == 200
        rows = (await server.client.get("/admin/models/a/history", headers=ANN)).json()["data"]
        assert rows[0]["key"] == "user:ann"


@pytest.mark.anyio
async def test_a_stream_of_a_person_goes_on(tmp_path: Path) -> None:
    async with (
        running(tmp_path, unused_script, **PROXY) as server,
        server.client.stream("GET", "/admin/events", headers=ANN) as answer,
    ):
        assert answer.status_code == 200
        await page_key(server, STAFF)  # the keys change
        creation = await server.client.post("/admin/keys", json={"name": "app-1"}, headers=ANN)
        assert creation.status_code == 201, creation.text
        async for line in answer.aiter_lines():
            if "app-1" in line:
                return
    raise AssertionError("the stream ended")


@pytest.mark.anyio
async def test_a_stream_of_a_person_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server.identity.identities.TOKEN_S", 1.0)
    async with (
        running(tmp_path, unused_script, **PROXY) as server,
        asyncio.timeout(hang_s()),
        server.client.stream("GET", "/admin/events", headers=ANN) as answer,
    ):
        assert answer.status_code == 200
        async for _ in answer.aiter_lines():
            pass


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"proxy_addresses": ""}, "FITSERVE_PROXY_ADDRESSES"),
        ({"roles": {}}, "FITSERVE_ROLES"),
    ],
)
def test_half_of_the_settings_is_refused(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    settings = Settings(**{"data_dir": tmp_path, **PROXY, **fields})
    with pytest.raises(SettingsError, match=words):
        create_app(settings)


@pytest.mark.parametrize(
    "fields",
    [
        {"proxy_addresses": "0.0.0.0/0"},
        {"proxy_addresses": "::/0"},
        {"proxy_addresses": "proxy.example"},
        {"proxy_user_header": "Authorization"},
        {"proxy_user_header": "Remote_User"},
        {"roles": "owner=ann"},
        {"roles": "admin"},
    ],
)
def test_a_setting_that_would_trust_everybody_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Settings(**{**PROXY, **fields})


def test_a_gateway_without_identities_has_no_login(tmp_path: Path) -> None:
    async def ask() -> list[int]:
        async with running(tmp_path, unused_script, admin_key=ADMIN) as server:
            answers: list[httpx.Response] = [
                await server.client.request(method, path)
                for method, path in (
                    ("POST", "/auth/token"),
                    ("POST", "/auth/logout"),
                    ("GET", "/auth/login"),
                    ("GET", "/auth/callback"),
                )
            ]
            return [answer.status_code for answer in answers]

    assert asyncio.run(ask()) == [404] * 4


def test_workers_know_the_keys_of_pages_and_no_header(tmp_path: Path) -> None:
    environment = {
        "FITSERVE_WORKERS": "2",
        "FITSERVE_PROXY_USER_HEADER": "Remote-User",
        "FITSERVE_PROXY_ADDRESSES": "127.0.0.1",
        "FITSERVE_ROLES": "admin=ann",
    }
    with (
        serve_models(tmp_path, {}, **environment) as server,
        httpx.Client(base_url=server.url, timeout=hang_s(), trust_env=False) as client,
    ):
        assert client.get("/admin/models").status_code == 401
        assert client.get("/admin/models", headers=ANN).status_code == 200
        # Each connection may lead to another worker.
        for headers in ({}, ANN):
            for _ in range(8):
                answer = httpx.get(
                    f"{server.url}/v1/models", headers=headers, trust_env=False, timeout=hang_s()
                )
                assert answer.status_code in (401, 403)
        key = client.post("/auth/token", headers=ANN).json()["key"]
        headers = {"authorization": f"Bearer {key}"}
        patience = Patience()
        for _ in range(8):
            while (
                httpx.get(
                    f"{server.url}/v1/models", headers=headers, trust_env=False, timeout=hang_s()
                ).status_code
                != 200
            ):
                assert not patience.is_over()
                time.sleep(patience.pause_s(0.05))
