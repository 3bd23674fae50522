"""Figures of engines on the gateway's own page of metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from tests.support.fake_nvml import two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

COUNTS = {
    "num_requests_running": 3.0,
    "num_requests_waiting": 2.0,
    "kv_cache_usage_perc": 0.1,
    "num_preemptions_total": 1.0,
    "prompt_tokens_total": 100.0,
    "prompt_tokens_cached_total": 40.0,
    "generation_tokens_total": 50.0,
    "time_to_first_token_seconds_sum": 0.5,
    "time_to_first_token_seconds_count": 4.0,
    "inter_token_latency_seconds_sum": 2.0,
    "inter_token_latency_seconds_count": 40.0,
    "spec_decode_num_draft_tokens_total": 30.0,
    "spec_decode_num_accepted_tokens_total": 12.0,
}


def telling(spec: LaunchSpec) -> EngineScript:
    counts = tuple((f"vllm:{name}", value) for name, value in COUNTS.items())
    return EngineScript(model=spec.model, max_model_len=200_000, counts=counts)


async def page(gateway: Running, series_name: str) -> dict[str, float]:
    """The page of metrics, once it has this series."""
    async with asyncio.timeout(hang_s()):
        while True:
            lines = (await gateway.client.get("/metrics")).text.splitlines()
            values_by_series = {
                name: float(value)
                for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
            }
            if series_name in values_by_series:
                return values_by_series
            await asyncio.sleep(0.02)


async def test_the_series_of_an_engine_have_its_model_and_replica_and_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server.metrics.engine_series._READ_S", 0.05)
    world, labels = World(), '{model="m",replica="0"}'
    async with running(
        tmp_path, telling, world, hardware=machine("2x3090"), nvml=two_3090()
    ) as gateway:
        await gateway.add(
            "m", model_folder(tmp_path / "model", **LLAMA_8B), engines=["vllm==0.26.0"], gpus=1
        )
        await gateway.until("m", "ready")
        series = await page(gateway, f"fitserve_engine_generated_tokens_total{labels}")
        # The scripted engine counts with each look, so all have had as many looks.
        looks = series[f"fitserve_engine_generated_tokens_total{labels}"] / 50
        assert series[f"fitserve_engine_preemptions_total{labels}"] == looks
        assert series[f"fitserve_engine_prompt_tokens_total{labels}"] == 100 * looks
        assert series[f"fitserve_engine_cached_prompt_tokens_total{labels}"] == 40 * looks
        assert series[f"fitserve_engine_requests_running{labels}"] == 3 * looks
        assert series[f"fitserve_engine_kv_cache_use_ratio{labels}"] == pytest.approx(0.1 * looks)
        assert series[f"fitserve_engine_first_token_seconds_sum{labels}"] == pytest.approx(
            0.5 * looks
        )
        assert series[f"fitserve_engine_first_token_seconds_count{labels}"] == 4 * looks
        assert series[f"fitserve_engine_between_tokens_seconds_count{labels}"] == 40 * looks
        series = await page(gateway, f"fitserve_engine_draft_acceptance_ratio{labels}")
        assert series[f"fitserve_engine_draft_acceptance_ratio{labels}"] == pytest.approx(0.4)
        # No reader of the page asks an engine: one more reading, which was under way, may come.
        monkeypatch.setattr("gateway.server.metrics.engine_series._READ_S", 3600.0)
        request_count = sum(
            b"GET /metrics" in line for engine in world.engines.values() for line in engine.log
        )
        for _ in range(20):
            await gateway.client.get("/metrics")
        assert (
            sum(b"GET /metrics" in line for engine in world.engines.values() for line in engine.log)
            <= request_count + 2
        )
        await gateway.client.delete("/admin/models/m")
        await gateway.wait_until_gone("m")
        assert (
            "fitserve_engine_requests_running" + labels
            not in (await gateway.client.get("/metrics")).text
        )


async def test_the_metrics_show_load_and_errors_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.machine.gpu_watch._POLL_S", 0.02)
    nvml = two_3090()
    hot = nvml.cards[1]
    uuid = str(hot.uuid)
    hot.use, hot.temperature, hot.power, hot.throttles = 87, 91, 342_500, 0x40
    async with running(tmp_path, telling, hardware=machine("2x3090"), nvml=nvml) as gateway:
        series = await page(gateway, f'fitserve_gpu_throttled{{gpu="{uuid}",why="temperature"}}')
        assert (
            series[f'fitserve_gpu_info{{gpu="{uuid}",index="1",name="NVIDIA GeForce RTX 3090"}}']
            == 1
        )
        assert series[f'fitserve_gpu_use_ratio{{gpu="{uuid}"}}'] == 0.87
        assert series[f'fitserve_gpu_temperature_celsius{{gpu="{uuid}"}}'] == 91
        assert series[f'fitserve_gpu_power_watts{{gpu="{uuid}"}}'] == 342.5
        nvml.events.put((hot, 13))
        assert (await page(gateway, f'fitserve_gpu_errors_total{{gpu="{uuid}",xid="13"}}')) != {}
        nvml.events.put((hot, 79))
        assert (await page(gateway, f'fitserve_gpu_lost{{gpu="{uuid}"}}')) != {}
        async with asyncio.timeout(hang_s()):
            while True:
                answer = await gateway.client.get("/admin/events", params={"follow": "false"})
                kinds = [event["kind"] for event in answer.json()["data"]]
                if {"gpu.throttled", "gpu.error", "gpu.lost"} <= set(kinds):
                    break
                await asyncio.sleep(0.02)
        assert kinds.count("gpu.throttled") == kinds.count("gpu.error") == 1
