"""`fitserve bench` from the command line to the next plan, with engines whose pace is scripted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.support.commands import fitserve
from tests.support.fake_nvml import two_3090
from tests.support.makers import LLAMA_8B, machine
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

SLOW = 300.0


def engine(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, max_model_len=400_000)


async def bench(gateway: Running, *arguments: str) -> Any:
    result = await asyncio.to_thread(
        fitserve,
        "bench",
        "m",
        "--seconds",
        "0.1",
        "--concurrency",
        "1",
        *arguments,
        FITSERVE_URL=gateway.url,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


async def test_a_measurement_is_kept_and_is_the_speed_of_the_plan_from_then_on(
    tmp_path: Path,
) -> None:
    folder = model_folder(tmp_path / "model", **{**LLAMA_8B, "max_position_embeddings": 4096})
    async with running(tmp_path, engine, hardware=machine("2x3090"), nvml=two_3090()) as gateway:
        await gateway.add("m", folder, engines=["vllm==0.26.0"], gpus=1, replicas=1, concurrency=1)
        view = await gateway.until("m", "ready")
        assert view["plan"]["speed"]["grade"] == "predicted"
        kept_bench = await bench(gateway, "--json")
        assert kept_bench["not_learned"] == ""
        assert kept_bench["last"] is None
        assert kept_bench["bench"]["fingerprint"] == view["attempts"][0]["fingerprint"]
        assert kept_bench["expected"]["grade"] == "predicted"
        facts = (await gateway.client.get("/admin/facts")).json()["data"]
        kinds = {
            (row["fact"]["kind"], row["fact"]["scope"].get("figure")) for row in facts if row["id"]
        }
        assert {
            ("speed_measured", "stream"),
            ("speed_ratio", "stream"),
            ("speed_measured", "total"),
        } <= kinds
        speed = (await gateway.show("m"))["plan"]["speed"]
        assert speed["grade"] == "measured"
        assert speed["stream"]["value"] == pytest.approx(kept_bench["bench"]["stream"], rel=0.01)
        # The next plan knows the measurement.
        wish = {
            "name": "n",
            "source": str(folder),
            "engines": ["vllm==0.26.0"],
            "gpus": 1,
            "replicas": 1,
            "concurrency": 1,
        }
        decision = (await gateway.client.post("/admin/plan", json=wish)).json()
        ratios = [plan["speed"]["ratios"] for plan in decision["plans"]]
        assert all(ratios)
        second_bench = await bench(gateway)
        assert "one request" in second_bench
        assert "LATENCY P50" in second_bench
        benches = (await gateway.client.get("/admin/models/m/bench")).json()["data"]
        assert len(benches) == 2


async def test_a_disturbed_measurement_teaches_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, engine, hardware=machine("2x3090"), nvml=two_3090()) as gateway:
        await gateway.add(
            "m",
            model_folder(tmp_path / "model", **LLAMA_8B),
            engines=["vllm==0.26.0"],
            gpus=1,
            replicas=1,
        )
        view = await gateway.until("m", "ready")
        (attempt,) = view["attempts"]
        report = {
            "prompt": 8,
            "answer": 8,
            "stream": 10.0,
            "first_token_2k_s": 1.0,
            "fingerprint": attempt["fingerprint"],
        }
        response = await gateway.client.post(
            "/admin/models/m/bench", json={**report, "disturbed": "3 other requests"}
        )
        assert response.status_code == 201, response.text
        assert response.json()["not_learned"] == "3 other requests"
        facts = (await gateway.client.get("/admin/facts")).json()["data"]
        assert not [row for row in facts if row["fact"]["kind"].startswith("speed_")]
        # A measurement of another plan is refused.
        for wrong in (
            {"fingerprint": "another"},
            {"stream": -1},
            {"stream": float("1e300")},
            {"more": 1},
        ):
            answer = await gateway.client.post("/admin/models/m/bench", json={**report, **wrong})
            assert answer.status_code in (400, 409), answer.text


async def test_a_plan_measured_as_slow_is_reported_with_a_better_one(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", **LLAMA_8B)
    wish = {"engines": ["vllm==0.26.0"], "goal": "latency", "gpus": "all"}
    async with running(tmp_path, engine, hardware=machine("2x3090"), nvml=two_3090()) as gateway:
        await gateway.add("m", folder, **wish)
        view = await gateway.until("m", "ready")
        speed, fingerprint = view["plan"]["speed"], view["attempts"][0]["fingerprint"]
        count = speed["concurrency"]
        level = {
            "concurrency": count,
            "requests": 1,
            "seconds": 1,
            "tokens_per_s": speed["total"]["value"] / 20,
        }
        level |= dict.fromkeys(
            ("latency_p50_s", "latency_p95_s", "first_token_p50_s", "first_token_p95_s"), 1.0
        )
        report = {
            "prompt": 8,
            "answer": 8,
            "first_token_2k_s": 1.0,
            "fingerprint": fingerprint,
            "levels": [level],
        }
        answer = await gateway.client.post(
            "/admin/models/m/bench", json={**report, "stream": speed["stream"]["value"] / 20}
        )
        assert answer.status_code == 201, answer.text
        rival = answer.json()["rival"]
        assert rival is not None
        assert rival["gain"] > 1.15
        assert (await gateway.show("m"))["rival"] == rival
        output = (await asyncio.to_thread(fitserve, "show", "m", FITSERVE_URL=gateway.url)).stdout
        assert "Another plan should be better" in output
        assert "tokens/s alone" in output
        assert (
            "another plan should be"
            in (await asyncio.to_thread(fitserve, "ps", FITSERVE_URL=gateway.url)).stdout
        )
    # The next gateway says it too, from its records.
    async with running(
        tmp_path, engine, gateway.world, hardware=machine("2x3090"), nvml=two_3090()
    ) as gateway:
        async with asyncio.timeout(hang_s()):
            while (await gateway.show("m"))["rival"] is None:
                await asyncio.sleep(0.05)
