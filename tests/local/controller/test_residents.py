"""More models than memory, in one process: loaded when they are asked, unloaded when idle, one for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gateway.domain import LaunchSpec
from gateway.domain.units import GIB
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import HANG_S
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

TWO_GPUS = machine("4xh100").only(lambda gpu: gpu.index < 2)
# Of this size one fits into a GPU.
LARGE = {**LLAMA_8B, "num_hidden_layers": 100}


@pytest.fixture(autouse=True)
async def short_residences() -> AsyncIterator[None]:
    with mock.patch("gateway.core.residence.LEAST_S", 0.2), mock.patch("gateway.core.residence.MOST_S", 0.2):
        yield


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, max_model_len=131072)


async def add(gateway: Running, folder: Path, name: str, **policy: Any) -> None:
    """A model that takes one GPU."""
    source = model_folder(folder / "model", **LARGE)
    await gateway.add(name, source, engines=["vllm==0.26.0"], gpus=1, check=False, replicas=1, policy=policy)


async def ask(gateway: Running, name: str, **fields: Any) -> Any:
    body = {"model": name, "prompt": "hi", "max_tokens": 3, **fields}
    async with asyncio.timeout(HANG_S):
        return await gateway.client.post("/v1/completions", json=body)


def loaded(world: World) -> set[str]:
    return {engine.spec.model for engine in world.engines.values() if engine.main_runs}


async def test_who_is_asked_and_finds_no_room_takes_the_place_of_the_least_recently_used(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        for name in "ab":
            await add(gateway, tmp_path, name)
            await gateway.until(name, "ready")
        await add(gateway, tmp_path, "c")
        view = await gateway.until("c", "stopped")
        assert "A request loads it all the same: " in view["detail"]
        assert (await ask(gateway, "a")).status_code == 200
        # All at once: each waits for the one engine that comes.
        answers = await asyncio.gather(*(ask(gateway, "c") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}, answers[0].text
        assert loaded(gateway.world) == {"a", "c"}
        view = await gateway.show("b")
        assert [attempt["state"] for attempt in view["attempts"]] == ["stopped"]
        assert (await ask(gateway, "b")).status_code == 200
        assert len(loaded(gateway.world)) == 2
        metrics = (await gateway.client.get("/metrics")).text
        assert 'fitserve_unloads_total{model="b",why="room"} 1' in metrics


async def test_engines_on_a_cpu_take_turns_in_its_ram(tmp_path: Path) -> None:
    """Of 8 GiB two are left free, and each engine takes more than three."""
    small = machine("cpu").evolve(ram_total_bytes=8 * GIB)
    args = {"kv-cache-memory-bytes": GIB + 1}
    async with running(tmp_path, healthy, hardware=small) as gateway:
        for name in "ab":
            await gateway.add(name, model_folder(tmp_path / "model"), args=args)
            await gateway.until(name, "ready" if name == "a" else "stopped")
        assert "a holds 3." in (await gateway.show("b"))["detail"]
        assert "FITSERVE_RAM_BYTES" in (await gateway.show("b"))["detail"]
        for name in "baba":
            assert (await ask(gateway, name)).status_code == 200
            assert loaded(gateway.world) == {name}


async def test_nobody_leaves_for_a_model_that_could_not_be_loaded_either(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        for name in "ab":
            await add(gateway, tmp_path, name, pinned=True)
            await gateway.until(name, "ready")
        await add(gateway, tmp_path, "c")
        await gateway.until("c", "no_plan")
        answer = await ask(gateway, "c")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
        assert loaded(gateway.world) == {"a", "b"}


async def test_an_idle_model_leaves_and_comes_back_when_it_is_asked(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m", keep_alive=0)
        view = await gateway.until("m", "stopped")
        assert (view["detail"], view["keep_alive"]) == ("it is loaded when it is asked", 0)
        answer = await ask(gateway, "m", stream=True)
        assert (answer.status_code, answer.text.count("[DONE]")) == (200, 1)
        view = await gateway.until("m", "stopped")
        assert [attempt["state"] for attempt in view["attempts"]] == ["stopped", "stopped"]
        assert not loaded(gateway.world)


async def test_what_an_engine_answers_is_finished_before_it_leaves_and_later_requests_wait(tmp_path: Path) -> None:
    hold = tmp_path / "hold"

    def holds(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=131072, hold=hold)

    async with running(tmp_path, holds, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m")
        await gateway.until("m", "ready")
        hold.touch()
        first = asyncio.create_task(ask(gateway, "m"))
        async with asyncio.timeout(HANG_S):
            while 'fitserve_requests_in_flight{model="m"} 1' not in (await gateway.client.get("/metrics")).text:
                await asyncio.sleep(0.02)
        assert (await gateway.client.post("/admin/models/m/stop")).status_code == 202
        view = await gateway.until("m", "stopping")
        assert "what it answers is finished first" in view["detail"]
        late = await ask(gateway, "m")
        assert late.status_code == 503
        assert loaded(gateway.world) == {"m"}
        hold.unlink()
        assert (await first).json()["usage"]["completion_tokens"] == 3
        await gateway.until("m", "stopped")
        assert not loaded(gateway.world)


async def test_a_stopped_model_stays_stopped_over_a_restart_until_it_is_started(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, healthy, world, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m")
        await gateway.until("m", "ready")
        await gateway.client.post("/admin/models/m/stop")
        await gateway.until("m", "stopped")
    async with running(tmp_path, healthy, world, hardware=TWO_GPUS) as gateway:
        view = await gateway.until("m", "stopped")
        assert view["detail"] == "stopped by its owner"
        assert (await ask(gateway, "m")).status_code == 503
        started = (await gateway.client.post("/admin/models/m/start")).json()
        assert (started["state"], started["detail"]) == ("starting", "its owner starts it")
        await gateway.until("m", "ready")
        assert (await ask(gateway, "m")).status_code == 200


async def test_a_client_that_leaves_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, start_delay_s=HANG_S)

    async with running(tmp_path, slow, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m", keep_alive="5m")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
        async with asyncio.timeout(HANG_S):
            while 'fitserve_requests_queued{model="m"} 0' not in (await gateway.client.get("/metrics")).text:
                await asyncio.sleep(0.02)
