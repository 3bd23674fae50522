"""The main job without Docker: real vLLM on the CPU, the real OpenAI SDK, kills from outside."""

from __future__ import annotations

import json
import os
import signal
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import httpx
import openai
import pytest

from gateway.cli.demo.checkpoint import SENTENCE
from tests.e2e.conftest import START_S, Gateway, wait_for, with_abilities
from tests.e2e.scripted import engines
from tests.support.browser import chromium, visit
from tests.support.patience import hang_s

pytestmark = pytest.mark.engine


@pytest.fixture
def ready(serving_demo: Gateway) -> Gateway:
    return serving_demo


def serving(gateway: Gateway) -> str:
    """The instance that serves the demo model."""
    name: str = gateway.show("demo")["attempts"][-1]["instance"]
    return name


def sdk(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def engine_pids(gateway: Gateway) -> set[int]:
    """Processes whose environment carries the marker of this gateway's engines."""
    pids = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (
                    str(gateway.data).encode() in (entry / "cmdline").read_bytes()
                    and b"vllm" in (entry / "cmdline").read_bytes()
                ):
                    pids.add(int(entry.name))
            except OSError:
                continue
    return pids


def listening(pids: list[int]) -> list[IPv4Address | IPv6Address]:
    """The addresses at which these processes listen, as the kernel has it."""
    sockets = {
        str(link.readlink())
        for pid in pids
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink()
    }
    open_sockets = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                address = local.partition(":")[0]
                words = [
                    bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)
                ]
                open_sockets.append(ip_address(b"".join(words)))
    return open_sockets


def test_the_sdk_gets_an_answer_streamed_and_whole(ready: Gateway) -> None:
    assert ready.show("demo")["attempts"][-1]["grade"] == "verified"
    with sdk(ready) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [
            {"role": "user", "content": "Hello"}
        ]
        whole = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=12, temperature=0
        )
        text = whole.choices[0].message.content or ""
        assert text
        assert SENTENCE.startswith(text)
        stream = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=12, temperature=0, stream=True
        )
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            == text
        )
        completion = client.completions.create(
            model="demo", prompt="Hello", max_tokens=12, temperature=0, logprobs=1
        )
        assert completion.choices[0].text == text
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="demo", prompt="x" * 5000, max_tokens=1)


def test_a_real_engine_keeps_responses(ready: Gateway) -> None:
    responses = sdk(ready).responses
    first = responses.create(model="demo", input="Hello", max_output_tokens=4)
    assert responses.retrieve(first.id).id == first.id
    following = responses.create(
        model="demo", input="and", previous_response_id=first.id, max_output_tokens=4
    )
    assert following.previous_response_id == first.id
    dropped = responses.create(model="demo", input="x", store=False, max_output_tokens=4)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(dropped.id)
    later = responses.create(model="demo", input="x", background=True, max_output_tokens=4)
    assert responses.retrieve(later.id).id == later.id


def test_the_command_line_tells_the_whole_story(ready: Gateway) -> None:
    assert "demo" in ready.cli("ps").stdout
    with_abilities(ready, "demo")
    result = ready.cli("show", "demo")
    assert result.returncode == 0
    assert "choices are defaults" in result.stdout
    assert "tensor parallel" in ready.cli("show", "demo", "--all").stdout
    assert "answers by a schema  proven" in result.stdout
    assert "Attempts" in result.stdout
    log = ready.cli("logs", "demo", "--tail", "2000").stdout
    assert "vLLM" in log
    assert ready.cli("show", "nothing").returncode == 1
    plan = ready.cli("plan", "/does/not/exist")
    assert plan.returncode == 1
    assert "There is no folder" in plan.stderr


def test_the_page_shows_a_real_engine_and_talks_with_the_model(ready: Gateway) -> None:
    with chromium() as browser, visit(browser, ready.url) as page:
        page.go("#/models/demo")
        page.sees("concurrent")
        page.tab.locator("summary", has_text="Why").click()
        page.check("real-engine")
        page.tab.get_by_role("link", name="Log").click()
        page.sees("Application startup complete")
        page.tab.get_by_role("navigation", name="Of this model").get_by_role(
            "link", name="Chat"
        ).click()
        page.tab.get_by_label("Message").fill("What do you say?")
        page.tab.keyboard.press("Enter")
        page.sees(SENTENCE)
        page.tab.get_by_role("button", name="Stop").last.click()
        page.sees("Stopped.")


