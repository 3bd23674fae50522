"""The official SDKs at the real engine, straight and through the gateway: the same call is told the same bytes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import Gateway
from tests.sdk_calls import (
    ANTHROPIC,
    MESSAGES,
    OPENAI,
    OPENAI_REFUSED,
    OPENAI_RESPONSES,
    OpenAICall,
    Told,
    openai_client,
    told_anthropic,
    told_openai,
)

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

# An engine that is ahead of its client puts two tokens into one event, so that streams of the same text can differ.
TRIES = 20
RUNNING = re.compile(r"^vllm:num_requests_running\{[^}]*\} ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Pair:
    """The demo model's engine and the gateway before it."""

    engine: str
    gateway: str

    def running(self) -> float:
        """Requests that the engine works on."""
        found = RUNNING.findall(httpx.get(f"{self.engine}/metrics", trust_env=False).text)
        assert found
        return sum(map(float, found))

    def busy_within(self, seconds: float) -> None:
        """The engine tells a moment after it began."""
        deadline = time.monotonic() + seconds
        while not self.running():
            assert time.monotonic() < deadline, f"the engine did not begin within {seconds} s"

    def idle_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.running():
            assert time.monotonic() < deadline, f"the engine still works after {seconds} s"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def pair(gateway: Gateway, demo_model: Path) -> Pair:
    added = gateway.cli("add", "demo", str(demo_model), "--wait")
    assert added.returncode == 0, added.stderr
    return Pair(engine_url(gateway, "demo"), gateway.url)


def engine_url(gateway: Gateway, model: str) -> str:
    """Where the only engine of `model` listens."""
    (record,) = [text for path in (gateway.data / "instances").glob("*.json") if f'"{model}"' in (text := path.read_text())]
    found = re.search(r'"port": ?(\d+)', record)
    assert found
    return f"http://127.0.0.1:{found[1]}"


CALLS: dict[str, Callable[[str], Told]] = {
    **{name: partial(told_openai, call, model="demo") for name, call in (OPENAI | OPENAI_RESPONSES).items()},
    **{f"anthropic {name}": partial(told_anthropic, call, model="demo") for name, call in ANTHROPIC.items()},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_same_call_is_told_the_same(call: Callable[[str], Told], pair: Pair) -> None:
    for _ in range(TRIES):
        straight, through = call(pair.engine), call(pair.gateway)
        if through == straight:
            break
    assert straight.status
    assert through == straight
    assert through.source == "engine"
    assert through.sent == straight.sent


@pytest.mark.parametrize("call", OPENAI_REFUSED.values(), ids=OPENAI_REFUSED)
def test_what_the_gateway_refuses_is_the_same_error(call: OpenAICall, pair: Pair) -> None:
    straight, through = (told_openai(call, url, "demo") for url in (pair.engine, pair.gateway))
    assert (through.status, through.error) == (straight.status, straight.error)
    assert through.source == "gateway"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b'{"model": "demo", "messages": [}'])
def test_bad_json_is_the_clients_fault_to_both(body: bytes, pair: Pair) -> None:
    headers = {"content-type": "application/json"}
    straight, through = (
        httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers, trust_env=False)
        for url in (pair.engine, pair.gateway)
    )
    assert straight.status_code in (400, 422)
    assert through.status_code == 400
    assert through.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("through", [False, True], ids=["straight", "through"])
def test_a_client_that_leaves_ends_the_engines_work(stream: bool, through: bool, pair: Pair) -> None:
    pair.idle_within(10)
    # A whole answer of 1,900 tokens may take no more than a second; a first token may take as long on a busy machine.
    with openai_client(pair.gateway if through else pair.engine, timeout=5 if stream else 0.2) as client:
        options = {"max_tokens": 1900, "temperature": 0, "extra_body": {"ignore_eos": True}}
        if stream:
            chunks = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **options)  # type: ignore[call-overload]
            assert next(iter(chunks)).choices
            pair.busy_within(1)
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(model="demo", messages=MESSAGES, **options)  # type: ignore[call-overload]
        pair.idle_within(2)


def test_a_stream_ends_as_the_engine_ends_it(pair: Pair) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    answers = []
    for url in (pair.engine, pair.gateway):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as response:
            answers.append(b"".join(response.iter_raw()))
    assert all(raw.endswith(b"data: [DONE]\n\n") for raw in answers)
    usages = [json.loads(raw.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"] for raw in answers]
    assert usages[0] == usages[1]
