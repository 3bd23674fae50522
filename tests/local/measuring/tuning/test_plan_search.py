"""The search for a faster plan on the order of the owner: found by measurements, within its time,
and taken by word only."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.measuring.tuning import plan_search
from tests.support.memory_host import World
from tests.support.patience import wait_until
from tests.support.running import Running
from tests.support.scripted_engine import EngineScript
from tests.support.tuned_models import (
    FAST,
    SLOW,
    add_model,
    lone_attempt,
    paced_script,
    tune,
    wait_for_end,
)

pytestmark = pytest.mark.anyio

# The speed of an unchanged plan.
USUAL = "--max-num-batched-tokens=2048"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures without rest."""
    monkeypatch.setattr(plan_search, "_POLL_S", 0.02)
    monkeypatch.setattr(plan_search, "_MEASUREMENT_S", 0.01)


async def begin_search(gateway: Running, status: int = 202, **body: Any) -> Any:
    answer = await gateway.client.post("/admin/models/m/tune", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_the_faster_flag_is_found_and_taken_only_on_request(tmp_path: Path) -> None:
    async with tune(tmp_path, paced_script("--max-num-batched-tokens=4096")) as gateway:
        old_model = await add_model(gateway, tmp_path)
        assert USUAL in (await gateway.show("m"))["plan"]["argv"]
        await begin_search(gateway)
        report = await wait_for_end(gateway)
        assert report["state"] == "done", report
        best = report["tried"][report["best"]]
        assert "--max-num-batched-tokens=4096" in best["argv"]
        assert best["worth"] > 1.5
        assert report["tried"][0]["worth"] == 1
        assert report["wish"]["args"]["max-num-batched-tokens"] == 4096
        # Nothing is taken without a word.
        serving = await lone_attempt(gateway)
        assert serving["id"] == old_model["id"]
        assert (await gateway.show("m"))["wish"]["args"] == {}
        answer = await gateway.client.post("/admin/models/m/tune/apply")
        assert answer.status_code == 202, answer.text

        async def look() -> Any:
            serving = await lone_attempt(gateway)
            return None if serving["id"] == old_model["id"] else serving

        serving = await wait_until("another engine serves", look)
        assert serving["fingerprint"] == best["fingerprint"]
        # It is taken once.
        second_answer = await gateway.client.post("/admin/models/m/tune/apply")
        assert second_answer.status_code == 409
    # Questions about abilities would disturb the measurements of trials.
    with contextlib.closing(sqlite3.connect(tmp_path / "data/fitserve.db")) as database:
        questions = {
            generation >= 0: abilities is not None
            for generation, abilities in database.execute(
                "SELECT generation, abilities FROM attempts"
            )
        }
    assert questions == {True: True, False: False}


def _without_port(argv: tuple[str, ...]) -> list[str]:
    return [item for item in argv if not item.startswith("--port")]


async def test_the_search_stops_early_if_nothing_is_faster(tmp_path: Path) -> None:
    first: list[tuple[str, ...]] = []

    def script(spec: LaunchSpec) -> EngineScript:
        """The served plan is fast, every change of it slow."""
        first.append(spec.argv)
        pace = FAST if _without_port(spec.argv) == _without_port(first[0]) else SLOW
        return EngineScript(model=spec.model, max_model_len=400_000, tokens_per_second=pace)

    async with tune(tmp_path, script) as gateway:
        old_model = await add_model(gateway, tmp_path)
        await begin_search(gateway)
        report = await wait_for_end(gateway)
        assert report["state"] == "done", report
        assert len(report["tried"]) < 12
        assert report["wish"] is None
        assert (await lone_attempt(gateway))["id"] == old_model["id"]
        response = await gateway.client.post("/admin/models/m/tune/apply")
        assert response.status_code == 409


async def test_a_search_in_place_of_the_served_plan_needs_leave_and_brings_the_plan_back(
    tmp_path: Path,
) -> None:
    async with tune(tmp_path, paced_script("--max-num-batched-tokens=4096"), "3090") as gateway:
        old_model = await add_model(gateway, tmp_path)
        refusal = await begin_search(gateway, 409)
        assert refusal["error"]["param"] == "offline"
        await begin_search(gateway, offline=True)
        report = await wait_for_end(gateway)
        assert report["state"] == "done", report
        assert "--max-num-batched-tokens=4096" in report["tried"][report["best"]]["argv"]
        serving = await lone_attempt(gateway)
        assert serving["fingerprint"] == old_model["fingerprint"]
        assert (await gateway.show("m"))["attempts"][0]["state"] == "stopped"


async def test_a_machine_that_was_busy_at_first_has_no_faster_plan(tmp_path: Path) -> None:
    """All plans are equally fast. The first engine alone was slow, for a reason outside of it."""
    names: list[str] = []
    # A busy machine brings fast engines near to SLOW, and no engine above its own pace.
    slowest = SLOW / 5

    def script(spec: LaunchSpec) -> EngineScript:
        names.append(spec.name)
        pace = slowest if len(names) == 1 else FAST
        return EngineScript(model=spec.model, max_model_len=400_000, tokens_per_second=pace)

    async with tune(tmp_path, script, "3090") as gateway:
        old_model = await add_model(gateway, tmp_path)
        await begin_search(gateway, offline=True)
        report = await wait_for_end(gateway)
        assert report["state"] == "done", report
        assert report["tried"][0]["speed"]["stream"]["value"] > 2 * slowest, report
        assert all((trial["worth"] or 0.0) < 2.0 for trial in report["tried"]), report["tried"]
        assert len(report["tried"]) > 1
        now = await lone_attempt(gateway)
        assert now["fingerprint"] == old_model["fingerprint"]


def has_trial(world: World) -> bool:
    return any(
        "--max-num-batched-tokens=4096" in engine.spec.argv for engine in world.engines.values()
    )


@pytest.mark.parametrize("offline", [False, True])
async def test_a_killed_gateway_comes_back_with_the_served_plan(
    tmp_path: Path, offline: bool
) -> None:
    world, script = World(), paced_script("--max-num-batched-tokens=4096", start_delay_s=3600)
    name = "3090" if offline else "2x3090"
    async with tune(tmp_path, script, name, world) as gateway:
        old_model = await add_model(gateway, tmp_path)
        await begin_search(gateway, offline=offline)
        await wait_until("a trial runs", lambda: has_trial(world))
    async with tune(tmp_path, script, name, world) as gateway:
        serving = await lone_attempt(gateway)
        assert serving["fingerprint"] == old_model["fingerprint"]
        assert (await gateway.client.get("/admin/models/m/tune")).status_code == 404


async def test_an_ended_search_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    script = paced_script("--max-num-batched-tokens=4096", start_delay_s=3600)
    async with tune(tmp_path, script, "3090") as gateway:
        old_model = await add_model(gateway, tmp_path)
        await begin_search(gateway, offline=True)
        await begin_search(gateway, 409, offline=True)
        await wait_until("a trial runs", lambda: has_trial(gateway.world))
        answer = await gateway.client.delete("/admin/models/m/tune")
        assert answer.json()["state"] == "stopped"
        assert (await lone_attempt(gateway))["fingerprint"] == old_model["fingerprint"]


async def test_the_time_bound_holds_for_any_hang(tmp_path: Path) -> None:
    """A trial that never gets ready ends with the time of the search."""
    script = paced_script("--max-num-batched-tokens=4096", start_delay_s=3600)
    async with tune(tmp_path, script) as gateway:
        old_model = await add_model(gateway, tmp_path)
        await begin_search(gateway, minutes=0.25)
        report = await wait_for_end(gateway)
        assert report["state"] == "done", report
        assert "the time is over" in report["phase"]
        assert (await lone_attempt(gateway))["id"] == old_model["id"]
