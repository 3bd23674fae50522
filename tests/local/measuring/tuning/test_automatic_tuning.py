"""Another plan is tried where that is allowed, in a quiet hour: beside what serves, or in its
place, and only the better one stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.measuring.tuning import tuner
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import HANG_S, Clock, hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.versions import SGLANG_REF, VLLM_REF

pytestmark = pytest.mark.anyio

VERSIONS = [VLLM_REF, SGLANG_REF]
# The plans are expected to give 46 tokens/s.
SLOW, FAST = 25.0, 75.0
Script = Callable[[LaunchSpec], EngineScript]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and measures without rest."""
    monkeypatch.setattr(tuner, "_LOOK_S", 0.05)
    monkeypatch.setattr(tuner, "_MEASURED_S", 0.01)


def paced(first: float, second: float, **of_second: Any) -> Script:
    """The engine version that is started first has one pace, the other one another."""
    seen: list[str] = []

    def script(spec: LaunchSpec) -> EngineScript:
        name = str(spec.engine)
        seen.append(name)
        changes = {} if name == seen[0] else of_second
        return EngineScript(
            model=spec.model,
            max_model_len=400_000,
            tokens_per_second=first if name == seen[0] else second,
            **changes,
        )

    return script


async def added(gateway: Running, tmp_path: Path) -> Any:
    # A short context has short prompts and answers.
    folder = model_folder(tmp_path / "model", **{**LLAMA_8B, "max_position_embeddings": 32})
    await gateway.add(
        "m", folder, engines=VERSIONS, goal="latency", gpus=1, replicas=1, check=False
    )
    view = await gateway.until("m", "ready")
    return view["attempts"][0]


async def attempts(gateway: Running, *states: str) -> list[Any]:
    """All attempts, once they are in these states, and no other engine runs than that of the one
    that is ready."""
    found: list[Any] = []
    ready = states.index("ready")
    try:
        async with asyncio.timeout(hang_s()):
            while True:
                found = (await gateway.show("m"))["attempts"]
                alone = len(found) > ready and list(gateway.world.engines) == [
                    found[ready]["instance"]
                ]
                if tuple(one["state"] for one in found) == states and alone:
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError([(one["state"], one["engine"]) for one in found]) from None


async def answers(gateway: Running) -> bool:
    answer = await gateway.client.post(
        "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 1}
    )
    return answer.status_code == 200


def tuned(
    tmp_path: Path,
    script: Script,
    name: str = "2x3090",
    world: World | None = None,
    **settings: Any,
) -> Any:
    fields = {"auto_tune": True, "auto_tune_quiet_s": 0.1, **settings}
    return running(tmp_path, script, world, hardware=machine(name), **fields)


async def test_a_faster_plan_is_verified_beside_the_old_one_and_takes_its_place(
    tmp_path: Path,
) -> None:
    async with tuned(tmp_path, paced(SLOW, FAST)) as gateway:
        old = await added(gateway, tmp_path)
        first, second = await attempts(gateway, "stopped", "ready")
        assert first["id"] == old["id"]
        assert first["engine"] != second["engine"]
        # It was ready before the old one ended: clients were served all the time.
        assert second["ready_at"] <= first["ended_at"]
        assert (await gateway.show("m"))["state"] == "ready"
        assert await answers(gateway)
        benches = (await gateway.client.get("/admin/models/m/bench")).json()["data"]
        assert [one["fingerprint"] for one in benches] == [
            first["fingerprint"],
            second["fingerprint"],
        ]
        assert benches[1]["stream"] > benches[0]["stream"]


async def test_a_plan_that_is_no_faster_is_not_tried_again(tmp_path: Path) -> None:
    async with tuned(tmp_path, paced(SLOW, SLOW / 2)) as gateway:
        old = await added(gateway, tmp_path)
        first, second = await attempts(gateway, "ready", "stopped")
        assert first["id"] == old["id"]
        async with asyncio.timeout(hang_s()):
            while (await gateway.show("m"))["rival"] is not None:
                await asyncio.sleep(0.02)
        assert second["engine"] != first["engine"]
        await asyncio.sleep(0.5)
        assert len((await gateway.show("m"))["attempts"]) == 2


async def test_where_there_is_no_room_it_takes_the_place_and_gives_it_back(tmp_path: Path) -> None:
    async with tuned(tmp_path, paced(SLOW, SLOW / 2), "3090") as gateway:
        await added(gateway, tmp_path)
        first, second, third = await attempts(gateway, "stopped", "stopped", "ready")
        assert first["fingerprint"] == third["fingerprint"] != second["fingerprint"]
        # One after the other: there is no room for two.
        assert first["ended_at"] <= second["started_at"] + 1
        assert await answers(gateway)


