"""The search of `fitserve tune` begins by itself for an idle model where that is allowed. It ends
for a request, and the better plan serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.measuring.tuning import automatic_tuning, measurements, plan_figures, plan_search
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import wait_until
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.versions import SGLANG_REF, VLLM_REF

pytestmark = pytest.mark.anyio

VERSIONS = [VLLM_REF, SGLANG_REF]
# The plans are expected to give 46 tokens/s. A busy machine delays each token, so the fast engine
# (0) has no pace: a wait of a second for all its tokens together leaves it twice as fast.
SLOW, FAST = 8.0, 0.0
Script = Callable[[LaunchSpec], EngineScript]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and measures without rest."""
    monkeypatch.setattr(automatic_tuning, "_LOOK_S", 0.05)
    monkeypatch.setattr(measurements, "_LOOK_S", 0.05)
    monkeypatch.setattr(plan_search, "_POLL_S", 0.02)
    monkeypatch.setattr(plan_search, "_MEASUREMENT_S", 0.01)
    # One request measures a plan. On a busy machine two of them differ by more than 5 %.
    monkeypatch.setattr(plan_search, "_GAIN", 2.0)
    for module in (plan_search, plan_figures):
        monkeypatch.setattr(module, "MEASURED_GAIN", 2.0)


def paced_script(first: float, second: float, **of_second: Any) -> Script:
    """The engine version that is started first has one pace, the other one another."""
    flags: list[str] = []

    def script(spec: LaunchSpec) -> EngineScript:
        name = str(spec.engine)
        flags.append(name)
        changes = {} if name == flags[0] else of_second
        return EngineScript(
            model=spec.model,
            max_model_len=400_000,
            tokens_per_second=first if name == flags[0] else second,
            **changes,
        )

    return script


async def add_model(gateway: Running, tmp_path: Path) -> Any:
    # A short context has short prompts and answers.
    folder = model_folder(tmp_path / "model", **{**LLAMA_8B, "max_position_embeddings": 32})
    await gateway.add(
        "m", folder, engines=VERSIONS, goal="latency", gpus=1, replicas=1, check=False
    )
    view = await gateway.until("m", "ready")
    return view["attempts"][0]


async def search(gateway: Running, *states: str) -> Any:
    """The report of the automatic search, once it is in one of these states."""

    async def look() -> Any:
        report = (await gateway.client.get("/admin/models/m/tune")).json()
        if report.get("state") not in states:
            return None
        assert report["automatic"]
        return report

    return await wait_until(f"the search is {' or '.join(states)}", look)


async def serving(gateway: Running, engine: str | None = None) -> Any:
    """The one live attempt, once it serves by this engine and no other engine runs."""

    async def look() -> Any:
        view = await gateway.show("m")
        live = [
            attempt for attempt in view["attempts"] if attempt["state"] in ("starting", "ready")
        ]
        runs_alone = [*gateway.world.engines] == [row["instance"] for row in live]
        right = engine is None or [row["engine"] for row in live] == [engine]
        return live[0] if view["state"] == "ready" and runs_alone and right else None

    return await wait_until(f"one engine serves, {engine or 'any'}", look)


async def await_gain(gateway: Running) -> None:
    """Wait until the better plan is in the wish. Raises AssertionError for a search that ends
    without: the next one is an hour away."""

    async def look() -> bool:
        report = (await gateway.client.get("/admin/models/m/tune")).json()
        if (await gateway.show("m"))["wish"]["engines"] != VERSIONS:
            return True
        if report.get("state") == "stopped":
            assert report["phase"] == "a request came", report
        elif report.get("state") in ("done", "failed"):
            assert report["wish"] is not None, report
        return False

    await wait_until("a better plan is taken", look)


async def answers(gateway: Running) -> bool:
    answer = await gateway.client.post(
        "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 1}
    )
    return answer.status_code == 200


def wait_for_tuning(
    tmp_path: Path,
    script: Script,
    name: str = "2x3090",
    world: World | None = None,
    **settings: Any,
) -> Any:
    fields = {"auto_tune": True, "auto_tune_quiet_s": 0.1, **settings}
    return running(tmp_path, script, world, hardware=machine(name), **fields)


def other_than(attempt: Any) -> str:
    return next(engine for engine in VERSIONS if engine != attempt["engine"])


@pytest.mark.parametrize("name", ["2x3090", "3090"])
async def test_the_faster_plan_is_found_and_taken_without_a_word(tmp_path: Path, name: str) -> None:
    """Beside the model where GPUs are free, else in its place."""
    async with wait_for_tuning(tmp_path, paced_script(SLOW, FAST), name) as gateway:
        old_model = await add_model(gateway, tmp_path)
        await await_gain(gateway)
        new = await serving(gateway, other_than(old_model))
        assert new["id"] != old_model["id"]
        assert await answers(gateway)
        wish = (await gateway.show("m"))["wish"]
        assert wish["engines"] == [new["engine"]]


