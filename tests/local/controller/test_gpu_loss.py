"""A GPU that fails under engines: they are started elsewhere, and it is used again when NVML reads
it healthy. NVML is a fake."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pynvml
import pytest

from gateway.domain import LaunchSpec
from tests.support.fake_nvml import FakeNvml, two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

NVML_LINE = "Failed to initialize NVML: Unknown Error"
ENGINE = ["vllm==0.26.0"]


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, max_model_len=200_000)


async def lost_gpus(gateway: Running, count: int) -> list[str]:
    """The gateway's words about lost GPUs, once there are so many of them."""
    async with asyncio.timeout(hang_s()):
        while True:
            document = (await gateway.client.get("/admin/hardware")).json()
            losses = [gpu["lost"] for gpu in document["gpus"] if gpu["lost"]]
            if len(losses) == count:
                return losses
            await asyncio.sleep(0.02)


async def start_engine(gateway: Running, tmp_path: Path) -> str:
    """The GPU of a small model's engine."""
    await gateway.add("m", model_folder(tmp_path / "model", **LLAMA_8B), engines=ENGINE, gpus=1)
    await gateway.until("m", "ready")
    ((gpu,),) = (engine.spec.gpus for engine in gateway.world.engines.values())
    return gpu


def card(nvml: FakeNvml, uuid: str) -> int:
    return [each_card.uuid for each_card in nvml.cards].index(uuid)


@pytest.mark.parametrize("loss", ["xid", "lost"])
async def test_an_engine_on_a_lost_gpu_is_started_on_another(tmp_path: Path, loss: str) -> None:
    nvml = two_3090()
    async with running(tmp_path, healthy, hardware=machine("2x3090"), nvml=nvml) as gateway:
        gpu = await start_engine(gateway, tmp_path)
        lost_card = nvml.cards[card(nvml, gpu)]
        if loss == "xid":
            nvml.events.put((lost_card, 79))
        lost_card.error = pynvml.NVML_ERROR_GPU_IS_LOST
        async with asyncio.timeout(hang_s()):
            while [attempt["state"] for attempt in (await gateway.show("m"))["attempts"]] != [
                "failed",
                "ready",
            ]:
                await asyncio.sleep(0.02)
        failure = (await gateway.show("m"))["attempts"][0]["failure"]
        assert failure["kind"] == "gpu_lost"
        assert failure["culprit"]["uuid"] == gpu
        if loss == "xid":
            assert (
                failure["culprit"]["xid"],
                "Xid 79 (GPU has fallen off the bus)" in failure["message"],
            ) == (79, True)
        ((other_gpu,),) = (engine.spec.gpus for engine in gateway.world.engines.values())
        assert other_gpu != gpu
        await lost_gpus(gateway, 1)
        # Once NVML reads it again it is used again.
        lost_card.error = None
        await lost_gpus(gateway, 0)
        nvml.events.put((nvml.cards[card(nvml, other_gpu)], 95))
        async with asyncio.timeout(hang_s()):
            while [attempt["state"] for attempt in (await gateway.show("m"))["attempts"]] != [
                "failed",
                "failed",
                "ready",
            ]:
                await asyncio.sleep(0.02)
        assert [engine.spec.gpus for engine in gateway.world.engines.values()] == [(gpu,)]


async def test_a_model_without_any_gpu_says_so_and_comes_back_with_the_gpu(
    tmp_path: Path,
) -> None:
    nvml = two_3090()
    async with running(tmp_path, healthy, hardware=machine("2x3090"), nvml=nvml) as gateway:
        await start_engine(gateway, tmp_path)
        for each_card in nvml.cards:
            each_card.error = pynvml.NVML_ERROR_GPU_IS_LOST
        view = await gateway.until("m", "no_plan")
        assert "GPU is lost" in view["detail"]
        assert "is not used" in view["detail"]
        assert not gateway.world.engines
        answer = await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
        assert answer.status_code == 503
        for each_card in nvml.cards:
            each_card.error = None
        await lost_gpus(gateway, 0)
        await gateway.until("m", "ready")


async def test_an_error_of_the_application_touches_no_engine(tmp_path: Path) -> None:
    nvml = two_3090()
    async with running(tmp_path, healthy, hardware=machine("2x3090"), nvml=nvml) as gateway:
        gpu = await start_engine(gateway, tmp_path)
        nvml.events.put((nvml.cards[card(nvml, gpu)], 31))
        async with asyncio.timeout(hang_s()):
            while not (
                notes := [note for note in (await hardware(gateway))["notes"] if "Xid 31" in note]
            ):
                await asyncio.sleep(0.02)
        assert "GPU memory page fault" in notes[0]
        assert [attempt["state"] for attempt in (await gateway.show("m"))["attempts"]] == ["ready"]


async def hardware(gateway: Running) -> dict[str, list[str]]:
    document: dict[str, list[str]] = (await gateway.client.get("/admin/hardware")).json()
    return document


async def test_a_gpu_taken_from_a_container_makes_the_container_anew(tmp_path: Path) -> None:
    """`systemctl daemon-reload` on a host whose cgroups systemd manages; restarting the container
    would not give it back."""
    world = World()
    names: list[str] = []

    def taken_script(spec: LaunchSpec) -> EngineScript:
        names.append(spec.name)
        is_lost = len(names) == 1
        return EngineScript(
            model=spec.model,
            max_model_len=200_000,
            lines=((0, NVML_LINE),) if is_lost else (),
            serve=not is_lost,
        )

    async with running(
        tmp_path, taken_script, world, hardware=machine("2x3090"), nvml=two_3090()
    ) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model", **LLAMA_8B), engines=ENGINE, gpus=1)
        view = await gateway.until("m", "ready")
        first, second = view["attempts"]
        assert first["failure"]["kind"] == "gpu_lost"
        assert first["failure"]["line"] == NVML_LINE
        # The same plan, since nothing was wrong with it, in a new container: names are never used
        # again.
        assert first["fingerprint"] == second["fingerprint"]
        assert len(set(names)) == 2
        assert list(world.engines) == [names[1]]
