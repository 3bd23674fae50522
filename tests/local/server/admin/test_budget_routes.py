"""Budgets of keys and groups, set and spent while the gateway runs; over real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.commands import fitserve
from tests.support.key_gateway import ADMIN, answer_with_usage, gateway, make
from tests.support.patience import Patience
from tests.support.running import Running
from tests.support.upstream import Upstream

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hi"}]
PRICES = "currency: EUR\nmodels:\n  a: {prompt: 10000, completion: 20000}\n"


def posts(upstream: Upstream) -> int:
    return len([request for request in upstream.requests if request.startswith(b"POST")])


async def ask(
    server: Running, key: str, model: str = "a", path: str = "/v1/chat/completions", **fields: Any
) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await server.client.post(
        path, json={"model": model, "messages": MESSAGES, **fields}, headers=headers
    )


async def usage_by_limit(server: Running, name: str) -> dict[str, float]:
    keys = (await server.client.get("/admin/keys")).json()["data"]
    (view,) = [key for key in keys if key["name"] == name]
    return {f"{row['measure']}-{row['period']}": row["used"] for row in view.get("used", ())}


async def events_of(server: Running, kind: str) -> list[Any]:
    """The events of a kind, as soon as there is one."""
    patience = Patience()
    while True:
        answer = await server.client.get("/admin/events?after=0&follow=false")
        if events := [event for event in answer.json()["data"] if event["kind"] == kind]:
            return events
        assert not patience.is_over(), f"no event {kind}"
        await asyncio.sleep(patience.pause_s(0.05))


async def test_a_spent_budget_refuses_with_the_time_of_the_next_day(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, upstream):
        key = await make(server, "app", budget={"requests_per_day": 2, "tokens_per_month": 1000})
        first = await ask(server, key)
        assert first.headers["x-ratelimit-limit-requests-day"] == "2"
        assert first.headers["x-ratelimit-remaining-requests-day"] == "1"
        assert first.headers["x-ratelimit-reset-requests-day"].endswith("s")
        second = await ask(server, key)
        assert second.headers["x-ratelimit-remaining-tokens-month"] == "936"  # 14 of its prompt
        assert "has used 2 of 2 requests" in second.headers["x-fitserve-budget-warning"]
        requests = posts(upstream)
        refusal = await ask(server, key)
        assert refusal.status_code == 429
        error = refusal.json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert "00:00 UTC" in error["message"]
        assert refusal.headers["x-should-retry"] == "false"
        assert "retry-after" not in refusal.headers
        assert refusal.headers["x-ratelimit-remaining-requests-day"] == "0"
        messages = await ask(server, key, path="/v1/messages", max_tokens=1)
        assert messages.json()["error"]["type"] == "rate_limit_error"
        assert messages.headers["anthropic-ratelimit-requests-day-remaining"] == "0"
        assert posts(upstream) == requests
        assert await usage_by_limit(server, "app") == {"requests-day": 2, "tokens-month": 100}
        listing = await server.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert listing.status_code == 200


COMMON = tuple(
    f"x-ratelimit-{value}-{unit}"
    for unit in ("requests", "tokens")
    for value in ("limit", "remaining", "reset")
)


async def test_the_common_headers_are_those_of_the_tightest_limit(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        await server.client.put("/admin/key-groups/team", json={"tokens_per_day": 120})
        limits: dict[str, Any] = {
            "budget": {"requests_per_day": 3, "requests_per_month": 50, "tokens_per_day": 9000},
            "requests_per_minute": 600,
            "tokens_per_minute": 5000,
            "group": "team",
        }
        key = await make(server, "app", **limits)
        answer = await ask(server, key)
        values = {name: answer.headers[name] for name in COMMON if "reset" not in name}
        assert values == {
            "x-ratelimit-limit-requests": "3",
            "x-ratelimit-remaining-requests": "2",
            "x-ratelimit-limit-tokens": "120",
            "x-ratelimit-remaining-tokens": "106",  # 14 of its prompt
        }
        for unit, budget in (("requests", "requests-day"), ("tokens", "group-tokens-day")):
            assert (
                answer.headers[f"x-ratelimit-reset-{unit}"]
                == answer.headers[f"x-ratelimit-reset-{budget}"]
            )
        assert len(answer.headers.get_list("x-ratelimit-limit-requests")) == 1
        for _ in range(2):
            assert (await ask(server, key)).status_code == 200
        refusal = await ask(server, key)
        assert refusal.status_code == 429
        assert refusal.headers["x-ratelimit-remaining-requests"] == "0"
        assert refusal.headers["x-ratelimit-limit-requests"] == "3"


async def test_soft_budgets_and_keys_without_limits_have_no_common_headers(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as (server, _):
        soft = await make(server, "soft", budget={"requests_per_day": 1, "is_soft": True})
        plain = await make(server, "plain")
        gpu = await make(server, "gpu", budget={"gpu_seconds_per_day": 50})
        for key in (soft, plain, gpu):
            answer = await ask(server, key)
            assert answer.status_code == 200
            assert [name for name in COMMON if name in answer.headers] == []


async def test_the_sdk_of_openai_does_not_retry_a_spent_budget(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", budget={"requests_per_day": 1})
        assert (await ask(server, key)).status_code == 200
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=5)
        with pytest.raises(openai.RateLimitError) as refusal:
            await client.chat.completions.create(model="a", messages=MESSAGES)
        assert refusal.value.code == "insufficient_quota"
        metrics = (await server.client.get("/metrics")).text
        assert 'fitserve_refusals_total{code="insufficient_quota"} 1\n' in metrics
        await client.close()


async def test_a_budget_outlives_the_gateway_and_is_raised_without_a_new_key(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", budget={"requests_per_month": 2})
        assert [(await ask(server, key)).status_code for _ in range(3)] == [200, 200, 429]
        for name in ("a", "b"):
            await server.client.delete(f"/admin/models/{name}")
            await server.wait_until_gone(name)
    async with gateway(tmp_path) as (server, _):
        assert (await ask(server, key)).status_code == 429
        path = "/admin/keys/app/budget"
        response = await server.client.put(path, json={"requests_per_month": 3})
        assert response.status_code == 200
        assert [(await ask(server, key)).status_code for _ in range(2)] == [200, 429]
        assert (await server.client.put(path, json={})).status_code == 200
        assert (await ask(server, key)).status_code == 200
        assert (await server.client.put("/admin/keys/none/budget", json={})).status_code == 404
        assert await usage_by_limit(server, "app") == {}


async def test_keys_of_a_group_share_its_budget(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        groups = "/admin/key-groups"
        response = await server.client.put(f"{groups}/team", json={"requests_per_day": 3})
        assert response.status_code == 200, response.text
        first = await make(server, "first", group="team", budget={"requests_per_day": 2})
        second = await make(server, "second", group="team")
        assert [(await ask(server, first)).status_code for _ in range(3)] == [200, 200, 429]
        answers = [await ask(server, second) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert "The group team has used its 3 requests" in answers[1].json()["error"]["message"]
        assert answers[0].headers["x-ratelimit-remaining-group-requests-day"] == "0"
        (view,) = (await server.client.get(groups)).json()["data"]
        assert view["keys"] == ["first", "second"]
        assert [(row["used"], row["limit"]) for row in view["used"]] == [(3, 3)]
        assert (await server.client.delete(f"{groups}/team")).status_code == 409
        for name in ("first", "second"):
            await server.client.delete(f"/admin/keys/{name}")
        assert (await server.client.delete(f"{groups}/team")).status_code == 200
        assert (await server.client.delete(f"{groups}/team")).status_code == 404


async def test_events_warn_once_and_report_the_end(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        key = await make(server, "app", budget={"requests_per_day": 2, "warn_percent": 50})
        assert (await ask(server, key)).status_code == 200
        (warning,) = await events_of(server, "budget.warning")
        assert warning["data"] == {
            "key": "app",
            "measure": "requests",
            "period": "day",
            "used": 1,
            "limit": 2,
        }
        assert (await ask(server, key)).status_code == 200
        (end,) = await events_of(server, "budget.exhausted")
        assert end["data"]["used"] == 2
        assert len(await events_of(server, "budget.warning")) == 1
        path = "/admin/keys/app/budget"
        await server.client.put(path, json={"requests_per_day": 5, "warn_percent": 60})
        assert (await ask(server, key)).status_code == 200
        patience = Patience()
        while len(await events_of(server, "budget.warning")) < 2:
            assert not patience.is_over()
            await asyncio.sleep(patience.pause_s(0.05))


async def test_money_needs_prices_and_is_counted_by_them(tmp_path: Path) -> None:
    for folder in ("plain", "priced"):
        (tmp_path / folder).mkdir()
    async with gateway(tmp_path / "plain") as (server, _):
        body = {"name": "rich", "budget": {"money_per_day": 5}}
        refusal = await server.client.post("/admin/keys", json=body)
        assert refusal.status_code == 400
        assert "FITSERVE_PRICES" in refusal.json()["error"]["message"]
    file = tmp_path / "prices.yaml"
    file.write_text(PRICES)
    async with gateway(tmp_path / "priced", prices=file) as (server, _):
        key = await make(server, "rich", budget={"money_per_day": 1})
        # 30 tokens of a prompt at 0.01, and 20 of an answer at 0.02.
        assert [(await ask(server, key)).status_code for _ in range(3)] == [200, 200, 429]
        assert await usage_by_limit(server, "rich") == {"money-day": pytest.approx(1.4)}
        refusal = await ask(server, key, "b")
        assert refusal.status_code == 403
        assert "has no price" in refusal.json()["error"]["message"]


async def test_an_answer_without_a_report_is_estimated(tmp_path: Path) -> None:
    async def answer_without_usage(call: Any) -> None:
        await call.reply(json.dumps({"id": "c", "choices": [], "text": "x" * 400}).encode())

    async with gateway(tmp_path, answer_without_usage) as (server, _):
        key = await make(server, "app", budget={"tokens_per_day": 10_000})
        assert (await ask(server, key)).status_code == 200
        count = (await usage_by_limit(server, "app"))["tokens-day"]
        assert 100 < count < 200


async def test_a_request_that_reaches_no_engine_costs_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path, answer_with_usage) as (server, upstream):
        key = await make(server, "app", budget={"requests_per_day": 1})
        assert (await ask(server, key, "none")).status_code == 404
        headers = {"authorization": f"Bearer {key}"}
        answer = await server.client.post("/v1/chat/completions", content=b"{", headers=headers)
        assert answer.status_code == 400
        assert await usage_by_limit(server, "app") == {"requests-day": 0}
        assert posts(upstream) == 0
        assert (await ask(server, key, "b")).status_code == 200


async def test_the_command_sets_and_shows_budgets(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(
                fitserve, *arguments, FITSERVE_URL=server.url, FITSERVE_KEY=ADMIN
            )

        options = "--class interactive --tokens-per-day 5000 --requests-per-month 9 --warn-at 90"
        creation = await run("keys", "add", "app", "--group", "team", *options.split())
        assert creation.returncode == 0, creation.stderr
        assert (await ask(server, creation.stdout.strip())).status_code == 200
        team = await run("keys", "group", "team", "--gpu-seconds-per-day", "60", "--soft")
        assert team.returncode == 0, team.stderr
        listing = (await run("keys", "ls")).stdout
        for text in (
            "50 of 5,000 tokens/day",
            "1 of 9 requests/month",
            "group team",
            "0 of 60 GPU seconds/day (soft)",
        ):
            assert text in listing.replace("\n", " ") or text in " ".join(listing.split())
        change = await run("keys", "budget", "app", "--tokens-per-day", "7000")
        assert change.returncode == 0, change.stderr
        assert "50 of 7,000 tokens/day" in " ".join((await run("keys", "ls")).stdout.split())
        assert (await run("keys", "group", "team", "--rm")).returncode == 1
        assert (await run("keys", "add", "x", "--tokens-per-day", "0")).returncode == 2
