"""How far a start is: shown everywhere, and a start that moves is never given up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from gateway.hosts.memory import World
from gateway.hosts.twin import EngineScript
from tests.running import Running, model_folder, running

pytestmark = [pytest.mark.local, pytest.mark.anyio]

LOG = (Path(__file__).parent / "logs" / "healthy-vllm-0.26.0-serving.log").read_text().splitlines()


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def seen(gateway: Running, state: str = "ready") -> list[str]:
    """What `fitserve ps` shows (the list) until the model is in this state; the same stands in the model's own view."""
    said: list[str] = []
    async with asyncio.timeout(30):
        while True:
            (listed,) = (await gateway.client.get("/admin/models")).json()["data"]
            if listed["state"] == state:
                return said
            if not said or said[-1] != listed["detail"]:
                said.append(listed["detail"])
            shown = await gateway.show("m")
            assert shown["state"] != "starting" or shown["replicas"][0]["busy_with"]
            await asyncio.sleep(0.005)


def in_order(said: list[str], *expected: str) -> None:
    places = [next((place for place, one in enumerate(said) if wanted in one), -1) for wanted in expected]
    assert -1 not in places, (expected, said)
    assert places == sorted(places), said


async def test_every_phase_is_shown_from_the_pull_to_the_last_check(tmp_path: Path) -> None:
    world = World()
    world.pull = ((0, "pulling engine:1: 0.5 of 9.0 GiB"), (0.15, "pulling engine:1: 8.5 of 9.0 GiB"), (0.15, "unpacking"))

    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, lines=tuple((0.15, line) for line in LOG), prefill_tokens_per_second=10_000)

    async with running(tmp_path, slow, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        said = await seen(gateway)
    in_order(
        said,
        "pulling engine:1: 0.5 of 9.0 GiB",
        "pulling engine:1: 8.5 of 9.0 GiB",
        "loading weights",
        "compiling",
        "capturing graphs",
        "verifying: ",
    )
    assert any("verifying: a prompt of" in one for one in said)


async def test_a_pull_that_moves_may_take_longer_than_the_patience(tmp_path: Path) -> None:
    world = World()
    world.pull = tuple((0.2, f"pulling engine:1: {number} of 10 GiB") for number in range(10))
    async with running(tmp_path, healthy, world, start_timeout_s=0.5) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view = await gateway.until("m", "ready", 15)
        assert len(view["attempts"]) == 1


async def test_a_pull_that_stands_still_fails_with_what_was_last_heard_and_is_tried_again(tmp_path: Path) -> None:
    world = World()
    world.pull = ((0, "pulling engine:1: 3 of 10 GiB"), *((0.1, "pulling engine:1: 3 of 10 GiB"),) * 600)
    async with running(tmp_path, healthy, world, start_timeout_s=0.5) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view = await gateway.until("m", "ready", 15)
        first, second = view["attempts"]
        assert first["failure"]["kind"] == "stalled"
        assert "3 of 10 GiB" in first["failure"]["message"]
        assert first["fingerprint"] == second["fingerprint"]
        assert len(world.engines) == 1


async def test_an_engine_that_prints_may_take_longer_than_the_patience_and_one_that_does_not_is_given_up(
    tmp_path: Path,
) -> None:
    def talking(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, lines=tuple((0.3, f"INFO shard {number}") for number in range(10)))

    async with running(tmp_path / "one", talking, start_timeout_s=1.2) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        assert len((await gateway.until("m", "ready", 15))["attempts"]) == 1

    def silent(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, start_delay_s=60)

    async with running(tmp_path / "two", silent, start_timeout_s=0.5) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        # The plan, and one careful try; then it says why and stops: never the same plan for the same cause.
        view = await gateway.until("m", "no_plan", 20)
        assert [attempt["failure"]["kind"] for attempt in view["attempts"]] == ["start_timeout", "start_timeout"]
        assert len({attempt["fingerprint"] for attempt in view["attempts"]}) == 2


async def test_a_removed_model_ends_its_pull(tmp_path: Path) -> None:
    world = World()
    world.pull = ((0, "pulling engine:1: 3 of 10 GiB"), (600, "never"))
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        async with asyncio.timeout(10):
            while "pulling" not in (await gateway.show("m"))["detail"]:
                await asyncio.sleep(0.02)
        await gateway.client.delete("/admin/models/m")
        await gateway.gone("m", 5)
        assert not world.engines
