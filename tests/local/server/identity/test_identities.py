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
from gateway.server.identity.identities import person_allowance
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


@pytest.mark.anyio
@pytest.mark.parametrize("workers", [0, 2])
async def test_wrong_keys_count_for_the_client_that_the_proxy_states(
    tmp_path: Path, workers: int
) -> None:
    """Guesses of one person must not lock out all others behind the same proxy."""
    settings = {"FITSERVE_PROXY_ADDRESSES": "127.0.0.1"}
    settings |= {"FITSERVE_PROXY_CLIENT_HEADER": "X-Forwarded-For"}
    if workers:
        settings["FITSERVE_WORKERS"] = str(workers)
    with serve_models(tmp_path, {}, ADMIN, **settings) as served:
        async with httpx.AsyncClient(
            base_url=served.url, trust_env=False, timeout=hang_s()
        ) as client:

            async def guess(path: str, forwarded: str) -> int:
                headers = {"authorization": "Bearer wrong", "x-forwarded-for": forwarded}
                return (await client.get(path, headers=headers)).status_code

            cases = {"/admin/models": "192.0.2.1", "/v1/models": "192.0.2.2"}
            for path, client_address in cases.items():
                statuses = [
                    await guess(path, f"198.51.100.{number}, {client_address}")
                    for number in range(12)
                ]
                assert statuses == [401] * 10 + [429] * 2
                assert await guess(path, f"{client_address}, 192.0.2.9{path.count('v')}") == 401


@pytest.mark.anyio
async def test_an_untrusted_address_states_no_client(tmp_path: Path) -> None:
    settings = {"proxy_addresses": "10.9.8.7", "proxy_client_header": "X-Forwarded-For"}
    async with gateway(tmp_path, **settings) as (server, _):
        statuses = []
        for number in range(12):
            headers = {"authorization": "Bearer wrong", "x-forwarded-for": f"192.0.2.{number}"}
            path = "/v1/models" if number % 2 else "/admin/models"
            statuses.append((await server.client.get(path, headers=headers)).status_code)
        assert statuses == [401] * 10 + [429] * 2


def test_a_header_of_clients_without_a_proxy_is_refused(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "proxy_client_header": "X-Forwarded-For"}
    )
    with pytest.raises(SettingsError, match="no address may send it"):
        create_app(settings)


CHAT = "/v1/chat/completions"


@pytest.mark.anyio
async def test_people_have_a_budget_each_and_share_those_of_their_groups(tmp_path: Path) -> None:
    """Each answer has 50 tokens."""
    settings = PROXY | {"roles": "inference=*", "person_budget": "tokens_per_day=100"}
    async with gateway(tmp_path, **settings) as (server, _):

        async def chat(headers: dict[str, str]) -> httpx.Response:
            key = (await page_key(server, headers))["key"]
            return await server.client.post(
                CHAT,
                json={"model": "a", "messages": []},
                headers={"authorization": f"Bearer {key}"},
            )

        rob = {"remote-user": "rob"}
        assert [(await chat(rob)).status_code for _ in range(3)] == [200, 200, 429]
        refusal = (await chat(rob)).json()["error"]["message"]
        assert "The user rob has used its 100 tokens of this day" in refusal
        assert "FITSERVE_PERSON_BUDGET" in refusal
        budget = {"requests_per_day": 2}
        answer = await server.client.put("/admin/key-groups/staff", json=budget)
        assert answer.status_code == 200, answer.text
        people = [{"remote-user": name, "remote-groups": "staff"} for name in ("sue", "tim", "uma")]
        answers = [await chat(person) for person in people]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert "group staff" in answers[-1].json()["error"]["message"]


@pytest.mark.parametrize(
    "budget", ["tokens_per_week=5", "tokens_per_day=none", {"is_soft": "maybe"}], ids=str
)
def test_a_budget_of_people_that_is_none_is_refused(tmp_path: Path, budget: object) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path, "person_budget": budget})
    with pytest.raises(SettingsError, match="FITSERVE_PERSON_BUDGET"):
        person_allowance(settings)
