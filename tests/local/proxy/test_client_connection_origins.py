"""Web pages of other origins at a whole gateway: preflights, the data plane and the admin API; and
Anthropic's SDK, which a page may hold too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.patience import HANG_S, wait_until
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.served import serve_models
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

APP, OTHER = "https://app.example", "https://evil.example"
KEY = "admin-key-1"
ALLOWED = "access-control-allow-origin"
CHAT_PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
PATHS = ("/v1/chat/completions", "/v1/models", "/v1/nothing", "/admin/models")


def healthy(spec: Any) -> EngineScript:
    return EngineScript(model=spec.model)


async def preflight(gateway: Running, path: str, origin: str) -> httpx.Response:
    return await gateway.client.options(path, headers={**CHAT_PREFLIGHT, "origin": origin})


@asynccontextmanager
async def gateway_for_app(folder: Path) -> AsyncIterator[Running]:
    """A gateway whose setting names the page APP; its client has the admin key."""
    async with running(folder, healthy, origins=APP, admin_key=KEY) as gateway:
        gateway.client.headers.update({"authorization": f"Bearer {KEY}"})
        yield gateway


async def test_the_preflight_of_a_named_page_is_allowed(tmp_path: Path) -> None:
    async with gateway_for_app(tmp_path) as gateway:
        for path in PATHS:
            answer = await preflight(gateway, path, APP)
            assert (answer.status_code, answer.headers[ALLOWED]) == (200, APP), path
            assert "authorization" in answer.headers["access-control-allow-headers"]
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "access-control-allow-credentials" not in answer.headers


async def test_the_preflight_of_another_page_is_refused(tmp_path: Path) -> None:
    async with gateway_for_app(tmp_path) as gateway:
        answers = [await preflight(gateway, path, OTHER) for path in PATHS]
        assert {answer.status_code for answer in answers} == {400}
        assert not [answer for answer in answers if ALLOWED in answer.headers]


@pytest.mark.parametrize(
    ("origin", "allowed_origin"), [(APP, APP), (OTHER, None), (None, None)], ids=str
)
async def test_an_answer_allows_only_the_named_page(
    tmp_path: Path, origin: str | None, allowed_origin: str | None
) -> None:
    headers = {"origin": origin} if origin else {}
    body = {"model": "m", "prompt": "hi", "max_tokens": 2}
    async with gateway_for_app(tmp_path) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        # Twice on one connection: the second head is not read again.
        answers = [
            await gateway.client.post("/v1/completions", json=fields, headers=headers)
            for fields in (body, body, {**body, "stream": True})
        ]
        answers += [
            await gateway.client.get(path, headers=headers)
            for path in ("/v1/models", "/admin/models", "/v1/nothing")
        ]
        wrong_key = {**headers, "authorization": "Bearer wrong"}
        answers.append(await gateway.client.get("/v1/models", headers=wrong_key))
        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 200, 404, 401]
        assert {answer.headers.get(ALLOWED) for answer in answers} == {allowed_origin}


async def test_foreign_pages_get_no_permission_without_the_setting(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, admin_key=KEY) as gateway:
        app_preflight = await preflight(gateway, "/v1/chat/completions", APP)
        assert (app_preflight.status_code, ALLOWED in app_preflight.headers) == (401, False)


async def test_pages_may_ask_models_without_keys_but_not_the_admin_api(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, origins="*") as gateway:
        answers = [
            await gateway.client.get(path, headers={"origin": OTHER})
            for path in ("/v1/models", "/admin/models")
        ]
        assert [(answer.status_code, answer.headers[ALLOWED]) for answer in answers] == [
            (200, "*"),
            (403, "*"),
        ]


async def test_preflights_are_answered_where_workers_serve(tmp_path: Path) -> None:
    async def engine(call: Call) -> None:
        await call.reply(b'{"object":"list","data":[{"id":"m"}]}')

    async with Upstream(engine) as upstream:
        server = serve_models(
            tmp_path, {"m": [upstream.url]}, KEY, FITSERVE_WORKERS="2", FITSERVE_ORIGINS=APP
        )
        gateway = await asyncio.to_thread(server.__enter__)
        try:
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=HANG_S
            ) as client:
                options = await client.options(
                    "/v1/chat/completions", headers={**CHAT_PREFLIGHT, "origin": APP}
                )
                response = await client.get("/v1/models", headers={"origin": APP, "x-api-key": KEY})
                assert [
                    (answer.status_code, answer.headers[ALLOWED]) for answer in (options, response)
                ] == [(200, APP)] * 2
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


async def test_models_are_listed_for_anthropics_sdk(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, admin_key=KEY) as gateway:
        gateway.client.headers.update({"x-api-key": KEY})
        headers = {"authorization": f"Bearer {KEY}"}
        answer = await gateway.client.post(
            "/admin/models",
            headers=headers,
            json={"name": "m", "endpoint": "http://127.0.0.1:9/v1"},
        )
        assert answer.status_code == 202
        async with anthropic.AsyncAnthropic(
            base_url=gateway.url, api_key=KEY, max_retries=0
        ) as client:

            async def list_models() -> list[Any]:
                return [model async for model in client.models.list()]

            (model,) = await wait_until("the model is listed", list_models)
            assert (model.id, model.type, model.display_name) == ("m", "model", "m")
            assert model.created_at.year >= 2024
            assert (await client.models.retrieve("m")).id == "m"
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve("n")
        async with anthropic.AsyncAnthropic(
            base_url=gateway.url, api_key="wrong-key-9", max_retries=0
        ) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.models.list()
