"""Two gateways as two machines would have them: the one in front has a key of the one behind, which
has a scripted engine; clients are the SDK."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from gateway.proxy.access.endpoint_keys import FOLDER
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, scripted_gateway, starts
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder

ADMIN = {"authorization": "Bearer the-admin-key"}
WRONG = "wrong-key-canary"
HELLO: Any = [{"role": "user", "content": "hi"}]


class Two:
    """`front` routes the model m to `rear`. `file`: where the front's key for it is laid; `key`:
    the one that is good."""

    def __init__(self, folder: Path) -> None:
        # Each start takes a while, as of a real engine, so that a request meets it.
        settings = {
            "FITSERVE_ADMIN_KEY": "the-admin-key",
            "FITSERVE_ACCESS_LOG": "true",
            "FITSERVE_WAITING_COMMENT_S": "0.1",
        }
        self.rear = scripted_gateway(folder / "rear", ["--start-delay", "1"], **settings)
        self.rear.client.headers.update(ADMIN)
        self.front = Gateway(
            folder / "front",
            folder / "front.log",
            FITSERVE_TICK_S="0.1",
            FITSERVE_HEALTH_INTERVAL_S="0.2",
        )
        self.file = folder / "front" / FOLDER / "rear"
        self.rear.start()
        source = str(model_folder(folder / "model"))
        wish = {"name": "m", "source": source, "engines": [ENGINE], "replicas": 1}
        assert self.rear.client.post("/admin/models", json=wish).status_code == 202
        self.rear.until("m", "ready")
        self.key = str(
            self.rear.client.post("/admin/keys", json={"name": "front", "models": ["m"]}).json()[
                "key"
            ]
        )
        self.front.start()
        self.sdk = openai.OpenAI(
            api_key="a-clients-own",
            base_url=f"{self.front.url}/v1",
            max_retries=0,
            timeout=hang_s(),
            http_client=httpx2.Client(trust_env=False),
        )

    def write_files(self, key: str) -> None:
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(f"{key}\n")

    def says(self, words: str) -> str:
        return str(
            wait_for(words, lambda: words in (detail := self.front.show("m")["detail"]) and detail)
        )

    def close(self) -> None:
        self.sdk.close()
        for gateway in (self.front, self.rear):
            gateway.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    (tmp_path / "rear").mkdir()
    two = Two(tmp_path)
    try:
        yield two
    finally:
        two.close()


def chat(two: Two) -> str:
    return str(
        two.sdk.chat.completions.create(model="m", messages=HELLO, max_tokens=4)
        .choices[0]
        .message.content
    )


def test_a_gateway_in_front_reports_each_fault_of_the_key_behind(two: Two) -> None:
    front, rear = two.front, two.rear
    # No key, one that is not there, a wrong one: each is said, to the client without where the key
    # should be.
    assert front.cli("add", "m", "--endpoint", f"{rear.url}/v1").returncode == 0
    two.says("answers 401: it needs a key, and the model has no endpoint_key")
    assert front.cli("set", "m", "--endpoint-key", "file:rear").returncode == 0
    two.says("cannot be read: its file: No such file or directory")
    two.write_files(WRONG)
    detail = two.says("refused the key: ")
    assert "key" in detail.partition("refused the key: ")[2], detail
    with pytest.raises(openai.InternalServerError) as error:
        chat(two)
    assert error.value.status_code == 503
    assert "refused the key" in error.value.message
    assert "file:rear" not in error.value.message
    assert "its key is file:rear" in front.cli("show", "m").stdout
    # The right one.
    two.write_files(two.key)
    front.until("m", "ready")
    assert chat(two)
    ask = two.sdk.chat.completions
    raw = ask.with_raw_response.create(
        model="m", messages=HELLO, max_tokens=4, extra_headers={"x-request-id": "asked-in-front"}
    )
    assert (raw.headers["x-request-id"], raw.headers["x-gateway-source"]) == (
        "asked-in-front",
        "engine",
    )
    assert [
        chunk.choices[0].delta.content
        for chunk in ask.create(model="m", messages=HELLO, max_tokens=4, stream=True)
        if chunk.choices
    ]
    wait_for("the id in the log behind", lambda: '"id":"asked-in-front"' in rear.log.read_text())
    # Models that the key may not use there are not there.
    assert (
        front.client.post(
            "/admin/models",
            json={"name": "other", "endpoint": f"{rear.url}/v1", "endpoint_key": "file:rear"},
        ).status_code
        == 202
    )
    # Its only model is taken for the one that is meant, whatever it is called there.
    front.until("other", "ready")
    # The key is revoked while requests come: they hear that it is not theirs.
    assert rear.client.delete("/admin/keys/front").status_code < 300
    with pytest.raises(openai.APIStatusError) as late:
        while True:
            chat(two)
    assert late.value.status_code in (502, 503)
    assert "key" in late.value.message
    two.says("refused the key: ")
    logs = front.log.read_text() + rear.log.read_text()
    for secret in (two.key, WRONG, "a-clients-own"):
        assert secret not in logs
        assert secret.encode() not in b"".join(
            path.read_bytes() for path in front.data.rglob("fitserve.db*")
        )


def test_a_request_in_front_loads_a_model_that_sleeps_behind(two: Two) -> None:
    front, rear = two.front, two.rear
    two.write_files(two.key)
    result = front.cli(
        "add", "m", "--endpoint", f"{rear.url}/v1", "--endpoint-key", "file:rear", "--wait"
    )
    assert (result.returncode, "m: ready" in result.stdout) == (0, True), result.stderr
    start_count = starts(rear)
    rear.client.patch("/admin/models/m", json={"policy": {"keep_alive": "0.2"}})
    rear.until("m", "stopped")
    front.until("m", "asleep")
    assert chat(two)
    assert starts(rear) > start_count
    rear.until("m", "stopped")
    front.until("m", "asleep")
    # A stream hears that it waits, by comments of the one behind, and then its answer.
    body = {"model": "m", "messages": HELLO, "max_tokens": 4, "stream": True}
    with front.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        text = answer.read().decode()
    assert answer.status_code == 200
    comments, begins, data = text.partition("data: ")
    assert (comments.count(": waiting") > 0, bool(begins), data.endswith("[DONE]\n\n")) == (
        True,
        True,
        True,
    ), text
    # Its owner stops it: nobody is told to wait for that.
    rear.client.patch("/admin/models/m", json={"policy": {"keep_alive": -1}})
    assert rear.client.post("/admin/models/m/stop").status_code == 202
    two.says("has m, which is stopped there")
    with pytest.raises(openai.InternalServerError, match="stopped there"):
        chat(two)


def test_a_gateway_behind_that_is_restarted_is_waited_for(two: Two) -> None:
    front, rear = two.front, two.rear
    two.write_files(two.key)
    wish = {
        "name": "m",
        "endpoint": f"{rear.url}/v1",
        "endpoint_key": "file:rear",
        "policy": {"wait_s": HANG_S},
    }
    assert front.client.post("/admin/models", json=wish).status_code == 202
    front.until("m", "ready")
    assert chat(two)
    start_count = starts(rear)
    rear.kill(signal.SIGTERM)
    front.until("m", "unreachable")
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(chat(two)))
    waiting.start()
    wait_for(
        "a request waits",
        lambda: 'fitserve_requests_queued{model="m"} 1' in front.client.get("/metrics").text,
    )
    rear.start()
    waiting.join(hang_s())
    assert answers
    assert answers[0]
    front.until("m", "ready")
    # Its engine went on.
    assert starts(rear) == start_count
