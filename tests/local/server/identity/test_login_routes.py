"""Logins at a real provider of OpenID Connect, over real sockets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("authlib", reason="needs the extra packages oidc")

from tests.contract.process_harness import free_port
from tests.support.key_gateway import ADMIN, unused_script
from tests.support.oidc_servers import real_provider
from tests.support.patience import hang_s
from tests.support.running import Running, running

pytestmark = pytest.mark.anyio

USERS: dict[str, dict[str, Any]] = {
    "ann": {"email": "ann@example.org", "email_verified": True, "groups": ["ops"]},
    "sue": {"email": "sue@example.org", "email_verified": True, "groups": ["staff"]},
    "eve": {"email": "ann@example.org", "email_verified": False},
    "dan": {"email": "dan@example.org", "email_verified": True},
}


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    with real_provider(USERS) as url:
        yield url


@contextlib.asynccontextmanager
async def gateway(tmp_path: Path, issuer: str, **changes: Any) -> AsyncIterator[Running]:
    port = free_port()
    settings: dict[str, Any] = {
        "port": port,
        "oidc_issuer": issuer,
        "oidc_client_id": "fitserve",
        "oidc_client_secret": "a-secret-of-the-client",
        "oidc_url": f"http://127.0.0.1:{port}",
        "roles": "admin=group:ops read=group:staff",
        "admin_key": ADMIN,
    }
    async with running(tmp_path, unused_script, **settings | changes) as server:
        yield server


@contextlib.asynccontextmanager
async def browser(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    """A client with cookies."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=hang_s()) as client:
        yield client


async def approve(client: httpx.AsyncClient, user: str) -> str:
    """The address to which the provider leads back after the login of a user."""
    begin = await client.get("/auth/login")
    assert begin.status_code == 302, begin.text
    answer = await client.post(begin.headers["location"], data={"sub": user})
    assert answer.status_code == 302, answer.text
    return answer.headers["location"]


async def sign_in(client: httpx.AsyncClient, user: str) -> httpx.Response:
    return await client.get(await approve(client, user))


async def test_a_person_signs_in_and_gets_the_scopes_of_the_role(
    tmp_path: Path, issuer: str
) -> None:
    async with gateway(tmp_path, issuer) as server:
        ways = await server.client.get("/auth/ways")
        assert ways.json() == {"proxy": False, "login": True}
        for user, scopes in (("ann", ["admin", "inference", "read"]), ("sue", ["read"])):
            async with browser(server) as client:
                answer = await sign_in(client, user)
                assert (answer.status_code, answer.headers["location"]) == (303, "/")
                token = (await client.post("/auth/token")).json()
                assert (token["name"], token["scopes"]) == (f"{user}@example.org", scopes)
                assert token["can_sign_out"]
                headers = {"authorization": f"Bearer {token['key']}"}
                statuses = [
                    (await client.get(path, headers=headers)).status_code
                    for path in ("/admin/models", "/admin/keys")
                ]
                assert statuses == [200, 200 if user == "ann" else 403]