async def test_where_the_other_one_fails_the_old_one_comes_back(tmp_path: Path) -> None:
    async with tuned(tmp_path, paced(SLOW, FAST, gibberish=True), "3090") as gateway:
        await added(gateway, tmp_path)
        first, second, third = await attempts(gateway, "stopped", "failed", "ready")
        assert first["fingerprint"] == third["fingerprint"]
        assert second["failure"]["kind"] == "gibberish"
        assert await answers(gateway)


async def test_nothing_is_tried_while_a_request_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, hold, paces = Clock(), tmp_path / "hold", paced(SLOW, FAST)
    monkeypatch.setattr(tuner, "time", clock)
    async with tuned(tmp_path, lambda spec: replace(paces(spec), hold=hold)) as gateway:
        await added(gateway, tmp_path)
        hold.touch()
        body = {"model": "m", "prompt": "hi", "max_tokens": 2, "stream": True}
        async with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            for _ in range(10):
                clock.now, looks = clock.now + HANG_S, clock.looks
                async with asyncio.timeout(hang_s()):
                    while clock.looks < looks + 3:
                        await asyncio.sleep(0.02)
            assert len((await gateway.show("m"))["attempts"]) == 1
            monkeypatch.setattr(tuner, "time", time)
            hold.unlink()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await attempts(gateway, "stopped", "ready")


async def test_it_is_off_unless_somebody_wants_it(tmp_path: Path) -> None:
    async with tuned(tmp_path, paced(SLOW, FAST), auto_tune=False) as gateway:
        await added(gateway, tmp_path)
        await asyncio.sleep(0.5)
        assert (await gateway.client.get("/admin/models/m/bench")).json()["data"] == []
        assert len((await gateway.show("m"))["attempts"]) == 1


async def test_a_gateway_that_ends_after_the_change_leaves_the_new_engine(tmp_path: Path) -> None:
    world, paces = World(), paced(SLOW, FAST)

    def deaf(spec: LaunchSpec) -> EngineScript:
        script = paces(spec)
        return replace(script, ignore_term=script.tokens_per_second == SLOW)

    async with tuned(tmp_path, deaf, world=world, stop_grace_s=HANG_S) as gateway:
        await added(gateway, tmp_path)
        async with asyncio.timeout(hang_s()):
            while [one["state"] for one in (await gateway.show("m"))["attempts"]] != [
                "stopped",
                "ready",
            ]:
                await asyncio.sleep(0.01)
        assert len(world.engines) == 2
    async with tuned(tmp_path, deaf, world=world, auto_tune=False) as gateway:
        await attempts(gateway, "stopped", "ready")
        assert await answers(gateway)


async def test_a_gateway_that_ends_in_a_trial_leaves_one_engine(tmp_path: Path) -> None:
    world = World()
    async with tuned(tmp_path, paced(SLOW, FAST), world=world) as gateway:
        old = await added(gateway, tmp_path)
        async with asyncio.timeout(hang_s()):
            while len(world.engines) < 2:
                await asyncio.sleep(0.01)
    async with tuned(tmp_path, paced(SLOW, FAST), world=world, auto_tune=False) as gateway:
        found = await attempts(gateway, "ready", "stopped")
        assert found[0]["id"] == old["id"]
        assert await answers(gateway)


@pytest.mark.parametrize("name", ["4x3090", "2x3090"])
async def test_replicas_are_tuned_one_after_the_other(tmp_path: Path, name: str) -> None:
    """Beside what serves where GPUs are free, else in its place; the other replica serves
    meanwhile."""
    async with tuned(tmp_path, paced(SLOW, FAST), name) as gateway:
        folder = model_folder(tmp_path / "model", **{**LLAMA_8B, "max_position_embeddings": 32})
        wish = {
            "engines": VERSIONS,
            "goal": "latency",
            "gpus": 2,
            "tensor_parallel": 1,
            "replicas": 2,
            "check": False,
        }
        await gateway.add("m", folder, **wish)
        served: list[set[str]] = []
        async with asyncio.timeout(hang_s()):
            while True:
                found = (await gateway.show("m"))["attempts"]
                ready = [one for one in found if one["state"] == "ready"]
                if len(ready) == 2:
                    served.append({one["engine"] for one in ready})
                if (
                    len(ready) == 2
                    and min(one["id"] for one in ready) > 2
                    and len(gateway.world.engines) == 2
                ):
                    break
                await asyncio.sleep(0.02)
        assert len(served[0]) == len(served[-1]) == 1
        assert served[0] != served[-1]
        assert {one["replica"] for one in ready} == {0, 1}
        assert await answers(gateway)
        # None ended before the other served, or the one that took its place: somebody always
        # answered.
        ended = sorted(one["ended_at"] for one in found if one["state"] == "stopped")
        came = sorted(one["ready_at"] for one in ready)
        assert came[0] <= ended[1]
