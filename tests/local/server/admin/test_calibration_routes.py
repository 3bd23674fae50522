"""A gateway measures its idle GPUs, and nothing is started there meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Fact, LaunchSpec
from gateway.hosts.process.asked_environment import run_inquiry_process
from gateway.measuring.calibration import calibrator, measurement
from tests.support.commands import fitserve
from tests.support.fake_cuda import fake_cuda
from tests.support.fake_nvml import two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.patience import hang_s
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, max_model_len=200_000)


@pytest.fixture(autouse=True)
def _driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told here of how much measurements vary: tests run beside each other."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_cuda(tmp_path / "lib", 2)))
    monkeypatch.setattr(measurement, "_MAX_SPREAD_SHARE", 1e9)
    monkeypatch.setattr(measurement, "_SAMPLE_S", 0.001)
    monkeypatch.setattr(measurement, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(measurement, "_MAX_SPREAD_SHARE_OF_SECONDS", 1e9)


async def test_a_measurement_is_a_fact_and_a_new_one_takes_its_place(
    tmp_path: Path,
) -> None:
    hardware = machine("2x3090")
    async with running(tmp_path, healthy, hardware=hardware, nvml=two_3090()) as gateway:

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)

        async def stored_facts() -> list[Fact]:
            rows = (await gateway.client.get("/admin/facts")).json()["data"]
            return [Fact.model_validate(row["fact"]) for row in rows if row["id"] is not None]

        result = await run("calibrate")
        assert result.returncode == 0, result.stderr
        assert [line.split()[1] for line in result.stdout.splitlines() if " GB/s " in line] == [
            "memory",
            "memory",
            "peer",
        ]
        assert "note: No engine is installed, so matrix products" in result.stdout
        first_stored_facts = await stored_facts()
        assert len(first_stored_facts) == 5
        document = json.loads((await run("calibrate", "--json")).stdout)
        second_stored_facts = await stored_facts()
        assert [fact.model_dump(mode="json") for fact in second_stored_facts] == document["facts"]
        assert [fact.scope for fact in second_stored_facts] == [
            fact.scope for fact in first_stored_facts
        ]
        assert "machine_speed" in (await run("facts", "ls")).stdout


async def test_a_gpu_with_an_engine_is_left_alone(tmp_path: Path) -> None:
    hardware = machine("2x3090")
    async with running(tmp_path, healthy, hardware=hardware, nvml=two_3090()) as gateway:
        await gateway.add(
            "m", model_folder(tmp_path / "model", **LLAMA_8B), engines=["vllm==0.26.0"], gpus=1
        )
        await gateway.until("m", "ready")
        ((gpu,),) = (engine.spec.gpus for engine in gateway.world.engines.values())
        document = (await gateway.client.post("/admin/calibrate")).json()
        assert document["left_alone"] == {
            gpu: "m runs on it: remove it (`fitserve rm m`) and add it again afterwards"
        }
        assert {fact["scope"]["gpus"] for fact in document["facts"]} == {
            gpu.uuid for gpu in hardware.gpus
        } - {gpu}


async def test_nothing_is_started_on_gpus_that_are_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_event, goes_on = asyncio.Event(), asyncio.Event()

    async def hold_answer(*arguments: Any) -> AsyncGenerator[bytes, None]:
        begin_event.set()
        await goes_on.wait()
        async with aclosing(run_inquiry_process(*arguments)) as lines:
            async for line in lines:
                yield line

    monkeypatch.setattr(calibrator, "run_inquiry_process", hold_answer)
    async with running(tmp_path, healthy, hardware=machine("2x3090"), nvml=two_3090()) as gateway:
        measuring = asyncio.create_task(gateway.client.post("/admin/calibrate"))
        await asyncio.wait_for(begin_event.wait(), hang_s())
        second_answer = await gateway.client.post("/admin/calibrate")
        assert (
            second_answer.status_code,
            "measured already" in second_answer.json()["error"]["message"],
        ) == (
            409,
            True,
        )
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        wish = {"name": "m", "source": str(source), "engines": ["vllm==0.26.0"]}
        assert (await gateway.client.post("/admin/plan", json=wish)).json()["plans"] == []
        goes_on.set()
        assert (await measuring).status_code == 200
        assert (await gateway.client.post("/admin/plan", json=wish)).json()["plans"]


async def test_a_machine_without_gpus_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        answer = await gateway.client.post("/admin/calibrate")
        assert (answer.status_code, "no GPU to measure" in answer.json()["error"]["message"]) == (
            409,
            True,
        )
