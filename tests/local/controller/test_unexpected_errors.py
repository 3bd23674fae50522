"""Every task of the gateway meets errors that nobody expected: each stays where it is, is logged
with its cause, and the work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.controller import loop
from gateway.controller.endpoints import Endpoints
from gateway.controller.fleet.model_state import route
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.plan_steps import PlanSteps
from gateway.controller.steps.proof_steps import ProofSteps
from gateway.controller.steps.replica_steps import ReplicaSteps
from gateway.controller.steps.start_steps import StartSteps
from gateway.controller.watch.watcher import Watcher
from gateway.domain import LaunchSpec
from gateway.errors import HostError
from gateway.machine.gpu_watch import GpuWatch
from tests.support.dataplane import until
from tests.support.log_lines import capture_logs
from tests.support.memory_host import Method, World
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


class SurprisingError(Exception):
    """Which nobody expected."""


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


@pytest.fixture(autouse=True)
def log_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    monkeypatch.setattr("gateway.supervision.FIRST_REST_S", 0.01)
    monkeypatch.setattr("gateway.supervision.MAX_REST_S", 0.1)
    with capture_logs() as events:
        yield events


def breaks(
    monkeypatch: pytest.MonkeyPatch, owner: object, method: str, hit: Callable[..., bool]
) -> list[bool]:
    """The method raises where `hit` says so, as long as the list that is returned is not empty."""
    fault = [True]
    real = getattr(owner, method)

    def raising(*arguments: Any, **named: Any) -> Any:
        if fault and hit(*arguments):
            raise SurprisingError(f"in {method} \ud800")
        return real(*arguments, **named)

    monkeypatch.setattr(owner, method, raising)
    return fault


async def serves(gateway: Running, name: str) -> bool:
    answer = await gateway.client.post(
        "/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 3}
    )
    return answer.status_code == 200


async def tells(gateway: Running, name: str, words: str) -> None:
    """Returns when the state of the model says so."""
    async with asyncio.timeout(hang_s()):
        while words not in (await gateway.show(name))["detail"]:
            await asyncio.sleep(0.01)


def of_bad(_self: object, *arguments: Any) -> bool:
    """Whether the call is about the model `bad`."""
    return any(
        getattr(argument, "model", argument) == "bad"
        or getattr(getattr(argument, "wish", None), "name", "") == "bad"
        for argument in arguments
    )


PLACES: dict[str, tuple[type, str, Callable[..., bool]]] = {
    "a plan": (PlanSteps, "plan", of_bad),
    "a launch": (StartSteps, "launch", of_bad),
    "a verification": (ProofSteps, "verify", of_bad),
    "a publication": (Attempts, "publish", of_bad),
    "the step itself": (ReplicaSteps, "_step", of_bad),
    "the start of a watcher": (ReplicaSteps, "_watch", of_bad),
    "the reading of a log": (Watcher, "_read", lambda self, *_: self.attempt.model == "bad"),
    "the health checks": (Watcher, "_health", lambda self, *_: self.attempt.model == "bad"),
    "the endpoints": (Endpoints, "update_watchers", of_bad),
}


@pytest.mark.parametrize("place", PLACES)
async def test_an_error_in_the_work_of_one_model_stays_there_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_records: list[dict[str, Any]], place: str
) -> None:
    owner, method, hit = PLACES[place]
    async with running(tmp_path, healthy) as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("before", source)
        await gateway.until("before", "ready")
        fault = breaks(monkeypatch, owner, method, hit)
        await gateway.add("bad", source)
        await tells(gateway, "bad", f"internal error: SurprisingError: in {method}")
        await gateway.add("after", source)
        await gateway.until("after", "ready")
        assert await serves(gateway, "before")
        for path in ("/healthz", "/readyz", "/metrics", "/admin/models", "/v1/models"):
            assert (await gateway.client.get(path)).status_code == 200
        times = len(
            [event for event in log_records if isinstance(event.get("exc_info"), SurprisingError)]
        )
        assert times > 0
        fault.clear()
        await gateway.until("bad", "ready")
        async with asyncio.timeout(hang_s()):
            while (await gateway.show("bad"))["detail"]:
                await asyncio.sleep(0.01)
        assert await serves(gateway, "bad")
        if method != "_read":
            assert [attempt["state"] for attempt in (await gateway.show("bad"))["attempts"]] == [
                "ready"
            ]


@pytest.mark.parametrize(
    ("owner", "method"), [(Attempts, "fail"), (Launcher, "stop"), (loop.Loop, "_forget")]
)
async def test_an_error_while_a_model_ends_stays_there_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    async with running(tmp_path, healthy) as gateway:
        source = model_folder(tmp_path / "model")
        for name in ("good", "bad"):
            await gateway.add(name, source)
            await gateway.until(name, "ready")
        fault = breaks(monkeypatch, owner, method, lambda *_: True)
        if method == "fail":
            next(
                engine for name, engine in gateway.world.engines.items() if name.startswith("bad-")
            ).kill()
        else:
            await gateway.client.delete("/admin/models/bad")
        await tells(gateway, "bad", "internal error: SurprisingError")
        assert await serves(gateway, "good")
        assert (await gateway.client.get("/readyz")).status_code == 200
        fault.clear()
        if method == "fail":
            await gateway.until("bad", "ready")
        else:
            await gateway.wait_until_gone("bad")
        assert await serves(gateway, "good")


@pytest.mark.parametrize("method", ["prepare", "start", "list", "stop", "follow", "allocate_port"])
async def test_a_host_that_raises_anything_is_survived(tmp_path: Path, method: str) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("m", source)
        await gateway.until("m", "ready")
        for _ in range(3):
            world.fail_next(cast("Method", method), SurprisingError("from the host"))
        await gateway.add("n", source)
        await gateway.until("n", "ready")
        await gateway.client.delete("/admin/models/m")
        await gateway.wait_until_gone("m")
        assert await serves(gateway, "n")
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_an_error_while_a_stray_engine_is_stopped_passes(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path / "one", healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
    for _ in range(3):
        world.fail_next("stop", SurprisingError("from the host"))
    async with running(tmp_path / "two", healthy, world) as gateway:
        await until(lambda: not world.engines)
        assert (await gateway.client.get("/readyz")).status_code == 200


async def test_a_model_whose_route_cannot_be_made_has_none_and_the_others_have_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = [True]

    def raising(model: Any, *facts: Any) -> Any:
        if fault and model.wish.name == "bad":
            raise SurprisingError("no route")
        return route(model, *facts)

    monkeypatch.setattr("gateway.controller.fleet.route_table.route", raising)
    async with running(tmp_path, healthy) as gateway:
        source = model_folder(tmp_path / "model")
        for name in ("bad", "good"):
            await gateway.add(name, source)
        await gateway.until("good", "ready")
        assert await serves(gateway, "good")
        await tells(gateway, "bad", "internal error: SurprisingError: no route")
        response = await gateway.client.post(
            "/v1/completions", json={"model": "bad", "prompt": "hi"}
        )
        assert response.status_code == 503
        fault.clear()
        async with asyncio.timeout(hang_s()):
            while not await serves(gateway, "bad"):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("owner", "method"), [(loop, "route_table"), (GpuWatch, "failure")])
async def test_a_pass_that_breaks_is_reported_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, method: str
) -> None:
    monkeypatch.setattr(loop, "_MAX_BROKEN_PASSES", 1_000_000)
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        fault = breaks(monkeypatch, owner, method, lambda *_: True)
        if owner is loop:
            async with asyncio.timeout(hang_s()):
                while (await gateway.client.get("/readyz")).json()["problems"] != ["loop"]:
                    await asyncio.sleep(0.01)
        else:
            await tells(gateway, "m", "internal error")
        assert (await gateway.client.get("/healthz")).status_code == 200
        assert await serves(gateway, "m")
        fault.clear()
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/readyz")).status_code != 200 or (
                await gateway.show("m")
            )["detail"]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [SurprisingError("over and over"), asyncio.CancelledError()])
async def test_health_fails_when_the_loop_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Running models are served on, until the process ends (tests/local/server/test_app.py)."""
    monkeypatch.setattr(loop, "_MAX_BROKEN_PASSES", 3)
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        for _ in range(3):
            world.fail_next("list", error)  # type: ignore[arg-type]
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/healthz")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (await gateway.client.get("/readyz")).json()["problems"] == ["loop"]
        assert await serves(gateway, "m")
    assert world.engines
    # The next one goes on with the same engines.
    world._faults.clear()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.until("m", "ready")
        assert len((await gateway.show("m"))["attempts"]) == 1


async def test_a_host_that_is_away_never_ends_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_MAX_BROKEN_PASSES", 2)
    world = World()
    for _ in range(20):
        world.fail_next("list", HostError("Docker does not answer."))
    async with running(tmp_path, healthy, world) as gateway:
        await until(lambda: not world._faults["list"])
        assert (await gateway.client.get("/healthz")).status_code == 200
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
