"""The speed that clients see corrects the expectation, over real sockets: engines whose counters
are scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.measuring.tuning import engine_traffic, measurements
from tests.support.fake_nvml import two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

WISH = {"engines": ["vllm==0.26.0"], "goal": "latency", "gpus": 1, "replicas": 1, "context": 4096}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks without rest."""
    monkeypatch.setattr(measurements, "_LOOK_S", 0.02)
    monkeypatch.setattr(engine_traffic, "READ_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_traffic, "_WARMUP_S", 0.0)


def series_between(token_s: float, **changes: float) -> tuple[tuple[str, float], ...]:
    """Between two looks one request after the other was answered, each token after so long."""
    counts = {
        "time_to_first_token_seconds_count": 2.0,
        "time_to_first_token_seconds_sum": 0.2,
        "request_queue_time_seconds_sum": 0.0,
        "inter_token_latency_seconds_count": 600.0,
        "inter_token_latency_seconds_sum": 600 * token_s,
        "generation_tokens_total": 602.0,
        "iteration_tokens_total_count": 602.0,
        "prompt_tokens_total": 200.0,
        "prompt_tokens_cached_total": 0.0,
        **changes,
    }
    return tuple((f"vllm:{name}", value) for name, value in counts.items())


async def wait_for_facts(gateway: Running) -> list[Any]:
    """The facts, once there are any."""
    async with asyncio.timeout(hang_s()):
        while True:
            rows = (await gateway.client.get("/admin/facts")).json()["data"]
            if facts := [row["fact"] for row in rows if row["fact"]["kind"] == "speed_ratio"]:
                return facts
            await asyncio.sleep(0.02)


async def wait_for_reading(world: World, times: int) -> None:
    """Until the counters of its engine were read so often."""
    async with asyncio.timeout(hang_s()):
        while (
            sum(b"GET /metrics" in line for engine in world.engines.values() for line in engine.log)
            < times
        ):
            await asyncio.sleep(0.02)


async def test_service_slower_than_expected_is_learned_and_shown(tmp_path: Path) -> None:
    """A token in 100 ms, where 22 were expected: half as much of it is expected of other kernels,
    so that plans with others come out better."""
    folder, world = model_folder(tmp_path / "model", **LLAMA_8B), World()

    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=400_000, counts=series_between(0.1))

    async with running(
        tmp_path, slow, world, hardware=machine("2x3090"), nvml=two_3090()
    ) as gateway:
        await gateway.add("m", folder, **WISH)
        view = await gateway.until("m", "ready")
        expected_speed = view["plan"]["speed"]["stream"]["value"]
        (fact,) = await wait_for_facts(gateway)
        assert fact["scope"]["figure"] == "stream"
        assert fact["scope"]["fingerprint"] == view["attempts"][0]["fingerprint"]
        assert fact["value"] == pytest.approx(1000 * 10 / expected_speed, rel=0.05)
        async with asyncio.timeout(hang_s()):
            while (speed := (await gateway.show("m"))["plan"]["speed"])["grade"] != "served":
                await asyncio.sleep(0.02)
        assert speed["stream"]["value"] == pytest.approx(10, rel=0.05)
        assert speed["total"]["value"] == view["plan"]["speed"]["total"]["value"]
        # The expectation for others is no higher than the measurements of similar plans.
        wish = {"name": "n", "source": str(folder), **WISH}
        decision = (await gateway.client.post("/admin/plan", json=wish)).json()
        assert decision["plans"][0]["speed"]["stream"]["value"] < expected_speed / 1.5


async def test_a_plan_served_much_slower_than_another_should_be_gets_a_rival(
    tmp_path: Path,
) -> None:
    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=400_000, counts=series_between(0.5))

    async with running(tmp_path, slow, hardware=machine("2x3090"), nvml=two_3090()) as gateway:
        wish = {"engines": ["vllm==0.26.0"], "goal": "latency", "gpus": "all"}
        await gateway.add("m", model_folder(tmp_path / "model", **LLAMA_8B), **wish)
        await gateway.until("m", "ready")
        async with asyncio.timeout(hang_s()):
            while (rival := (await gateway.show("m"))["rival"]) is None:
                await asyncio.sleep(0.02)
        assert rival["gain"] > 1.15
        assert "(served)" in rival["words"]


async def test_traffic_that_a_neighbour_disturbs_teaches_nothing(tmp_path: Path) -> None:
    """It answers a client all the while, on the same GPU."""
    world, hold = World(), tmp_path / "hold"

    def script(spec: LaunchSpec) -> EngineScript:
        counts = series_between(0.1) if spec.model == "m" else ()
        return EngineScript(
            model=spec.model,
            max_model_len=400_000,
            counts=counts,
            hold=hold if spec.model == "n" else None,
        )

    async with running(
        tmp_path, script, world, hardware=machine("3090"), nvml=two_3090()
    ) as gateway:
        small = {**WISH, "args": {"gpu-memory-utilization": 0.4}}
        folder = model_folder(tmp_path / "model")
        await gateway.add("n", folder, **small)
        await gateway.until("n", "ready")
        hold.touch()
        body = {"model": "n", "prompt": "hi", "max_tokens": 4}
        asking = asyncio.ensure_future(gateway.client.post("/v1/completions", json=body))
        await gateway.add("m", folder, **small)
        await gateway.until("m", "ready")
        await wait_for_reading(world, 30)
        rows = (await gateway.client.get("/admin/facts")).json()["data"]
        assert not asking.done()
        assert not [row for row in rows if row["fact"]["kind"] == "speed_ratio"]
        hold.unlink()
        assert (await asking).status_code == 200
        await wait_for_facts(gateway)


@pytest.mark.parametrize(
    "counts",
    [
        (),
        (("vllm:generation_tokens_total", -5.0),),
        series_between(0.1, generation_tokens_total=1e15),
        series_between(0.1, iteration_tokens_total_count=0.0),
        series_between(0.1, time_to_first_token_seconds_count=float("nan")),
    ],
)
async def test_an_engine_that_counts_nonsense_teaches_nothing(
    tmp_path: Path, counts: tuple[tuple[str, float], ...]
) -> None:
    world = World()

    def script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=400_000, counts=counts)

    async with running(
        tmp_path, script, world, hardware=machine("2x3090"), nvml=two_3090()
    ) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model", **LLAMA_8B), **WISH)
        await gateway.until("m", "ready")
        await wait_for_reading(world, 12)
        rows = (await gateway.client.get("/admin/facts")).json()["data"]
        assert not [row for row in rows if row["fact"]["kind"] == "speed_ratio"]
        assert (await gateway.show("m"))["state"] == "ready"