def test_the_speed_of_a_model_is_measured_and_kept(ready: Gateway) -> None:
    result = ready.cli(
        "bench", "demo", "--seconds", "0.2", "--concurrency", "1", "--concurrency", "2", "--json"
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["not_learned"] == ""
    assert [level["concurrency"] for level in document["bench"]["levels"]] == [1, 2]
    assert document["bench"]["stream"] > 1
    facts = ready.client.get("/admin/facts").json()["data"]
    assert [
        row for row in facts if row["fact"]["kind"] == "speed_measured" and row["stale"] is None
    ]


def test_no_other_machine_reaches_an_engine(ready: Gateway) -> None:
    """It listens on loopback alone, and so does all that it opens for its own processes."""
    family = [pid for pids in engines(ready).values() for pid in pids]
    addresses = listening(family)
    assert addresses
    assert all(address.is_loopback for address in addresses), addresses


def test_no_other_user_of_the_machine_gets_an_answer_of_an_engine(ready: Gateway) -> None:
    """The key is in the closed record of the process, and in no command line."""
    record = json.loads((ready.data / "instances" / f"{serving(ready)}.json").read_text())
    engine = f"http://127.0.0.1:{record['port']}/v1/completions"
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
    assert httpx.post(engine, json=body, trust_env=False, timeout=hang_s()).status_code == 401
    answer = httpx.post(
        engine,
        json=body,
        headers={"authorization": f"Bearer {record['key']}"},
        trust_env=False,
        timeout=hang_s(),
    )
    assert answer.status_code == 200
    assert not [pid for pid in engine_pids(ready) if record["key"] in _command(pid)]
    assert record["key"] not in ready.cli("logs", "demo").stdout


def test_a_killed_gateway_adopts_its_engine(ready: Gateway) -> None:
    pids_before, attempts = engine_pids(ready), ready.show("demo")["attempts"]
    assert pids_before
    ready.kill()
    ready.start()
    ready.until("demo", "ready")
    with sdk(ready) as client:
        assert client.completions.create(model="demo", prompt="Hello", max_tokens=3).choices[0].text
    assert engine_pids(ready) == pids_before
    assert ready.show("demo")["attempts"] == attempts


def test_a_killed_engine_is_noticed_and_started_again(ready: Gateway) -> None:
    pids_before, instance = engine_pids(ready), serving(ready)
    for pid in pids_before:
        os.kill(pid, signal.SIGKILL)

    def refusal() -> openai.APIStatusError | None:
        try:
            with sdk(ready) as client:
                client.completions.create(model="demo", prompt="x")
        except openai.APIStatusError as error:
            return error if error.status_code == 503 else None
        return None

    assert (
        "retry-after"
        in wait_for("clients are told to come back", refusal, every_s=0).response.headers
    )
    ready.wait_for_failure("demo", instance)
    ready.until("demo", "ready", START_S)
    assert serving(ready) != instance
    assert not pids_before & engine_pids(ready)


def test_a_killed_worker_of_the_engine_is_a_failure_though_the_engine_exits_with_0(
    ready: Gateway,
) -> None:
    """vLLM's server ends with exit code 0 when its engine core is killed:
    github.com/vllm-project/vllm/issues/48966"""
    instance = serving(ready)
    family = [pid for pids in engines(ready).values() for pid in pids]
    (worker,) = [
        pid
        for pid in family
        if "EngineCore" in Path(f"/proc/{pid}/comm").read_text() + _command(pid)
    ]
    os.kill(worker, signal.SIGKILL)
    ready.wait_for_failure("demo", instance)
    view = ready.until("demo", "ready", START_S)
    failure = next(attempt for attempt in view["attempts"] if attempt["instance"] == instance)
    assert failure["failure"]["kind"] in ("killed", "exited")
    assert failure["failure"]["line"]
    assert list(engines(ready)) == [serving(ready)]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