async def test_a_cookie_alone_opens_nothing(tmp_path: Path, issuer: str) -> None:
    async with gateway(tmp_path, issuer) as server, browser(server) as client:
        await sign_in(client, "ann")
        for path in ("/admin/models", "/admin/keys", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 401
        for extra in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            for path in ("/auth/token", "/auth/logout"):
                assert (await client.post(path, headers=extra)).status_code == 403


@pytest.mark.parametrize("is_https", [False, True])
async def test_cookies_are_for_this_host_and_no_script(
    tmp_path: Path, issuer: str, is_https: bool
) -> None:
    changes = {"oidc_url": "https://gw.example"} if is_https else {}
    async with gateway(tmp_path, issuer, **changes) as server, browser(server) as client:
        begin = await client.get("/auth/login")
        login = begin.headers["set-cookie"].lower()
        assert begin.headers["cache-control"] == "no-store"
        assert "httponly" in login
        assert "samesite=lax" in login
        assert "domain" not in login
        assert ("; secure" in login) == is_https
        assert login.startswith("__host-") == is_https
        if is_https:
            return
        end = await sign_in(client, "ann")
        session = end.headers.get_list("set-cookie")[-1].lower()
        assert "samesite=strict" in session
        assert "httponly" in session
        assert "max-age=28800" in session


async def test_a_login_of_another_browser_is_refused(tmp_path: Path, issuer: str) -> None:
    async with gateway(tmp_path, issuer) as server:
        async with browser(server) as attacker:
            address = await approve(attacker, "ann")
        async with browser(server) as victim:
            await victim.get("/auth/login")  # a login of its own
            answer = await victim.get(address)
            assert answer.status_code == 400
            assert "not begun in this browser" in answer.text
            assert answer.headers["content-type"].startswith("text/plain")
            assert (await victim.post("/auth/token")).status_code == 401


async def test_a_callback_counts_once(tmp_path: Path, issuer: str) -> None:
    async with gateway(tmp_path, issuer) as server, browser(server) as client:
        address = await approve(client, "ann")
        cookies = dict(client.cookies)
        assert (await client.get(address)).status_code == 303
        client.cookies.clear()
        client.cookies.update(cookies)
        assert (await client.get(address)).status_code == 400


@pytest.mark.parametrize(
    ("user", "words"), [("eve", "has not verified"), ("dan", "has no role"), ("zoe", "verified")]
)
async def test_a_person_without_a_role_or_address_is_refused_in_words(
    tmp_path: Path, issuer: str, user: str, words: str
) -> None:
    async with gateway(tmp_path, issuer) as server, browser(server) as client:
        answer = await sign_in(client, user)
        assert answer.status_code == 403
        assert words in answer.text
        assert (await client.post("/auth/token")).status_code == 401


async def test_a_refusal_of_the_provider_is_told(tmp_path: Path, issuer: str) -> None:
    async with gateway(tmp_path, issuer) as server, browser(server) as client:
        begin = await client.get("/auth/login")
        state = httpx.URL(begin.headers["location"]).params["state"]
        answer = await client.get(f"/auth/callback?state={state}&error=access_denied")
        assert answer.status_code == 403
        assert "access_denied" in answer.text
        for query in ("", "?state=x&code=y", f"?state={state}&code=y", "?code=y"):
            assert (await client.get(f"/auth/callback{query}")).status_code == 400


async def test_signing_out_ends_every_key_of_the_person(tmp_path: Path, issuer: str) -> None:
    async with gateway(tmp_path, issuer) as server, browser(server) as client:
        await sign_in(client, "ann")
        keys = [(await client.post("/auth/token")).json()["key"] for _ in range(2)]
        answer = await client.post("/auth/logout")
        url = httpx.URL(answer.json()["url"])
        assert str(url).startswith(f"{issuer}/oauth2/end_session?")
        assert (await client.get(url)).status_code == 200
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get("/admin/models", headers=headers)).status_code == 401
        assert (await client.post("/auth/token")).status_code == 401
        assert (await client.post("/auth/logout")).json() == {"url": None}


async def test_bearer_tokens_of_the_provider_open_the_admin_api(
    tmp_path: Path, issuer: str
) -> None:
    async with gateway(tmp_path, issuer) as server, browser(server) as client:
        for user, status in (("ann", 200), ("sue", 403)):
            begin = await client.get("/auth/login")
            location = httpx.URL(begin.headers["location"])
            approval = await client.post(location, data={"sub": user})
            code = httpx.URL(approval.headers["location"]).params["code"]
            fields = {
                "grant_type": "authorization_code",
                "code": code,
                "redirect_uri": location.params["redirect_uri"],
            }
            answer = await client.post(
                f"{issuer}/oauth2/token", data=fields, auth=("fitserve", "a-secret-of-the-client")
            )
            token = answer.json()["id_token"]
            headers = {"authorization": f"Bearer {token}"}
            keys = await server.client.get("/admin/keys", headers=headers)
            assert keys.status_code == status, keys.text
            assert (await server.client.get("/admin/models", headers=headers)).status_code == 200
            models = await server.client.get("/v1/models", headers=headers)
            assert models.status_code == 401
        for wrong in (f"{token[:-6]}AAAAAA", "eyJ.a.b", "eyJhbGciOiJub25lIn0.e30."):
            headers = {"authorization": f"Bearer {wrong}"}
            assert (await server.client.get("/admin/models", headers=headers)).status_code == 401
        headers = {"authorization": f"Bearer {ADMIN}"}
        assert (await server.client.get("/admin/keys", headers=headers)).status_code == 200


async def test_the_id_token_of_a_login_is_no_bearer_token(tmp_path: Path, issuer: str) -> None:
    async with gateway(tmp_path, issuer) as server, browser(server) as client:
        await sign_in(client, "ann")
        url = httpx.URL((await client.post("/auth/logout")).json()["url"])
        headers = {"authorization": f"Bearer {url.params['id_token_hint']}"}
        answer = await server.client.get("/admin/keys", headers=headers)
        assert answer.status_code == 401
        assert "proves a login" in answer.text


async def test_guessed_tokens_are_slowed_down(tmp_path: Path, issuer: str) -> None:
    async with gateway(tmp_path, issuer) as server:
        headers = {"authorization": "Bearer eyJ.a.b"}
        statuses = [
            (await server.client.get("/admin/models", headers=headers)).status_code
            for _ in range(12)
        ]
        assert statuses == [401] * 10 + [429] * 2
