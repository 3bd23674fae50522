"""Keys that are made, listed, revoked and limited while the gateway runs; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.proxy.access import answer_rate
from gateway.proxy.access.rate_limits import Bucket
from gateway.proxy.limits import SWEEP_S
from tests.support.commands import fitserve
from tests.support.dataplane import streams_for_ever, until
from tests.support.key_gateway import (
    ADMIN,
    answer_with_usage,
    gateway,
    make,
    unused_script,
)
from tests.support.patience import hang_s
from tests.support.running import Running, running
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _stop_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes back with time: how much does is for test_limits.py to say."""
    level = Bucket.level
    monkeypatch.setattr(Bucket, "level", lambda bucket, now: level(bucket, bucket._at))


async def waits(call: Call) -> None:
    await call.closed.wait()


def posts(upstream: Upstream) -> int:
    return len([request for request in upstream.requests if request.startswith(b"POST")])


async def ask(
    server: Running, key: str, model: str = "a", path: str = "/v1/chat/completions", **fields: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await server.client.post(
        path, json={"model": model, "messages": MESSAGES, **fields}, headers=headers
    )


async def test_a_key_is_good_from_its_making_to_its_removal(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        assert (await ask(server, "fs-none")).status_code == 401
        key = await make(server, "app")
        assert key.startswith("fs-")
        assert (await ask(server, key)).status_code == 200
        response = await server.client.post("/admin/keys", json={"name": "app"})
        assert response.status_code == 409
        # Rotation: the next one is made before the last one goes.
        second = await make(server, "app-2")
        assert (await server.client.delete("/admin/keys/app")).status_code == 200
        assert (await ask(server, key)).status_code == 401
        assert (await ask(server, second)).status_code == 200
        assert (await server.client.delete("/admin/keys/app")).status_code == 404
        keys = (await server.client.get("/admin/keys")).json()["data"]
        assert [(view["name"], view["scopes"]) for view in keys] == [
            ("admin", ["admin"]),
            ("app-2", ["inference"]),
        ]
        assert second not in json.dumps(keys)


async def test_keys_outlive_the_gateway_and_its_database(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app")
    async with running(tmp_path, unused_script) as server:
        # No key in the settings any more, and yet not open: a key was made.
        assert (await server.client.get("/admin/models")).status_code == 403
        assert (await ask(server, key)).status_code != 401
        assert (await ask(server, "wrong")).status_code == 401
    for path in (tmp_path / "data").glob("fitserve.db*"):
        path.write_bytes(b"damaged" * 100)
    async with running(tmp_path, unused_script) as server:
        assert (await server.client.get("/readyz")).status_code == 503
        assert (await ask(server, key)).status_code != 401
        assert (await ask(server, "wrong")).status_code == 401
    for path in (tmp_path / "data").glob("fitserve.db*"):
        path.unlink()
    (tmp_path / "data" / "keys.json").write_text("[{")
    async with running(tmp_path, unused_script) as server:
        # A key that cannot be read lets nobody in.
        assert (await ask(server, key)).status_code == 403
        assert (await server.client.get("/healthz")).status_code == 200


async def test_only_digests_of_keys_are_stored(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app")
    files = b"".join(path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())
    assert b"app" in files
    assert key.encode() not in files
    assert key.removeprefix("fs-").encode() not in files


async def test_the_last_admin_key_cannot_be_removed(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script) as gateway:
        first_answer = await gateway.client.post("/admin/keys", json={"name": "app"})
        assert first_answer.status_code == 409
        assert "admin" in first_answer.json()["error"]["message"]
        root = await make(gateway, "root", scopes=["admin"])
        assert (await gateway.client.get("/admin/models")).status_code == 401
        gateway.client.headers["authorization"] = f"Bearer {root}"
        await make(gateway, "app")
        assert (await gateway.client.delete("/admin/keys/root")).status_code == 409
        assert (await gateway.client.delete("/admin/keys/app")).status_code == 200
        assert (await gateway.client.delete("/admin/keys/root")).status_code == 200
        del gateway.client.headers["authorization"]
        assert (await gateway.client.get("/admin/models")).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"name": "admin"},
        {"name": "api"},
        {"name": ""},
        {"name": "a b"},
        {"name": "a", "scopes": []},
        {"name": "a", "scopes": ["root"]},
        {"name": "a", "models": []},
        {"name": "a", "models": ["-x"]},
        {"name": "a", "requests_per_minute": 0},
        {"name": "a", "tokens_per_minute": -1},
        {"name": "a", "max_in_flight": 1.5},
        {"name": "a", "key": "my-own"},
    ],
)
async def test_an_impossible_key_is_refused(tmp_path: Path, body: dict[str, Any]) -> None:
    async with running(tmp_path, unused_script, admin_key=ADMIN) as gateway:
        answer = await gateway.client.post(
            "/admin/keys", json=body, headers={"authorization": f"Bearer {ADMIN}"}
        )
        assert answer.status_code in (400, 409)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_models_that_a_key_may_not_use_are_unknown_to_it(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, upstream):
        key = await make(server, "app", models=["a"])
        headers = {"authorization": f"Bearer {key}"}
        assert (await ask(server, key, "a")).status_code == 200
        requests = posts(upstream)
        denial, unknown_answer = await ask(server, key, "b"), await ask(server, key, "c")
        assert denial.status_code == unknown_answer.status_code == 404
        assert denial.text.replace("'b'", "'c'") == unknown_answer.text
        models = (await server.client.get("/v1/models", headers=headers)).json()["data"]
        assert [view["id"] for view in models] == ["a"]
        answers = [
            await server.client.get(f"/v1/models/{name}", headers=headers) for name in ("b", "c")
        ]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text.replace("'b'", "'c'") == answers[1].text
        assert posts(upstream) == requests
        assert {view["id"] for view in (await server.client.get("/v1/models")).json()["data"]} == {
            "a",
            "b",
        }


async def test_lists_and_admin_answers_count_as_requests_of_the_key(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", requests_per_minute=3)
        lists = [
            await server.client.get(path, headers={"authorization": f"Bearer {key}"})
            for path in ("/v1/models", "/v1/models", "/v1/models/absent", "/v1/models")
        ]
        assert [answer.status_code for answer in lists] == [200, 200, 404, 429]
        assert lists[0].headers["x-ratelimit-remaining-requests"] == "2"
        reader = await make(
            server, "reader", requests_per_minute=2, max_in_flight=1, scopes=["read"]
        )
        read = [
            await server.client.get(path, headers={"authorization": f"Bearer {reader}"})
            for path in ("/admin/models", "/metrics", "/admin/usage")
        ]
        assert [answer.status_code for answer in read] == [200, 200, 429]


async def test_answers_of_the_gateway_itself_have_a_rate_by_key_and_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_rate, "PER_S", 0.01)
    monkeypatch.setattr(answer_rate, "BURST", 5)
    async with gateway(tmp_path) as (server, _):
        admin = {"authorization": server.client.headers["authorization"]}
        reader = {"authorization": f"Bearer {await make(server, 'reader', scopes=['read'])}"}
        del server.client.headers["authorization"]
        for headers, paths in (({}, ("/healthz", "/")), (reader, ("/admin/models", "/metrics"))):
            answers = [
                await server.client.get(path, headers=headers)
                for path in paths * 3
                for _ in range(2)
            ]
            limit_answers = [answer for answer in answers if answer.status_code == 429]
            assert len(limit_answers) >= len(answers) - 6
            assert answers[0].status_code == 200
            assert int(limit_answers[0].headers["retry-after"]) > 5
        for path in ("/healthz", "/admin/models") * 4:
            answer = await server.client.get(path, headers=admin)
            assert answer.status_code == (429 if path == "/healthz" else 200)


@pytest.mark.parametrize("path", ["/admin/events", "/admin/live"])
async def test_streams_of_a_key_end_with_the_key(tmp_path: Path, path: str) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "leaked", scopes=["admin"])
        other_key = await make(server, "other", scopes=["admin"])
        streams = []
        async with contextlib.AsyncExitStack() as stack:
            for key_in_use in (key, other_key):
                headers = {"authorization": f"Bearer {key_in_use}"}
                stream = server.client.stream("GET", path, headers=headers)
                streams.append(await stack.enter_async_context(stream))
            answers = [asyncio.create_task(answer.aread()) for answer in streams]
            assert (await server.client.delete("/admin/keys/leaked")).status_code < 300
            async with asyncio.timeout(hang_s()):
                await answers[0]
            if path != "/admin/live":  # where each page connects again after any change of keys
                assert not answers[1].done()
            for answer in answers[1:]:
                answer.cancel()


