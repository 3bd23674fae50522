"""Copies that follow the load: one more while a queue waits, one less once it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gateway.domain import LaunchSpec
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

# One model of this size fits into a GPU.
LARGE = {**LLAMA_8B, "num_hidden_layers": 100}
TWO_GPUS = machine("4xh100").select_gpus(lambda gpu: gpu.index < 2)
QUICK: dict[str, Any] = {"copies_wait_s": 0.1, "copies_idle_s": 0.3, "copies_pause_s": 0.1}


@pytest.fixture(autouse=True)
async def short_residences() -> AsyncIterator[None]:
    with (
        mock.patch("gateway.controller.decisions.eviction.MIN_S", 0.2),
        mock.patch("gateway.controller.decisions.eviction.MAX_S", 0.2),
    ):
        yield


async def add(gateway: Running, folder: Path, name: str = "m", **fields: Any) -> None:
    """A model of which each copy takes one GPU, and two requests at once."""
    await gateway.add(
        name,
        model_folder(folder / "model", **LARGE),
        **{
            "engines": ["vllm==0.26.0"],
            "gpus": 1,
            "check": False,
            "copies": "1-2",
            "args": {"max-num-seqs": 1},
            **fields,
        },
    )
    await gateway.until(name, "ready")


async def wait_for(gateway: Running, is_reached: Callable[[Any], bool], name: str = "m") -> Any:
    """The model's view once the condition holds."""
    view: Any = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(hang_s()):
            while True:
                view = await gateway.show(name)
                if is_reached(view):
                    return view
                await asyncio.sleep(0.02)
    raise AssertionError(view)


async def wait_for_copies(gateway: Running, count: int, name: str = "m") -> Any:
    """The model, once it has so many copies, and all serve."""
    states = ["ready"] * count
    return await wait_for(
        gateway, lambda view: [copy["state"] for copy in view["replicas"]] == states, name
    )


class Clients:
    """Requests for a model whose answers its first copy holds until `release`."""

    def __init__(self, gateway: Running, folder: Path, name: str = "m") -> None:
        self._gateway = gateway
        self._hold = folder / f"hold-{name}"
        self._name = name
        self._tasks: list[asyncio.Task[Any]] = []

    def ask(self, count: int) -> None:
        self._hold.touch()
        body = {"model": self._name, "prompt": "hi", "max_tokens": 3}
        self._tasks += [
            asyncio.ensure_future(self._gateway.client.post("/v1/completions", json=body))
            for _ in range(count)
        ]

    async def release(self) -> set[int]:
        """The states of all answers."""
        self._hold.unlink()
        async with asyncio.timeout(hang_s()):
            answers = await asyncio.gather(*self._tasks)
        self._tasks = []
        return {answer.status_code for answer in answers}


def holding(folder: Path, **fields: Any) -> Callable[[LaunchSpec], EngineScript]:
    """Engines of which the first copy of a model answers no further than its first token.

    fields: those of the second copy of `m`.
    """

    def script(spec: LaunchSpec) -> EngineScript:
        is_first = spec.name.startswith(f"{spec.model}-r0")
        return EngineScript(
            model=spec.model,
            max_model_len=131072,
            hold=folder / f"hold-{spec.model}" if is_first else None,
            **fields if spec.name.startswith("m-r1") else {},
        )

    return script


async def changes(gateway: Running, name: str = "m") -> list[tuple[int, str]]:
    """The number of copies after each change, with its cause."""
    answer = await gateway.client.get(f"/admin/events?model={name}&last=1000&follow=false")
    return [
        (event["data"]["copies"], event["data"]["cause"])
        for event in answer.json()["data"]
        if event["kind"] == "model.copies"
    ]


def running_engines(world: World, name: str = "m") -> list[str]:
    return sorted(
        engine.spec.name
        for engine in world.engines.values()
        if engine.main_runs and engine.spec.model == name
    )


async def test_a_waiting_queue_starts_a_copy_that_leaves_after_the_load(tmp_path: Path) -> None:
    async with running(tmp_path, holding(tmp_path), hardware=TWO_GPUS, **QUICK) as gateway:
        await add(gateway, tmp_path)
        clients = Clients(gateway, tmp_path)
        clients.ask(6)
        view = await wait_for_copies(gateway, 2)
        assert view["copies"]["wanted_count"] == 2
        assert "its oldest request has waited" in view["copies"]["words"]
        assert "ready 2 of 1-2" in (await gateway.command("ps")).stdout
        assert "2 of 1-2 copies; its oldest request" in (await gateway.command("show", "m")).stdout
        assert len({gpu for copy in view["replicas"] for gpu in copy["gpus"]}) == 2
        assert await clients.release() == {200}
        view = await wait_for_copies(gateway, 1)
        assert running_engines(gateway.world) == [gateway.world.engines["m-r0-a1"].spec.name]
        assert await changes(gateway) == [(2, "queue"), (1, "calm")]
        metrics = (await gateway.client.get("/metrics")).text
        assert 'fitserve_copy_changes_total{model="m",cause="queue"} 1' in metrics
        assert 'fitserve_unloads_total{model="m",why="load"} 1' in metrics


