"""The official SDKs at the real engine, straight and through the gateway: the same call is told the
same bytes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines
from tests.support.patience import HANG_S, hang_s
from tests.support.sdk_calls import (
    ANTHROPIC,
    ANTHROPIC_UNREADABLE,
    MESSAGES,
    OPENAI,
    OPENAI_REFUSED,
    OPENAI_RESPONSES,
    OpenAICall,
    WireExchange,
    openai_client,
    told_anthropic,
    told_openai,
)

pytestmark = pytest.mark.engine

TRIES = 5
LONG: dict[str, Any] = {
    "model": "demo",
    "messages": MESSAGES,
    "max_tokens": 1900,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


@dataclass(frozen=True)
class Pair:
    """The demo model's engine and the gateway before it."""

    engine: str
    key: str
    gateway: Gateway

    @property
    def urls(self) -> tuple[str, str]:
        return self.engine, self.gateway.url

    def metric_sum(self, metric: str, labels: str = "") -> float:
        """The engine's metrics, summed over the series whose labels contain `labels`."""
        lines = httpx.get(
            f"{self.engine}/metrics", trust_env=False, timeout=hang_s()
        ).text.splitlines()
        metric_lines = [line for line in lines if line.startswith(f"{metric}{{") and labels in line]
        assert metric_lines
        return sum(float(line.rpartition(" ")[2]) for line in metric_lines)

    @property
    def tokens(self) -> float:
        return self.metric_sum("vllm:generation_tokens_total")

    @property
    def finished_count(self) -> float:
        """Requests that ended by themselves, with all tokens that they asked for."""
        return self.metric_sum("vllm:request_success_total", 'finished_reason="length"')

    @property
    def idle(self) -> bool:
        return not self.metric_sum("vllm:num_requests_running") + self.metric_sum(
            "vllm:num_requests_waiting"
        )


@pytest.fixture
def pair(serving_demo: Gateway) -> Pair:
    return Pair(*engine_of(serving_demo, "demo"), serving_demo)


def engine_of(gateway: Gateway, model: str) -> tuple[str, str]:
    """Where the only engine of `model` listens, and the key that it asks for; the gateway of these
    tests asks for none."""
    records = [json.loads(path.read_text()) for path in (gateway.data / "instances").glob("*.json")]
    (record,) = [record for record in records if record["model"] == model]
    return f"http://127.0.0.1:{record['port']}", record["key"]


CALLS: dict[str, Callable[..., WireExchange]] = {
    **{
        name: partial(told_openai, call, model="demo")
        for name, call in (OPENAI | OPENAI_RESPONSES).items()
    },
    **{
        f"anthropic {name}": partial(told_anthropic, call, model="demo")
        for name, call in ANTHROPIC.items()
    },
}


def check_error(exchange: WireExchange) -> WireExchange:
    """The exchange without the body of an error. The gateway gives that OpenAI's form, which
    tests/unit/proxy/api/test_engine_errors.py holds it to."""
    if exchange.status < 400:
        return exchange
    error = json.loads(exchange.body)["error"]
    assert error["message"]
    assert exchange.source != "engine" or "validation error" not in error["message"]
    return replace(exchange, body=b"")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_gets_the_same_answer_as_from_the_engine(
    call: Callable[..., WireExchange], pair: Pair
) -> None:
    """An engine that is ahead of its server puts two tokens into one event, so that streams of the
    same text differ: both sides are
    asked until the same was told to both."""
    straight: list[WireExchange] = []
    through: list[WireExchange] = []

    def has_equal_records() -> bool:
        straight.append(check_error(call(pair.engine, key=pair.key)))
        through.append(check_error(call(pair.gateway.url, key=pair.key)))
        return through[-1] in straight or straight[-1] in through

    wait_for("the same bytes", has_equal_records, every_s=0)
    assert straight[0].status
    assert {reply.source for reply in through} == {"engine"}
    assert {reply.sent for reply in through} == {reply.sent for reply in straight}


@pytest.mark.parametrize("call", OPENAI_REFUSED.values(), ids=OPENAI_REFUSED)
def test_a_refusal_of_the_gateway_is_the_same_error(call: OpenAICall, pair: Pair) -> None:
    straight, through = (told_openai(call, url, "demo", pair.key) for url in pair.urls)
    assert (through.status, through.error) == (straight.status, straight.error)
    assert through.source == "gateway"


def test_a_refusal_of_the_engine_has_the_shape_of_the_request(pair: Pair) -> None:
    straight, through = (
        told_anthropic(ANTHROPIC_UNREADABLE, url, "demo", pair.key) for url in pair.urls
    )
    assert (through.status, through.error, through.source) == (
        straight.status,
        straight.error,
        "engine",
    )
    error = json.loads(through.body)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert "max_tokens" in error["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b"[]", b'{"model": "demo", "messages": [}']
)
def test_both_sdks_raise_a_bad_request_for_invalid_json(body: bytes, pair: Pair) -> None:
    headers = {"content-type": "application/json", "authorization": f"Bearer {pair.key}"}
    straight, through = (
        httpx.post(
            f"{url}/v1/chat/completions",
            content=body,
            headers=headers,
            trust_env=False,
            timeout=hang_s(),
        )
        for url in pair.urls
    )
    assert straight.status_code in (400, 422)
    assert through.status_code == 400
    assert through.json()["error"]["message"]


async def leaves(pair: Pair, url: str, stream: bool) -> None:
    """A client goes away while the engine generates; returns when the engine rests."""
    tokens_before = pair.tokens
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=pair.key, max_retries=0, timeout=hang_s()
    ) as client:
        asking: asyncio.Task[Any] = asyncio.create_task(
            client.chat.completions.create(**LONG, stream=stream)
        )
        if stream:
            await anext(aiter(await asking))
        await asyncio.to_thread(
            wait_for, "it generates", lambda: pair.tokens > tokens_before, every_s=0.01
        )
        asking.cancel()
        await asyncio.wait({asking})
    wait_for("it rests", lambda: pair.idle, 10 * HANG_S)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("through", [False, True], ids=["straight", "through"])
async def test_a_client_that_leaves_ends_the_engines_work(
    stream: bool, through: bool, pair: Pair
) -> None:
    for _ in range(TRIES):
        finished = pair.finished_count
        await leaves(pair, pair.urls[through], stream)
        # An answer that was there before its client had left proves nothing.
        if pair.finished_count == finished:
            return
    raise AssertionError(f"{TRIES} times the engine gave the whole answer to nobody")


def test_a_client_with_a_timeout_gets_the_same_error(pair: Pair) -> None:
    """The engine stands still meanwhile, so that no answer can be in time."""
    processes = [pid for pids in engines(pair.gateway).values() for pid in pids]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        for url in pair.urls:
            with openai_client(url, timeout=0.5) as client, pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(**LONG)
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    wait_for("it rests", lambda: pair.idle, 10 * HANG_S)


def test_a_stream_ends_as_the_engine_ends_it(pair: Pair) -> None:
    body = {
        "model": "demo",
        "prompt": "Hello",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answers, headers = [], {"authorization": f"Bearer {pair.key}"}
    for url in pair.urls:
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json=body,
            headers=headers,
            trust_env=False,
            timeout=hang_s(),
        ) as response:
            answers.append(b"".join(response.iter_raw()))
    assert all(raw.endswith(b"data: [DONE]\n\n") for raw in answers)
    usages = [
        json.loads(raw.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"] for raw in answers
    ]
    assert usages[0] == usages[1]
