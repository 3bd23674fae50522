"""`fitserve set` and `fitserve update` as users type them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.support.commands import fitserve
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


CHANGED = ("--max-context", "1024", "--alias", "other", "--dtype", "float32")


@asynccontextmanager
async def serving(folder: Path, specs: list[LaunchSpec]) -> AsyncIterator[Running]:
    """A gateway that serves m, and appends each start to specs. A context of 256 fails."""

    def script(spec: LaunchSpec) -> EngineScript:
        specs.append(spec)
        return EngineScript(model=spec.model, gibberish="--max-model-len=256" in spec.argv)

    async with running(folder, script) as gateway:
        await gateway.add("m", model_folder(folder / "model"))
        await gateway.until("m", "ready")
        yield gateway


async def run(gateway: Running, *arguments: str) -> Any:
    return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)


def changed_fields(wish: dict[str, Any]) -> tuple[Any, ...]:
    return wish["max_context"], wish["aliases"], wish["dtype"]


def templates(specs: list[LaunchSpec]) -> list[str]:
    """The texts of the chat templates that engines were started with."""
    items = (item for spec in specs for item in spec.argv if item.startswith("--chat-template"))
    return [Path(item.partition("=")[2]).read_text() for item in items]


async def test_options_are_set_on_the_command_line(tmp_path: Path) -> None:
    async with serving(tmp_path, []) as gateway:
        preview = await run(gateway, "set", "m", *CHANGED, "--dry-run")
        assert preview.returncode == 0, preview.stderr
        assert "max model len" in preview.stdout
        assert (await gateway.show("m"))["wish"]["max_context"] is None
        result = await run(gateway, "set", "m", *CHANGED, "--wait", "--json")
        assert result.returncode == 0, result.stderr
        assert changed_fields(json.loads(result.stdout)["wish"]) == (1024, ["other"], "float32")
        assert "up to date" in (await run(gateway, "update", "m")).stdout
        assert (await run(gateway, "set", "m")).returncode == 2
        assert (await run(gateway, "set", "m", "--gpus", "2", "--gpu", "0")).returncode == 2


async def test_options_are_unset_on_the_command_line(tmp_path: Path) -> None:
    async with serving(tmp_path, []) as gateway:
        result = await run(gateway, "set", "m", *CHANGED, "--wait")
        assert result.returncode == 0, result.stderr
        result = await run(gateway, "set", "m", "--unset", "dtype", "--unset", "alias", "--wait")
        assert result.returncode == 0, result.stderr
        assert changed_fields((await gateway.show("m"))["wish"]) == (1024, [], "auto")


async def test_a_chat_template_is_kept_with_the_wish_until_it_is_unset(tmp_path: Path) -> None:
    """The file is read once: engines start with the kept text, under a plain name."""
    specs: list[LaunchSpec] = []
    file = tmp_path / "a strange name!.jinja"
    file.write_text("{{ messages }}<tool_call>")
    async with serving(tmp_path, specs) as gateway:
        result = await run(gateway, "set", "m", "--chat-template", str(file), "--wait")
        assert result.returncode == 0, result.stderr
        assert "a strange name_.jinja (25 bytes, sha256 " in result.stdout
        file.unlink()
        chat_template = (await gateway.show("m"))["wish"]["chat_template"]
        assert (chat_template["text"], chat_template["name"]) == (
            "{{ messages }}<tool_call>",
            "a strange name_.jinja",
        )
        assert templates(specs) == [chat_template["text"]]
        result = await run(gateway, "set", "m", "--unset", "chat-template", "--wait")
        assert result.returncode == 0, result.stderr
        assert (await gateway.show("m"))["wish"]["chat_template"] is None
        assert templates(specs[-1:]) == []
        missing = await run(gateway, "set", "m", "--chat-template", str(file))
        assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)


async def test_a_failed_change_is_given_up_and_reported(tmp_path: Path) -> None:
    async with serving(tmp_path, []) as gateway:
        result = await run(gateway, "set", "m", "--max-context", "256", "--wait")
        assert result.returncode == 1
        assert "of m failed" in result.stderr
        assert "the last change failed" in (await run(gateway, "ps")).stdout
        assert "The last change failed" in (await run(gateway, "show", "m")).stdout
        assert "up to date" in (await run(gateway, "update", "m")).stdout


async def test_the_effect_of_a_context_is_shown_before_the_change(tmp_path: Path) -> None:
    async with serving(tmp_path, []) as gateway:
        limit = (await gateway.show("m"))["plan"]["max_model_len"]["value"]
        shorter = await run(gateway, "set", "m", "--context", "1k", "--dry-run")
        assert shorter.returncode == 0, shorter.stderr
        assert f"max model len {limit} 1024" in " ".join(shorter.stdout.split())
        beyond = await run(gateway, "set", "m", "--context", "99999999", "--dry-run")
        assert beyond.returncode == 3
        assert f"the model's own limit is {limit}" in " ".join(beyond.stdout.split())
        result = await run(gateway, "set", "m", "--context", "99999999")
        assert result.returncode == 3
        assert f"the model's own limit is {limit}" in " ".join(result.stderr.split())
        without = await run(gateway, "set", "m", "--max-context", "99999999", "--dry-run")
        assert f"max model len stays {limit}" in " ".join(without.stdout.split())
        outcome = await run(gateway, "set", "m", "--dtype", "auto")
        assert "no change" in outcome.stdout
        assert "BEFORE" not in outcome.stdout
