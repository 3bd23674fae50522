"""Models that share a GPU without a flag: engines that take and measure memory as vLLM does, on a
pretended RTX 3090."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.e2e.boot_storm import SMALL, BootStorm
from tests.e2e.conftest import wait_for
from tests.e2e.scripted import engines
from tests.support.makers import machine
from tests.support.memory_host import World
from tests.support.patience import hang_s, wait_until
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def model_view(storm: BootStorm, name: str) -> dict[str, Any]:
    view: dict[str, Any] = storm.gateway.show(name)
    return view


def ready(storm: BootStorm, *names: str) -> None:
    wait_for(
        f"{names} are ready",
        lambda: all(model_view(storm, name)["state"] == "ready" for name in names),
    )


def promised_bytes(view: dict[str, Any]) -> int:
    memory = view["plan"]["memory"]
    return int(memory["budget_bytes"] + memory["beside_bytes"])


def test_the_first_small_model_gives_surplus_cache_until_all_serve(
    tmp_path: Path,
) -> None:
    storm = BootStorm(tmp_path, models=5, gpus=1, snapshot="3090")
    total = storm.machine.gpus[0].total_bytes or 0
    try:
        storm.gateway.start()
        storm.add("m0")
        ready(storm, "m0")
        lone_model_view = model_view(storm, "m0")
        assert promised_bytes(lone_model_view) > 0.85 * total, "a lone model takes all free memory"
        for name in storm.names[1:]:
            storm.add(name)
            ready(storm, *[other_name for other_name in storm.names if other_name <= name])
        views = {name: model_view(storm, name) for name in storm.names}
        assert sum(map(promised_bytes, views.values())) <= total
        assert views["m0"]["plan"]["cap"]["models"][0] == "m1"
        assert all(view["plan"]["max_model_len"]["value"] >= 32768 for view in views.values())
        failures = [
            attempt["failure"]
            for view in views.values()
            for attempt in view["attempts"]
            if attempt["failure"]
        ]
        assert not failures, json.dumps(failures)
    finally:
        storm.close()


def test_a_share_of_the_user_is_asked_of_others_or_refused(
    tmp_path: Path,
) -> None:
    storm = BootStorm(tmp_path, models=2, gpus=1, snapshot="3090")
    share = {"args": {"gpu-memory-utilization": 0.6}}
    try:
        storm.gateway.start()
        storm.add("m0", **share, policy={"pinned": True})
        ready(storm, "m0")
        storm.add("m1", **share)
        wait_for("m1 has no plan", lambda: model_view(storm, "m1")["state"] == "no_plan")
        assert "gpu-memory-utilization=0.6 was set" in model_view(storm, "m1")["detail"]
        storm.gateway.client.patch(
            "/admin/models/m0", json={"policy": {"pinned": False, "keep_alive": "0"}}
        ).raise_for_status()
        ready(storm, "m1")
        assert all(not model_view(storm, name)["attempts"][0]["failure"] for name in storm.names)
    finally:
        storm.close()


def test_models_added_at_once_share_and_keep_their_parts_after_a_power_cut(
    tmp_path: Path,
) -> None:
    storm = BootStorm(tmp_path, models=4, gpus=1, snapshot="3090")
    try:
        storm.gateway.start()
        for name in storm.names:
            storm.add(name)
        ready(storm, *storm.names)
        before = {name: model_view(storm, name)["plan"]["cap"] for name in storm.names}
        assert before["m0"] is not None
        pids = [pid for family in engines(storm.gateway).values() for pid in family]
        storm.gateway.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        storm.gateway.start()
        storm.settle()
        views = {name: model_view(storm, name) for name in storm.names}
        assert {name: view["plan"]["cap"] for name, view in views.items()} == before
        assert sum(map(promised_bytes, views.values())) <= (storm.machine.gpus[0].total_bytes or 0)
        assert storm.summary.good, storm.summary
    finally:
        storm.close()


async def test_each_replica_keeps_gpus_and_plan_after_a_power_cut_in_any_start_order(
    tmp_path: Path,
) -> None:
    def script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=131072)

    async def wait_for_places(gateway: Running) -> dict[str, list[tuple[list[str], str]]]:
        """The memory of each copy by model, once all serve."""
        places = {}
        for name, copies in models.items():
            async with asyncio.timeout(hang_s()):
                while True:
                    view = await gateway.show(name)
                    if [replica["state"] for replica in view["replicas"]] == ["ready"] * copies:
                        break
                    await asyncio.sleep(0.02)
            plans = {
                (attempt["replica"], attempt["state"]): attempt["fingerprint"]
                for attempt in view["attempts"]
            }
            places[name] = [
                (replica["gpus"], plans[number, "ready"])
                for number, replica in enumerate(view["replicas"])
            ]
        return places

    world, hardware, models = World(), machine("4xh100"), {"first": 1, "last": 2}
    source = model_folder(tmp_path / "model", **SMALL)
    async with running(tmp_path, script, world, hardware=hardware) as gateway:
        for name, copies in (("first", 1), ("gone", 2), ("last", 2)):
            await gateway.add(
                name, source, engines=["vllm==0.26.0"], gpus=1, check=False, replicas=copies
            )
            await gateway.until(name, "ready")
        before = await wait_for_places(gateway)
        assert before["last"][1][0] == before["first"][0][0], "the second copy is in the last room"
        await gateway.client.delete("/admin/models/gone")
        await gateway.wait_until_gone("gone")
    for engine in world.engines.values():
        engine.kill()
    async with running(tmp_path, script, world, hardware=hardware) as gateway:
        assert await wait_for_places(gateway) == before
        # The same where one engine alone is lost.
        next(engine for engine in world.engines.values() if engine.spec.model == "last").kill()
        async with asyncio.timeout(hang_s()):
            while (
                len(
                    [
                        attempt
                        for attempt in (await gateway.show("last"))["attempts"]
                        if attempt["failure"]
                    ]
                )
                < 3
            ):
                await asyncio.sleep(0.02)
        assert await wait_for_places(gateway) == before


async def test_a_busy_model_gives_memory_after_its_answers_and_plans_list_the_taken_bytes(
    tmp_path: Path,
) -> None:
    hold = tmp_path / "hold"

    def script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, hold=hold)

    async with running(tmp_path, script, hardware=machine("3090")) as gateway:
        source = model_folder(tmp_path / "model", **SMALL)
        await gateway.add("first", source, engines=["vllm==0.26.0"])
        view_before = await gateway.until("first", "ready")
        response = await gateway.client.post(
            "/admin/plan", json={"name": "x", "source": str(source), "engines": ["vllm==0.26.0"]}
        )
        assert [take["model"] for take in response.json()["taken_offers"]] == ["first"]
        assert response.json()["taken_offers"][0]["words"].startswith("first gives 4")
        hold.touch()
        body = {"model": "first", "prompt": "a", "max_tokens": 8, "stream": True}
        async with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            await gateway.add("second", source, engines=["vllm==0.26.0"])
            view = await gateway.until("second", "starting")
            while "first gives" not in view["detail"]:
                view = await gateway.until("second", "starting")
            await asyncio.sleep(0.5)
            assert (await gateway.show("first"))["plan"]["cap"] is None, (
                "not before its answer is whole"
            )
            hold.unlink()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await gateway.until("second", "ready")
        after = await gateway.until("first", "ready")
        assert promised_bytes(after) < promised_bytes(view_before)
        assert after["plan"]["cap"]["models"] == ["second"]
        second = await gateway.show("second")
        assert promised_bytes(view_before) - promised_bytes(after) < 1.2 * promised_bytes(second), (
            "no more than is needed"
        )
        assert after["plan"]["max_model_len"]["value"] >= 32768


async def test_a_starting_model_gives_memory_and_its_taker_is_planned_meanwhile(
    tmp_path: Path,
) -> None:
    # The first plan of this model would never serve. The model waits until the other one starts.
    delays = iter((3600.0, 0.0))
    world, hold = World(), tmp_path / "hold"
    hold.touch()

    def script(spec: LaunchSpec) -> EngineScript:
        if spec.model != "first":
            return EngineScript(model=spec.model)
        return EngineScript(model=spec.model, start_delay_s=next(delays), hold=hold)

    source = model_folder(tmp_path / "model", **SMALL)
    async with running(tmp_path, script, world, hardware=machine("3090")) as gateway:
        await gateway.add("first", source, engines=["vllm==0.26.0"])
        async with asyncio.timeout(hang_s()):
            while not world.engines:
                await asyncio.sleep(0.02)
        view_before = await gateway.until("first", "starting")
        await gateway.add("second", source, engines=["vllm==0.26.0"])

        async def is_started() -> bool:
            return bool((await gateway.show("second"))["attempts"])

        await wait_until("the taker starts", is_started)
        hold.unlink()
        giver_view = await gateway.until("first", "ready")
        taker_view = await gateway.until("second", "ready")
        assert giver_view["plan"]["cap"]["models"] == ["second"]
        assert promised_bytes(giver_view) < promised_bytes(view_before)
        assert [(attempt["state"], attempt["failure"]) for attempt in giver_view["attempts"]] == [
            ("stopped", None),
            ("ready", None),
        ]
        assert [attempt["state"] for attempt in taker_view["attempts"]] == ["ready"]
        assert taker_view["attempts"][0]["started_at"] < giver_view["attempts"][1]["ready_at"]


async def test_one_of_two_copies_gives_on_its_own_gpu_and_the_other_serves_meanwhile(
    tmp_path: Path,
) -> None:
    def script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model)

    hardware = machine("2x3090")
    total = {gpu.uuid: gpu.total_bytes or 0 for gpu in hardware.gpus}
    async with running(tmp_path, script, hardware=hardware) as gateway:
        source = model_folder(tmp_path / "model", **SMALL)
        await gateway.add("pair", source, engines=["vllm==0.26.0"], gpus=1, replicas=2)
        await gateway.until("pair", "ready")
        going, answer_count = True, 0

        async def ask() -> None:
            nonlocal answer_count
            while going:
                answer = await gateway.client.post(
                    "/v1/completions", json={"model": "pair", "prompt": "a", "max_tokens": 2}
                )
                assert answer.status_code == 200, answer.text
                answer_count += 1

        client = asyncio.create_task(ask())
        await gateway.add("second", source, engines=["vllm==0.26.0"], gpus=1, replicas=1)
        second = await gateway.until("second", "ready")
        pair = await gateway.until("pair", "ready")
        going = False
        await client
        assert answer_count
        bytes_by_gpu: dict[str, int] = {}
        for view in (pair, second):
            for replica in view["replicas"]:
                (uuid,) = replica["gpus"]
                bytes_by_gpu[uuid] = bytes_by_gpu.get(uuid, 0) + replica["memory_bytes"]
        assert len(bytes_by_gpu) == 2
        assert all(count <= total[uuid] for uuid, count in bytes_by_gpu.items())
        stopped_attempts = [
            attempt for attempt in pair["attempts"] if attempt["state"] == "stopped"
        ]
        assert len(stopped_attempts) == 1, "one copy was started anew, and the other was left alone"
        assert (
            pair["replicas"][stopped_attempts[0]["replica"]]["gpus"]
            == second["replicas"][0]["gpus"]
        )
        assert [attempt["failure"] for view in (pair, second) for attempt in view["attempts"]] == [
            None
        ] * 4
