"""The gate of starts in a whole gateway; how engines on shared GPUs start is in
tests/local/test_boot_storm.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.local.controller.test_loop import TOO_LONG, context_of
from tests.support.patience import HANG_S, hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


async def both_replicas(gateway: Running) -> Any:
    async with asyncio.timeout(hang_s()):
        while True:
            view = await gateway.show("m")
            if [replica["state"] for replica in view["replicas"]] == ["ready", "ready"]:
                return view
            await asyncio.sleep(0.02)


async def test_a_plan_that_fails_fails_once_however_many_copies_there_are(tmp_path: Path) -> None:
    starts: list[int] = []

    def limited_script(spec: LaunchSpec) -> EngineScript:
        context = context_of(spec)
        starts.append(context)
        if context > 1024:
            return EngineScript(
                model=spec.model, lines=((0.2, TOO_LONG.format(asked=context)),), serve=False
            )
        return EngineScript(model=spec.model, max_model_len=context)

    async with running(tmp_path, limited_script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), replicas=2)
        view = await both_replicas(gateway)
        assert starts == [4096, 1024, 1024]
        kinds = sorted(
            attempt["failure"]["kind"] for attempt in view["attempts"] if attempt["failure"]
        )
        assert kinds == ["kv_too_small", "withdrawn"]


async def test_the_second_copy_of_a_new_plan_reports_its_wait(tmp_path: Path) -> None:
    starts: list[str] = []

    def slow(spec: LaunchSpec) -> EngineScript:
        starts.append(spec.name)
        return EngineScript(model=spec.model, start_delay_s=10 * HANG_S)

    async with running(tmp_path, slow) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), replicas=2)
        async with asyncio.timeout(hang_s()):
            words = "waits for m, which is started for the first time with this plan"
            while words not in [
                replica["busy_with"] for replica in (await gateway.show("m"))["replicas"]
            ]:
                await asyncio.sleep(0.02)
        assert len(starts) == 1