async def test_a_copy_without_room_is_told_and_not_started(tmp_path: Path) -> None:
    one_gpu = machine("4xh100").select_gpus(lambda gpu: gpu.index < 1)
    async with running(tmp_path, holding(tmp_path), hardware=one_gpu, **QUICK) as gateway:
        await add(gateway, tmp_path)
        clients = Clients(gateway, tmp_path)
        clients.ask(6)
        view = await wait_for(gateway, lambda view: "no room" in view["copies"]["words"])
        assert len(view["replicas"]) == 1
        assert await clients.release() == {200}
        assert await changes(gateway) == []


async def test_an_idle_copy_of_one_model_makes_room_for_a_copy_of_another(tmp_path: Path) -> None:
    three_gpus = machine("4xh100").select_gpus(lambda gpu: gpu.index < 3)
    settings = {**QUICK, "copies_idle_s": 10_000}
    async with running(tmp_path, holding(tmp_path), hardware=three_gpus, **settings) as gateway:
        for name in "mn":
            await add(gateway, tmp_path, name)
        n_clients, m_clients = Clients(gateway, tmp_path, "n"), Clients(gateway, tmp_path)
        n_clients.ask(6)
        await wait_for_copies(gateway, 2, "n")
        m_clients.ask(6)
        # The copy stays as long as the load of its model is there.
        view = await wait_for(gateway, lambda view: "no room" in view["copies"]["words"])
        assert len(running_engines(gateway.world, "n")) == 2
        assert await n_clients.release() == {200}
        view = await wait_for_copies(gateway, 2)
        assert "its oldest request has waited" in view["copies"]["words"]
        assert await m_clients.release() == {200}
        await wait_for_copies(gateway, 1, "n")
        assert await changes(gateway, "n") == [(2, "queue"), (1, "room")]
        assert await changes(gateway) == [(2, "queue")]
        answer = await gateway.client.get("/admin/events?model=n&last=1000&follow=false")
        words = [event["words"] for event in answer.json()["data"]]
        assert "Copy 2 of n is unloaded: its copy is idle, and makes room for m." in words


async def test_no_model_leaves_for_a_copy_of_another(tmp_path: Path) -> None:
    async with running(tmp_path, holding(tmp_path), hardware=TWO_GPUS, **QUICK) as gateway:
        await add(gateway, tmp_path)
        await add(gateway, tmp_path, "x", copies=None, replicas=1)
        clients = Clients(gateway, tmp_path)
        clients.ask(6)
        await wait_for(gateway, lambda view: "no room" in view["copies"]["words"])
        assert await clients.release() == {200}
        assert (await gateway.show("x"))["state"] == "ready"
        assert await changes(gateway) == []


async def test_a_copy_beyond_the_least_leaves_for_a_model_without_any(tmp_path: Path) -> None:
    settings = {**QUICK, "copies_idle_s": 10_000}
    async with running(tmp_path, holding(tmp_path), hardware=TWO_GPUS, **settings) as gateway:
        await add(gateway, tmp_path)
        clients = Clients(gateway, tmp_path)
        clients.ask(6)
        await wait_for_copies(gateway, 2)
        assert await clients.release() == {200}
        await gateway.add(
            "x", tmp_path / "model", engines=["vllm==0.26.0"], gpus=1, check=False, replicas=1
        )
        await gateway.until("x", "stopped")
        body = {"model": "x", "prompt": "hi", "max_tokens": 3}
        answer = await gateway.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        await wait_for_copies(gateway, 1)
        assert await changes(gateway) == [(2, "queue"), (1, "eviction")]


async def test_a_copy_that_fails_is_given_up_while_the_first_serves(tmp_path: Path) -> None:
    script = holding(tmp_path, exit_code=1, last_words="ValueError: nothing known")
    settings = {**QUICK, "copies_idle_s": 10_000}
    async with running(tmp_path, script, hardware=TWO_GPUS, **settings) as gateway:
        await add(gateway, tmp_path, policy={"max_attempts": 1})
        clients = Clients(gateway, tmp_path)
        clients.ask(6)
        view = await wait_for(gateway, lambda view: view["copies"]["cause"] == "failure")
        assert "one more copy could not be started" in view["copies"]["words"]
        await wait_for_copies(gateway, 1)
        assert await clients.release() == {200}
        assert await changes(gateway) == [(2, "queue"), (1, "failure")]


async def test_another_span_of_copies_holds_at_once_and_restarts_no_engine(tmp_path: Path) -> None:
    async with running(tmp_path, holding(tmp_path), hardware=TWO_GPUS, **QUICK) as gateway:
        await add(gateway, tmp_path)
        for patch, count in (
            ({"copies": "2-4"}, 2),
            ({"copies": "1-1"}, 1),
            ({"copies": None, "replicas": 2}, 2),
            ({"copies": "1-2", "replicas": None}, 1),
        ):
            answer = await gateway.client.patch("/admin/models/m", json=patch)
            assert answer.status_code == 200, answer.text
            assert answer.json()["restarts_engines"] is False
            await wait_for_copies(gateway, count)
        assert "m-r0-a1" in running_engines(gateway.world)
