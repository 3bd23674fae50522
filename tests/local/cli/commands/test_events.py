"""`fitserve events` against a whole gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import fitserve
from tests.support.patience import hang_s
from tests.support.run_scripts import script
from tests.support.running import model_folder, running

pytestmark = pytest.mark.anyio


async def test_past_events_are_printed_with_their_proof_and_new_ones_follow(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        command = [
            sys.executable,
            "-m",
            "gateway.__main__",
            "events",
            "-f",
            "--model",
            "m",
            "--json",
        ]
        environment = {**os.environ, "FITSERVE_URL": gateway.url}
        following = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=subprocess.PIPE
        )
        assert following.stdout is not None
        kinds: list[str] = []
        async with asyncio.timeout(hang_s()):
            while "engine.ready" not in kinds:
                kinds.append(json.loads(await following.stdout.readline())["kind"])
            await gateway.client.delete("/admin/models/m")
            while "model.removed" not in kinds:
                kinds.append(json.loads(await following.stdout.readline())["kind"])
        following.terminate()
        await following.wait()
        assert kinds[:2] == ["model.added", "plan.chosen"]
        result = await asyncio.to_thread(fitserve, "events", "-n", "2", FITSERVE_URL=gateway.url)
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert len(lines) == 2
        assert "model.removed" in lines[-1]
        assert lines[-1].endswith("m is removed.")