@pytest.mark.parametrize("end", [True, False])
async def test_requests_end_with_their_key_by_choice(tmp_path: Path, end: bool) -> None:
    async with (
        gateway(tmp_path, streams_for_ever, end_revoked=end) as (server, upstream),
        contextlib.AsyncExitStack() as stack,
    ):
        answers = []
        for name in ("leaked", "other"):
            stream = server.client.stream(
                "POST",
                "/v1/chat/completions",
                json={"model": "a", "messages": MESSAGES, "stream": True},
                headers={"authorization": f"Bearer {await make(server, name)}"},
            )
            answers.append(asyncio.create_task((await stack.enter_async_context(stream)).aread()))
        await until(lambda: posts(upstream) == 2)
        assert (await server.client.delete("/admin/keys/leaked")).status_code < 300
        if end:
            async with asyncio.timeout(hang_s()):
                assert b"was revoked" in await answers[0]
        else:
            # Requests of the admin API go on for longer than the data plane takes to look.
            await asyncio.sleep(2 * SWEEP_S)
            assert not answers[0].done()
        assert not answers[1].done()
        for answer in answers:
            answer.cancel()


async def test_answers_tell_the_requests_that_a_key_has_left(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", requests_per_minute=3)
        answers = [await ask(server, key) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        remaining = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert remaining == ["2", "1", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
        assert answers[0].headers["x-ratelimit-reset-requests"].endswith("s")


async def test_a_request_beyond_its_minute_reaches_no_engine(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, upstream):
        key = await make(server, "app", requests_per_minute=1)
        await ask(server, key)
        requests = posts(upstream)
        refusal = await ask(server, key)
        assert refusal.status_code == 429
        assert refusal.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refusal.headers["retry-after"]) <= 60
        assert refusal.headers["x-ratelimit-remaining-requests"] == "0"
        assert refusal.headers["x-gateway-source"] == "gateway"
        assert posts(upstream) == requests


async def test_a_limit_is_told_in_the_form_of_anthropic_at_its_endpoint(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", requests_per_minute=1)
        await ask(server, key)
        messages = await ask(server, key, path="/v1/messages", max_tokens=1)
        assert messages.status_code == 429
        assert messages.json()["error"]["type"] == "rate_limit_error"
        assert messages.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert messages.headers["anthropic-ratelimit-requests-reset"].endswith("Z")


async def test_the_limit_of_a_key_concerns_no_other_key(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", requests_per_minute=1)
        other_key = await make(server, "other")
        assert [(await ask(server, key)).status_code for _ in range(2)] == [200, 429]
        answer = await ask(server, other_key)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if "ratelimit" in name]


async def test_tokens_per_minute_are_those_of_the_usage_block(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", tokens_per_minute=80)
        first, second = await ask(server, key), await ask(server, key)
        # 50 each: the second one was let in, for the first had left 30.
        assert (first.status_code, second.status_code) == (200, 200)
        assert first.headers["x-ratelimit-remaining-tokens"] == "80"
        assert second.headers["x-ratelimit-remaining-tokens"] == "30"
        third = await ask(server, key)
        assert third.status_code == 429
        assert "80 tokens per minute" in third.json()["error"]["message"]
        # 20 are owed, and one is needed: at 80 in a minute that is 15.75 s.
        assert int(third.headers["retry-after"]) in (15, 16)


async def test_a_client_that_leaves_pays_too(tmp_path: Path) -> None:
    async with gateway(tmp_path, waits) as (server, upstream):
        key = await make(server, "app", tokens_per_minute=100)
        requests = posts(upstream)
        leaving = asyncio.create_task(
            ask(server, key, messages=[{"role": "user", "content": "x" * 4000}])
        )
        await until(lambda: posts(upstream) > requests)
        leaving.cancel()
        await until(upstream.calls[-1].closed.is_set)
        assert (await ask(server, key)).status_code == 429


async def test_a_key_has_its_requests_at_once(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def hold_answer(call: Call) -> None:
        await go.wait()
        await answer_with_usage(call)

    async with gateway(tmp_path, hold_answer) as (server, upstream):
        key = await make(server, "app", max_in_flight=2)
        requests = posts(upstream)
        first = [asyncio.create_task(ask(server, key)) for _ in range(2)]
        await until(lambda: posts(upstream) == requests + 2)
        refusal = await ask(server, key)
        assert refusal.status_code == 429
        assert refusal.headers["retry-after"] == "1"
        go.set()
        assert [(await task).status_code for task in first] == [200, 200]
        assert (await ask(server, key)).status_code == 200


async def test_the_command_makes_lists_and_removes_keys(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(
                fitserve, *arguments, FITSERVE_URL=server.url, FITSERVE_KEY=ADMIN
            )

        result = await run(
            "keys",
            "add",
            "app",
            "--model",
            "a",
            "--requests-per-minute",
            "600",
            "--max-in-flight",
            "4",
        )
        assert result.returncode == 0, result.stderr
        key = result.stdout.strip()
        assert (await ask(server, key)).status_code == 200
        assert (await ask(server, key, "b")).status_code == 404
        output = (await run("keys", "ls")).stdout
        assert "600 requests/min, 4 concurrent" in output
        assert key not in output
        assert [
            view["name"] for view in json.loads((await run("keys", "ls", "--json")).stdout)["data"]
        ] == ["admin", "app"]
        assert (await run("keys", "rm", "app")).returncode == 0
        assert (await run("keys", "rm", "app")).returncode == 1
        assert (await run("keys", "add", "x", "--scope", "root")).returncode == 2
        assert (await ask(server, key)).status_code == 401


async def test_the_sdks_know_a_limit_when_they_meet_it(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", requests_per_minute=1)
        assert (await ask(server, key)).status_code == 200
        openai_client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        anthropic_client = anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0)
        words: Any = MESSAGES
        with pytest.raises(openai.RateLimitError) as first:
            await openai_client.chat.completions.create(model="a", messages=words)
        assert first.value.code == "rate_limit_exceeded"
        assert int(first.value.response.headers["retry-after"]) > 1
        with pytest.raises(anthropic.RateLimitError) as second:
            await anthropic_client.messages.create(model="a", messages=words, max_tokens=1)
        assert second.value.response.headers["anthropic-ratelimit-requests-limit"] == "1"
        for client in (openai_client, anthropic_client):
            await client.close()


async def test_a_key_ends_after_its_last_day(tmp_path: Path) -> None:
    today = datetime.now(UTC).date()
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", expires=str(today + timedelta(days=1)))
        assert (await ask(server, key)).status_code == 200
        over = {"name": "late", "expires": str(today - timedelta(days=1))}
        refusal = await server.client.post("/admin/keys", json=over)
        assert refusal.status_code == 400
        assert "is over" in refusal.json()["error"]["message"]
        with pytest.MonkeyPatch.context() as patch:
            later = time.time() + 2 * 86_400
            patch.setattr("gateway.proxy.access.auth.time.time", lambda: later)
            # The same connection repeats the head of its last request.
            expired = await ask(server, key)
        assert expired.status_code == 401
        assert "has expired" in expired.json()["error"]["message"]


async def test_the_last_admin_key_has_no_end(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script) as server:
        body = {"name": "root", "scopes": ["admin"], "expires": "2999-01-01"}
        refusal = await server.client.post("/admin/keys", json=body)
        assert refusal.status_code == 409
        assert "no end" in refusal.json()["error"]["message"]
