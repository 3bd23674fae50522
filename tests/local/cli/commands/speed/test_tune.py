"""`fitserve tune` as users type it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.measuring.tuning import plan_search
from tests.support.commands import fitserve
from tests.support.patience import hang_s
from tests.support.tuned_models import add_model, lone_attempt, paced_script, tune, wait_for_end

pytestmark = pytest.mark.anyio

FAST = "--max-num-batched-tokens=4096"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures without rest."""
    monkeypatch.setattr(plan_search, "_POLL_S", 0.02)
    monkeypatch.setattr(plan_search, "_MEASUREMENT_S", 0.01)


async def test_the_best_plan_is_shown_with_the_command_that_takes_it(tmp_path: Path) -> None:
    async with tune(tmp_path, paced_script(FAST)) as gateway:
        old_model = await add_model(gateway, tmp_path)

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)

        result = await run("tune", "m")
        assert result.returncode == 0, result.stderr
        assert "the served plan" in result.stdout
        assert "4,096 tokens in a batch" in result.stdout
        # No question is asked without a terminal, and no plan is taken.
        assert "--arg max-num-batched-tokens=4096" in result.stderr
        assert (await lone_attempt(gateway))["id"] == old_model["id"]
        assert (await gateway.show("m"))["wish"]["args"] == {}

        result = await run("tune", "m", "--apply", "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["applied"]
        assert (await gateway.client.get("/admin/models/m/tune")).json()["applied"]


async def test_a_search_without_room_and_terminal_names_the_option(tmp_path: Path) -> None:
    async with tune(tmp_path, paced_script(FAST), "3090") as gateway:
        old_model = await add_model(gateway, tmp_path)
        result = await asyncio.to_thread(fitserve, "tune", "m", FITSERVE_URL=gateway.url)
        assert result.returncode == 1
        assert "--offline" in result.stderr
        assert (await lone_attempt(gateway))["id"] == old_model["id"]


async def test_ctrl_c_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    async with tune(tmp_path, paced_script(FAST, start_delay_s=3600)) as gateway:
        old_model = await add_model(gateway, tmp_path)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.__main__",
            "tune",
            "m",
            env={**os.environ, "FITSERVE_URL": gateway.url},
            stderr=subprocess.DEVNULL,
        )
        async with asyncio.timeout(hang_s()):
            while not any(FAST in engine.spec.argv for engine in gateway.world.engines.values()):
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert await process.wait() != 0
        assert (await wait_for_end(gateway))["state"] == "stopped"
        assert (await lone_attempt(gateway))["id"] == old_model["id"]