@pytest.mark.parametrize("name", ["2x3090", "3090"])
async def test_a_plan_that_is_no_faster_is_tried_once(tmp_path: Path, name: str) -> None:
    async with wait_for_tuning(tmp_path, paced_script(SLOW, SLOW / 2), name) as gateway:
        old_model = await add_model(gateway, tmp_path)
        report = await search(gateway, "done")
        assert report["wish"] is None
        assert other_than(old_model) in [trial["change"].split()[-1] for trial in report["tried"]]
        serving_attempt = await serving(gateway, old_model["engine"])
        assert serving_attempt["fingerprint"] == old_model["fingerprint"]
        count = len(gateway.world.logs)
        await asyncio.sleep(0.5)
        assert len(gateway.world.logs) == count
        assert await answers(gateway)


async def test_a_plan_that_fails_leaves_the_served_one(tmp_path: Path) -> None:
    async with wait_for_tuning(
        tmp_path, paced_script(SLOW, FAST, gibberish=True), "3090"
    ) as gateway:
        old_model = await add_model(gateway, tmp_path)
        report = await search(gateway, "done")
        assert any(trial["problem"] for trial in report["tried"])
        serving_attempt = await serving(gateway, old_model["engine"])
        assert serving_attempt["fingerprint"] == old_model["fingerprint"]
        assert await answers(gateway)


async def test_a_request_ends_the_search_and_the_next_one_keeps_its_figures(
    tmp_path: Path,
) -> None:
    hold, paces = tmp_path / "hold", paced_script(SLOW, FAST)
    trials: list[str] = []

    def script(spec: LaunchSpec) -> EngineScript:
        engine_script = paces(spec)
        if engine_script.tokens_per_second == FAST:
            trials.append(str(spec.engine))
        # The first trial hangs until the request has come.
        hangs = len(trials) == 1 and engine_script.tokens_per_second == FAST
        return replace(engine_script, start_delay_s=3600 if hangs else 0, hold=hold)

    async with wait_for_tuning(tmp_path, script) as gateway:
        old_model = await add_model(gateway, tmp_path)
        await wait_until("a trial begins", lambda: trials)
        hold.touch()
        body = {"model": "m", "prompt": "hi", "max_tokens": 2, "stream": True}
        async with gateway.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            report = await search(gateway, "stopped")
            assert report["phase"] == "a request came"
            await serving(gateway, old_model["engine"])
            count = len(gateway.world.logs)
            await asyncio.sleep(0.5)
            # Nothing is tried while a request runs.
            assert len(gateway.world.logs) == count
            hold.unlink()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        await await_gain(gateway)
        await serving(gateway, other_than(old_model))
        # The served plan was measured once at first, and once to confirm the gain.
        benches = (await gateway.client.get("/admin/models/m/bench")).json()["data"]
        assert [bench["fingerprint"] for bench in benches].count(old_model["fingerprint"]) == 2


async def test_automatic_tuning_is_off_unless_somebody_wants_it(tmp_path: Path) -> None:
    async with wait_for_tuning(tmp_path, paced_script(SLOW, FAST), auto_tune=False) as gateway:
        await add_model(gateway, tmp_path)
        await asyncio.sleep(0.5)
        assert (await gateway.client.get("/admin/models/m/bench")).json()["data"] == []
        assert (await gateway.client.get("/admin/models/m/tune")).status_code == 404


async def test_an_order_of_the_owner_ends_automatic_tuning(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> EngineScript:
        return replace(paces(spec), start_delay_s=0 if str(spec.engine) == first else 3600)

    paces, first = paced_script(SLOW, FAST), VLLM_REF
    async with wait_for_tuning(tmp_path, script) as gateway:
        await add_model(gateway, tmp_path)
        await search(gateway, "running")
        response = await gateway.client.post("/admin/models/m/tune", json={})
        assert response.status_code == 202, response.text
        assert not response.json()["automatic"]


async def test_a_gateway_that_ends_in_a_search_leaves_one_engine(tmp_path: Path) -> None:
    def script(spec: LaunchSpec) -> EngineScript:
        # A trial that starts for ever: one that ends at once may not be seen.
        return replace(paces(spec), start_delay_s=0 if str(spec.engine) == first else 3600)

    world, paces, first = World(), paced_script(SLOW, FAST), VLLM_REF
    async with wait_for_tuning(tmp_path, script, world=world) as gateway:
        old_model = await add_model(gateway, tmp_path)
        await wait_until("a trial runs", lambda: len(world.engines) == 2)
    async with wait_for_tuning(tmp_path, script, world=world, auto_tune=False) as gateway:
        serving_attempt = await serving(gateway)
        assert serving_attempt["id"] == old_model["id"]
        assert await answers(gateway)


@pytest.mark.parametrize("name", ["4x3090", "2x3090"])
async def test_all_copies_change_one_after_the_other(tmp_path: Path, name: str) -> None:
    """A model of two copies is tuned beside both, or while both are away."""
    async with wait_for_tuning(tmp_path, paced_script(SLOW, FAST), name) as gateway:
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
        view = await gateway.until("m", "ready")
        old = view["attempts"][0]["engine"]
        await await_gain(gateway)

        async def look() -> Any:
            view = await gateway.show("m")
            ready = [attempt for attempt in view["attempts"] if attempt["state"] == "ready"]
            is_changed = len(ready) == 2 and old not in {row["engine"] for row in ready}
            return ready if view["state"] == "ready" and is_changed else None

        ready = await wait_until("both copies are of the other engine", look)
        assert len({row["engine"] for row in ready}) == 1
        assert {row["replica"] for row in ready} == {0, 1}
        assert await answers(gateway)
