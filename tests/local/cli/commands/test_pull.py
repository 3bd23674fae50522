"""`fitserve pull`: a repository in the cache of the gateway's machine, in a pipe and with a bar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import fitserve
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.model_files import sharded_model
from tests.support.patience import hang_s
from tests.support.run_scripts import script
from tests.support.running import running
from tests.support.typing_terminal import TypingTerminal

pytestmark = pytest.mark.anyio

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FakeHub({"org/name": FakeRepo(sharded_model())}) as hub:
        yield hub


async def test_a_repository_is_brought_here_and_a_second_pull_finds_it(
    server: FakeHub, tmp_path: Path
) -> None:
    async with running(
        tmp_path, script, hf_endpoint=server.url(), models_dir=tmp_path / "cache"
    ) as gateway:

        async def pull(*arguments: str) -> tuple[int, str, str]:
            result = await asyncio.to_thread(fitserve, "pull", *arguments, FITSERVE_URL=gateway.url)
            return result.returncode, result.stdout, result.stderr

        code, out, err = await pull("org/name")
        assert code == 0, err
        assert f"downloaded, at commit {COMMIT}" in out
        assert (tmp_path / f"cache/models--org--name/snapshots/{COMMIT}/{SHARD}").is_file()
        byte_count = server.sent_bytes()
        code, out, _ = await pull("org/name", "--json")
        assert json.loads(out)["commit"] == COMMIT
        assert len(server.gets(SHARD)) == 1
        assert server.sent_bytes() - byte_count < 64 * 1024
        code, _, err = await pull("org/other")
        assert code != 0
        assert "There is no model repository org/other" in err
        code, _, err = await pull("./folder")
        assert (code, "has no weights on a Hub" in err) == (2, True)


async def test_a_terminal_shows_a_bar_and_ctrl_c_ends_the_download(
    server: FakeHub, tmp_path: Path
) -> None:
    server.stalls[SHARD] = 0
    async with running(
        tmp_path, script, hf_endpoint=server.url(), models_dir=tmp_path / "cache"
    ) as gateway:

        def watch_download() -> None:
            with TypingTerminal(
                "pull", "org/name", FITSERVE_URL=gateway.url, columns=100
            ) as terminal:
                terminal.until("org/name")
                assert server.stalled.wait(hang_s())
                terminal.until("KiB")
                terminal.type("\x03")
                assert terminal.wait_for_exit() != 0

        await asyncio.to_thread(watch_download)
        server.resume.set()
        result = await asyncio.to_thread(fitserve, "pull", "org/name", FITSERVE_URL=gateway.url)
        assert result.returncode == 0, result.stderr
