"""The official openai SDK at the fake engine, straight and through the gateway: the same call is
told the same bytes.

tests/e2e/test_sdk_differential.py does the same with the real engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from tests.contract.process_harness import free_port
from tests.support.paths import FAKE_ENGINE
from tests.support.patience import hang_s
from tests.support.sdk_calls import (
    KEY,
    MESSAGES,
    OPENAI,
    OPENAI_REFUSED,
    OPENAI_VECTORS,
    OpenAICall,
    openai_client,
    told_openai,
)
from tests.support.served import Served, serve_models


class Engine:
    """tests/support/fake_engine.py as a process. `asked` counts requests, `left` clients that went
    before their answer was complete."""

    def __init__(self, folder: Path, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.record = folder / f"record-{port}"
        command = [
            sys.executable,
            str(FAKE_ENGINE),
            "--model",
            "m",
            "--port",
            str(port),
            "--record",
            str(self.record),
        ]
        self.process = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)

    @property
    def request_count(self) -> int:
        return self._count_records(b"POST /v1/chat/completions ")

    @property
    def left_count(self) -> int:
        return self._count_records(b"\nclosed ")

    def _count_records(self, words: bytes) -> int:
        return self.record.read_bytes().count(words) if self.record.exists() else 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """`m` answers at once; `slow` gives a token a minute."""
    folder = tmp_path_factory.mktemp("engines")
    engine_by_name = {
        "m": Engine(folder),
        "slow": Engine(folder, "--tokens-per-second", "0.0166", "--served-model-name", "slow"),
    }
    yield engine_by_name
    for engine in engine_by_name.values():
        engine.stop()


@pytest.fixture(scope="module")
def gateway(
    engines: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    models = {name: [f"{engine.url}/v1"] for name, engine in engines.items()}
    with serve_models(
        tmp_path_factory.mktemp("gateway"), models, admin_key=f"{KEY}-admin", FITSERVE_API_KEY=KEY
    ) as running:
        yield running


@pytest.mark.parametrize(
    "call", [*OPENAI.values(), *OPENAI_VECTORS.values()], ids=[*OPENAI, *OPENAI_VECTORS]
)
def test_a_call_gets_the_same_answer_as_from_the_engine(
    call: OpenAICall, gateway: Served, engines: dict[str, Engine]
) -> None:
    straight, through = (told_openai(call, url, "m") for url in (engines["m"].url, gateway.url))
    assert straight.status
    if straight.status >= 400:
        # The words of the engine, in OpenAI's form.
        form = {"type": "invalid_request_error", "code": None}
        engine_error = json.loads(straight.body)["error"]
        assert json.loads(through.body)["error"] == engine_error | form
        through = replace(through, body=straight.body)
    assert through == straight
    assert through.source == "engine"
    assert through.sent == straight.sent


@pytest.mark.parametrize("call", OPENAI_REFUSED.values(), ids=OPENAI_REFUSED)
def test_a_refusal_of_the_gateway_is_the_same_error(
    call: OpenAICall, gateway: Served, engines: dict[str, Engine]
) -> None:
    straight, through = (told_openai(call, url, "m") for url in (engines["m"].url, gateway.url))
    assert (through.status, through.error, through.content_type) == (
        straight.status,
        straight.error,
        "application/json",
    )
    assert through.source == "gateway"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "m"',
        b"\xff\xfe",
        b"[]",
        b'"m"',
        b"{}{}",
        b'{"model": "m", "messages": NaN}x',
    ],
)
def test_bad_json_is_refused_as_the_engine_would(
    body: bytes, gateway: Served, engines: dict[str, Engine]
) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    straight, through = (
        httpx.post(
            f"{url}/v1/chat/completions",
            content=body,
            headers=headers,
            trust_env=False,
            timeout=hang_s(),
        )
        for url in (engines["m"].url, gateway.url)
    )
    assert through.status_code == straight.status_code == 400
    assert through.json()["error"]["message"]


def test_a_wrong_key_is_an_authentication_error(gateway: Served) -> None:
    wrong = openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="sk-wrong-0123456789", max_retries=0
    )
    with wrong as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model="m", messages=MESSAGES)


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + hang_s()
    while not check():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.02)


@pytest.mark.parametrize("through", [False, True], ids=["straight", "through"])
def test_a_closed_stream_ends_the_engines_work(
    through: bool, gateway: Served, engines: dict[str, Engine]
) -> None:
    engine = engines["slow"]
    left_count = engine.left_count
    with openai_client(gateway.url if through else engine.url) as client:
        stream = client.chat.completions.create(
            model="slow", messages=MESSAGES, max_tokens=1000, stream=True
        )
        assert next(iter(stream)).choices
        stream.close()
        until(lambda: engine.left_count == left_count + 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("through", [False, True], ids=["straight", "through"])
def test_a_client_that_runs_out_of_patience_ends_the_engines_work(
    stream: bool, through: bool, gateway: Served, engines: dict[str, Engine]
) -> None:
    engine = engines["slow"]
    request_count, left_count = engine.request_count, engine.left_count
    # On a busy machine a short delay ends before the engine is asked.
    for patience_s in (
        0.3,
        1,
        3,
        10,
        30,
    ):
        client = openai_client(gateway.url if through else engine.url, timeout=patience_s)
        with client, pytest.raises(openai.APITimeoutError):
            answer = client.chat.completions.create(
                model="slow", messages=MESSAGES, max_tokens=1000, stream=stream
            )
            list(answer)
        if engine.request_count > request_count:
            break
    until(lambda: engine.left_count - left_count == engine.request_count - request_count > 0)
