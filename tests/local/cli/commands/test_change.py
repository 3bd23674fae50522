"""`fitserve set` and `fitserve update` as users type them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.local.cli.test_main import fitserve
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def started_with(item: str) -> str:
    return Path(item.partition("=")[2]).read_text()


async def test_a_model_is_changed_on_the_command_line(tmp_path: Path) -> None:
    specs: list[LaunchSpec] = []

    def script(spec: LaunchSpec) -> EngineScript:
        specs.append(spec)
        return EngineScript(model=spec.model, gibberish="--max-model-len=256" in spec.argv)

    async with running(tmp_path, script) as gateway:

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)

        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        result = await run("set", "m", "--max-context", "1024", "--alias", "other", "--dry-run")
        assert result.returncode == 0, result.stderr
        assert "max model len" in result.stdout
        assert (await gateway.show("m"))["wish"]["max_context"] is None
        done = await run(
            "set",
            "m",
            "--max-context",
            "1024",
            "--alias",
            "other",
            "--dtype",
            "float32",
            "--wait",
            "--json",
        )
        assert done.returncode == 0, done.stderr
        view = json.loads(done.stdout)
        assert (view["wish"]["max_context"], view["wish"]["aliases"], view["wish"]["dtype"]) == (
            1024,
            ["other"],
            "float32",
        )
        back = await run("set", "m", "--unset", "dtype", "--unset", "alias", "--wait")
        assert back.returncode == 0, back.stderr
        view = await gateway.show("m")
        assert (view["wish"]["max_context"], view["wish"]["aliases"], view["wish"]["dtype"]) == (
            1024,
            [],
            "auto",
        )
        # A chat template is read here and kept with the wish: the file is needed no more.
        file = tmp_path / "a strange name!.jinja"
        file.write_text("{{ messages }}<tool_call>")
        done = await run("set", "m", "--chat-template", str(file), "--wait")
        assert done.returncode == 0, done.stderr
        assert "a strange name_.jinja (25 bytes, sha256 " in done.stdout
        file.unlink()
        chat_template = (await gateway.show("m"))["wish"]["chat_template"]
        assert (chat_template["text"], chat_template["name"]) == (
            "{{ messages }}<tool_call>",
            "a strange name_.jinja",
        )
        started = [one for spec in specs for one in spec.argv if one.startswith("--chat-template")]
        assert [started_with(one) for one in started] == [chat_template["text"]]
        assert (await run("set", "m", "--unset", "chat-template", "--wait")).returncode == 0
        assert (await gateway.show("m"))["wish"]["chat_template"] is None
        assert not any("--chat-template" in one for one in specs[-1].argv)
        missing = await run("set", "m", "--chat-template", str(file))
        assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)
        # What fails is given up, and said.
        failed = await run("set", "m", "--max-context", "256", "--wait")
        assert failed.returncode == 1
        assert "of m failed" in failed.stderr
        assert "the last change failed" in (await run("ps")).stdout
        assert "The last change failed" in (await run("show", "m")).stdout
        assert "up to date" in (await run("update", "m")).stdout
        assert (await run("set", "m")).returncode == 2
        assert (await run("set", "m", "--gpus", "2", "--gpu", "0")).returncode == 2


async def test_the_effect_of_a_context_is_shown_before_the_change(tmp_path: Path) -> None:
    async with running(tmp_path, lambda spec: EngineScript(model=spec.model)) as gateway:

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)

        await gateway.add("m", model_folder(tmp_path / "model"))
        view = await gateway.until("m", "ready")
        limit = view["plan"]["max_model_len"]["value"]
        shorter = await run("set", "m", "--context", "1k", "--dry-run")
        assert shorter.returncode == 0, shorter.stderr
        assert f"max model len {limit} 1024" in " ".join(shorter.stdout.split())
        beyond = await run("set", "m", "--context", "99999999", "--dry-run")
        assert beyond.returncode == 3
        assert f"the model's own limit is {limit}" in " ".join(beyond.stdout.split())
        refused = await run("set", "m", "--context", "99999999")
        assert refused.returncode == 3
        assert f"the model's own limit is {limit}" in " ".join(refused.stderr.split())
        without = await run("set", "m", "--max-context", "99999999", "--dry-run")
        assert f"max model len stays {limit}" in " ".join(without.stdout.split())
        known = await run("set", "m", "--dtype", "auto")
        assert "no change" in known.stdout
        assert "BEFORE" not in known.stdout
