"""The main job without Docker: real vLLM on the CPU, the real OpenAI SDK, kills from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest

from gateway.demo import SENTENCE
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

START_S = 240


@pytest.fixture(scope="module")
def ready(gateway: Gateway, demo_model: Path) -> Gateway:
    """The demo model, added by the command line and served by the real engine."""
    added = gateway.cli("add", "demo", str(demo_model), "--wait")
    assert added.returncode == 0, added.stderr
    return gateway


def sdk(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def engine_pids(gateway: Gateway) -> set[int]:
    """Processes whose environment carries the marker of this gateway's engines."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (
                    str(gateway.data).encode() in (entry / "cmdline").read_bytes()
                    and b"vllm" in (entry / "cmdline").read_bytes()
                ):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def test_the_sdk_gets_an_answer_streamed_and_whole(ready: Gateway) -> None:
    with sdk(ready) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
        whole = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0)
        text = whole.choices[0].message.content or ""
        assert text
        assert SENTENCE.startswith(text)
        stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == text
        completion = client.completions.create(model="demo", prompt="Hello", max_tokens=12, temperature=0, logprobs=1)
        assert completion.choices[0].text == text
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="demo", prompt="x" * 5000, max_tokens=1)


def test_bytes_of_engine_and_gateway_are_the_same(ready: Gateway) -> None:
    (attempt,) = [one for one in ready.show("demo")["attempts"] if one["state"] == "ready"]
    record = next((ready.data / "instances").glob("*.json")).read_text()
    port = record.split('"port":')[1].split(",")[0].split("}")[0].strip()
    body = {
        "model": "demo",
        "prompt": "Hello",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answers = []
    for base in (f"http://127.0.0.1:{port}", ready.url):
        with httpx.stream(
            "POST", f"{base}/v1/completions", json=body, headers={"x-request-id": "same"}, trust_env=False
        ) as response:
            raw = b"".join(response.iter_raw())
        lines = [line for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
        assert raw.endswith(b"data: [DONE]\n\n")
        events = [line.partition(b'"choices"')[2] for line in lines]
        # A busy engine puts more than one token into an event, so what surrounds the text is compared, and the text as a whole.
        text = b"".join(event.partition(b'"text":"')[2].partition(b'"')[0] for event in events)
        answers.append((text, {event.replace(event.partition(b'"text":"')[2].partition(b'"')[0], b"") for event in events}))
    assert answers[0] == answers[1]
    assert answers[0][0]
    assert attempt["grade"] == "verified"


def test_the_command_line_tells_the_whole_story(ready: Gateway) -> None:
    assert "demo" in ready.cli("ps").stdout
    shown = ready.cli("show", "demo")
    assert shown.returncode == 0
    assert "tensor parallel" in shown.stdout
    assert "Attempts" in shown.stdout
    log = ready.cli("logs", "demo", "--tail", "2000").stdout
    assert "vLLM" in log
    assert ready.cli("show", "nothing").returncode == 1
    plan = ready.cli("plan", "/does/not/exist")
    assert plan.returncode == 1
    assert "There is no folder" in plan.stderr


def test_a_killed_gateway_adopts_its_engine_within_five_seconds(ready: Gateway) -> None:
    before = engine_pids(ready)
    assert before
    ready.kill()
    began = time.monotonic()
    ready.start()
    ready.until("demo", "ready", 5)
    assert time.monotonic() - began < 5
    assert engine_pids(ready) == before
    assert len(ready.show("demo")["attempts"]) == 1
    with sdk(ready) as client:
        assert client.completions.create(model="demo", prompt="Hello", max_tokens=3).choices[0].text


def test_a_killed_engine_is_noticed_and_started_again(ready: Gateway) -> None:
    before = engine_pids(ready)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for("not ready", lambda: ready.show("demo")["state"] != "ready", 5)
    answer = ready.client.post("/v1/completions", json={"model": "demo", "prompt": "x"})
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    view = ready.until("demo", "ready", START_S)
    assert [attempt["state"] for attempt in view["attempts"]] == ["failed", "ready"]
    assert not before & engine_pids(ready)


def test_a_killed_worker_of_the_engine_is_a_failure_though_the_engine_exits_with_0(ready: Gateway) -> None:
    """vLLM's server ends with exit code 0 when its engine core is killed: github.com/vllm-project/vllm/issues/48966"""
    instance = ready.show("demo")["attempts"][-1]["instance"]
    family = [pid for pids in engines(ready).values() for pid in pids]
    (worker,) = [pid for pid in family if "EngineCore" in Path(f"/proc/{pid}/comm").read_text() + _command(pid)]
    os.kill(worker, signal.SIGKILL)
    wait_for("not ready", lambda: ready.show("demo")["state"] != "ready", 30)
    view = ready.until("demo", "ready", START_S)
    failed = next(attempt for attempt in view["attempts"] if attempt["instance"] == instance)
    assert failed["failure"]["kind"] in ("killed", "exited")
    assert failed["failure"]["line"]
    assert list(engines(ready)) == [view["attempts"][-1]["instance"]]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def test_a_removed_model_leaves_no_process(ready: Gateway) -> None:
    removed = ready.cli("rm", "demo", "--wait")
    assert removed.returncode == 0, removed.stderr
    wait_for("no engine processes", lambda: not engine_pids(ready), 10)
