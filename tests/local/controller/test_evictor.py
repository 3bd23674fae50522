"""More models than memory, in one process: loaded when they are asked, unloaded when idle, one for
another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gateway.controller.fleet.preparation import LaunchFiles
from gateway.controller.steps.launcher import Launcher
from gateway.domain import LaunchSpec, Plan
from gateway.domain.units import GIB
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import HANG_S, hang_s, wait_until
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

TWO_GPUS = machine("4xh100").select_gpus(lambda gpu: gpu.index < 2)
DAY_S = 86400.0
# One model of this size fits into a GPU.
LARGE = {**LLAMA_8B, "num_hidden_layers": 100}


@pytest.fixture(autouse=True)
async def short_residences() -> AsyncIterator[None]:
    with (
        mock.patch("gateway.controller.decisions.eviction.MIN_S", 0.2),
        mock.patch("gateway.controller.decisions.eviction.MAX_S", 0.2),
    ):
        yield


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, max_model_len=131072)


async def add(
    gateway: Running, folder: Path, name: str, copies: int = 1, args: Any = None, **policy: Any
) -> None:
    """A model of which each copy takes one GPU."""
    source = model_folder(folder / "model", **LARGE)
    fields = {"engines": ["vllm==0.26.0"], "gpus": 1, "check": False, "args": args or {}}
    await gateway.add(name, source, **fields, replicas=copies, policy=policy)


async def ask(gateway: Running, name: str, **fields: Any) -> Any:
    body = {"model": name, "prompt": "hi", "max_tokens": 3, **fields}
    async with asyncio.timeout(hang_s()):
        return await gateway.client.post("/v1/completions", json=body)


def loaded_models(world: World) -> set[str]:
    return {engine.spec.model for engine in world.engines.values() if engine.main_runs}


async def test_a_requested_model_without_room_takes_the_place_of_the_least_recently_used(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        for name in "ab":
            await add(gateway, tmp_path, name)
            await gateway.until(name, "ready")
        await add(gateway, tmp_path, "c")
        view = await gateway.until("c", "stopped")
        assert "A request loads it by this: " in view["detail"]
        assert (await ask(gateway, "a")).status_code == 200
        # All at once: each waits for the one engine that comes.
        answers = await asyncio.gather(*(ask(gateway, "c") for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}, answers[0].text
        assert loaded_models(gateway.world) == {"a", "c"}
        view = await gateway.show("b")
        assert [attempt["state"] for attempt in view["attempts"]] == ["stopped"]
        assert (await ask(gateway, "b")).status_code == 200
        assert len(loaded_models(gateway.world)) == 2
        metrics = (await gateway.client.get("/metrics")).text
        assert 'fitserve_unloads_total{model="b",why="room"} 1' in metrics


async def test_engines_on_a_cpu_take_turns_in_its_ram(tmp_path: Path) -> None:
    """Of 8 GiB two are left free, and each engine takes more than three."""
    small = machine("cpu").evolve(ram_total_bytes=8 * GIB)
    args = {"kv-cache-memory-bytes": GIB + 1}
    async with running(tmp_path, healthy, hardware=small) as gateway:
        for name in "ab":
            await gateway.add(name, model_folder(tmp_path / "model"), args=args)
            await gateway.until(name, "ready" if name == "a" else "stopped")
        assert "a holds 3." in (await gateway.show("b"))["detail"]
        assert "there is a plan: `fitserve stop a`." in (await gateway.show("b"))["detail"]
        for name in "baba":
            assert (await ask(gateway, name)).status_code == 200
            assert loaded_models(gateway.world) == {name}


async def test_nobody_leaves_for_a_model_that_could_not_be_loaded_either(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        for name in "ab":
            await add(gateway, tmp_path, name, pinned=True)
            await gateway.until(name, "ready")
        await add(gateway, tmp_path, "c")
        await gateway.until("c", "no_plan")
        answer = await ask(gateway, "c")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
        assert loaded_models(gateway.world) == {"a", "b"}


async def test_an_idle_model_leaves_and_comes_back_when_it_is_asked(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m", keep_alive=0)
        view = await gateway.until("m", "stopped")
        assert (view["detail"], view["keep_alive"]) == ("the next request loads it", 0)
        answer = await ask(gateway, "m", stream=True)
        assert (answer.status_code, answer.text.count("[DONE]")) == (200, 1)
        view = await gateway.until("m", "stopped")
        assert [attempt["state"] for attempt in view["attempts"]] == ["stopped", "stopped"]
        assert not loaded_models(gateway.world)


async def test_an_evicted_engine_finishes_its_answers_and_later_requests_wait(
    tmp_path: Path,
) -> None:
    hold = tmp_path / "hold"

    def holds(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=131072, hold=hold)

    async with running(tmp_path, holds, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m")
        await gateway.until("m", "ready")
        hold.touch()
        first_task = asyncio.create_task(ask(gateway, "m"))
        await count_call(gateway, 'in_flight{model="m"} 1')
        assert (await gateway.client.post("/admin/models/m/stop")).status_code == 202
        view = await gateway.until("m", "stopping")
        assert "requests in flight are answered first" in view["detail"]
        late = await ask(gateway, "m")
        assert late.status_code == 503
        assert loaded_models(gateway.world) == {"m"}
        hold.unlink()
        assert (await first_task).json()["usage"]["completion_tokens"] == 3
        await gateway.until("m", "stopped")
        assert not loaded_models(gateway.world)


async def test_the_next_model_is_prepared_while_others_answer(tmp_path: Path) -> None:
    hold, names_brought = tmp_path / "hold", list[str]()
    bring = Launcher.fetch_files

    async def note_launch(self: Launcher, plan: Plan, report: Any, **more: Any) -> LaunchFiles:
        names_brought.append(plan.model.source)
        return await bring(self, plan, report, **more)

    def holds(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=131072, hold=hold)

    with mock.patch.object(Launcher, "fetch_files", note_launch):
        async with running(tmp_path, holds, hardware=TWO_GPUS) as gateway:
            no_sleep = {"enable-sleep-mode": False}
            for name in ("a", "b"):
                await add(gateway, tmp_path, name, args=no_sleep, keep_alive=3600)
                await gateway.until(name, "ready")
            await add(gateway, tmp_path, "c", args=no_sleep, keep_alive=3600)
            await gateway.until("c", "stopped")
            hold.touch()
            tasks = [asyncio.create_task(ask(gateway, name)) for name in ("a", "b")]
            for name in ("a", "b"):
                await count_call(gateway, f'in_flight{{model="{name}"}} 1')
            task = asyncio.create_task(ask(gateway, "c"))
            async with asyncio.timeout(hang_s()):
                while len(names_brought) < 3:
                    await asyncio.sleep(0.01)
            assert loaded_models(gateway.world) == {"a", "b"}
            assert (await gateway.show("c"))["attempts"] == []
            hold.unlink()
            for answer in await asyncio.gather(*tasks, task):
                assert answer.status_code == 200
            assert len(names_brought) == 3, "the start took what was prepared"


async def test_a_stopped_model_stays_stopped_over_a_restart_until_it_is_started(
    tmp_path: Path,
) -> None:
    world = World()
    async with running(tmp_path, healthy, world, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m")
        await gateway.until("m", "ready")
        await gateway.client.post("/admin/models/m/stop")
        await gateway.until("m", "stopped")
    async with running(tmp_path, healthy, world, hardware=TWO_GPUS) as gateway:
        view = await gateway.until("m", "stopped")
        assert view["detail"] == "its owner stopped it"
        assert (await ask(gateway, "m")).status_code == 503
        answer = (await gateway.client.post("/admin/models/m/start")).json()
        # The loop may have begun before the answer is written.
        assert answer["state"] == "starting"
        assert answer["detail"] in ("its owner starts it", "starting")
        await gateway.until("m", "ready")
        assert (await ask(gateway, "m")).status_code == 200


async def test_an_unloaded_model_is_loaded_by_its_next_request(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m")
        await gateway.until("m", "ready")
        answer = await gateway.client.post("/admin/models/m/unload")
        assert (answer.status_code, answer.json()["state"]) == (202, "stopping")
        view = await gateway.until("m", "stopped")
        assert (view["detail"], view["on_request"]) == ("the next request loads it", True)
        assert not loaded_models(gateway.world)
        assert (await ask(gateway, "m")).status_code == 200
        # A stop of a model that is out does not promise a load.
        await gateway.client.post("/admin/models/m/unload")
        await gateway.until("m", "stopped")
        stop_answer = (await gateway.client.post("/admin/models/m/stop")).json()
        assert (stop_answer["detail"], stop_answer["on_request"]) == ("its owner stopped it", False)
        problem = (await ask(gateway, "m")).json()["error"]["message"]
        assert problem.count("stop") == 2, problem


async def test_a_repeated_request_with_its_key_adds_a_model_once(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        body = {"name": "m", "source": str(model_folder(tmp_path))}
        headers = {"idempotency-key": "one"}
        answers = await asyncio.gather(
            *(gateway.client.post("/admin/models", json=body, headers=headers) for _ in range(3))
        )
        assert [answer.status_code for answer in answers] == [202] * 3
        for second_headers in ({"idempotency-key": "two"}, {}):
            answer = await gateway.client.post("/admin/models", json=body, headers=second_headers)
            assert answer.status_code == 409
        # The key is of one request: neither another model nor a question is answered by it.
        sibling = await gateway.client.post(
            "/admin/models", json=body | {"name": "n"}, headers=headers
        )
        assert sibling.status_code == 409
        assert "added the model m" in sibling.json()["error"]["message"]
        question = await gateway.client.post(
            "/admin/models?dry_run=true", json=body | {"name": "n"}, headers=headers
        )
        assert "plans" in question.json()


async def test_a_model_that_is_pinned_after_its_unload_is_loaded(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m")
        await gateway.until("m", "ready")
        await gateway.client.post("/admin/models/m/unload")
        await gateway.until("m", "stopped")
        await gateway.client.patch("/admin/models/m", json={"policy": {"pinned": True}})
        await gateway.until("m", "ready")
        attempts = (await gateway.show("m"))["attempts"]
        assert len(attempts) == 2


async def test_a_client_that_leaves_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, start_delay_s=HANG_S)

    async with running(tmp_path, slow, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "m", keep_alive="5m")
        waiting = asyncio.create_task(ask(gateway, "m"))
        await count_call(gateway, 'queued{model="m"} 1')
        waiting.cancel()
        await count_call(gateway, 'queued{model="m"} 0')


def engines(world: World, name: str) -> int:
    return sum(engine.spec.model == name and engine.main_runs for engine in world.engines.values())


async def count_call(gateway: Running, requests: str) -> None:
    async with asyncio.timeout(hang_s()):
        while f"fitserve_requests_{requests}" not in (await gateway.client.get("/metrics")).text:
            await asyncio.sleep(0.02)


async def serving(gateway: Running, name: str, copies: int) -> Any:
    """The model's view once so many of its copies serve."""
    async with asyncio.timeout(hang_s()):
        while True:
            view = await gateway.show(name)
            if sum(replica["state"] == "ready" for replica in view["replicas"]) == copies:
                return view
            await asyncio.sleep(0.02)


async def test_one_copy_leaves_for_another_model_while_the_other_serves(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "pair", copies=2)
        await serving(gateway, "pair", 2)
        over, answers = asyncio.Event(), list[int]()

        async def client() -> None:
            while not over.is_set():
                answers.append((await ask(gateway, "pair")).status_code)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client())
            await add(gateway, tmp_path, "c")
            assert "pair (copy 2) is unloaded" in (await gateway.until("c", "stopped"))["detail"]
            assert (await ask(gateway, "c")).status_code == 200
            assert (engines(gateway.world, "pair"), engines(gateway.world, "c")) == (1, 1)

            async def says_one_serves() -> bool:
                view = await gateway.show("pair")
                return (view["state"], view["detail"][:20]) == ("ready", "1 of 2 copies serve;")

            # The other copy is planned meanwhile, and says its reason afterwards.
            await wait_until("one of two copies serves", says_one_serves)
            # It is asked all the time, and still nobody leaves for its second copy: its requests do
            # not wait.
            before = len(answers)
            await wait_until("it is asked forty times", lambda: len(answers) >= before + 40)
            assert engines(gateway.world, "c") == 1
            assert (await gateway.client.post("/admin/models/c/stop")).status_code == 202
            await serving(gateway, "pair", 2)
            over.set()
        assert set(answers) == {200}
        view = await gateway.show("pair")
        assert [attempt["failure"] for attempt in view["attempts"]] == [None] * 3
        metrics = (await gateway.client.get("/metrics")).text
        assert 'fitserve_unloads_total{model="pair",why="room"} 1' in metrics


async def test_the_answers_of_a_copy_are_finished_before_it_leaves(tmp_path: Path) -> None:
    hold = tmp_path / "hold"

    def holds(spec: LaunchSpec) -> EngineScript:
        is_pair = spec.model == "pair"
        return EngineScript(model=spec.model, max_model_len=131072, hold=hold if is_pair else None)

    async with running(tmp_path, holds, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "pair", copies=2)
        await serving(gateway, "pair", 2)
        await add(gateway, tmp_path, "c")
        await gateway.until("c", "stopped")
        hold.touch()
        answers = [
            asyncio.create_task(ask(gateway, "pair", prompt=str(number))) for number in range(8)
        ]
        await count_call(gateway, 'in_flight{model="pair"} 8')
        asks = asyncio.create_task(ask(gateway, "c"))
        async with asyncio.timeout(hang_s()):
            while (
                "requests in flight are answered first"
                not in (view := await gateway.show("pair"))["detail"]
            ):
                await asyncio.sleep(0.02)
        assert view["state"] == "ready"
        assert (engines(gateway.world, "pair"), engines(gateway.world, "c")) == (2, 0)
        hold.unlink()
        assert {answer.status_code for answer in await asyncio.gather(asks, *answers)} == {200}
        assert (engines(gateway.world, "pair"), engines(gateway.world, "c")) == (1, 1)


async def test_a_copy_returns_for_waiting_requests_once_its_evictor_is_idle(
    tmp_path: Path,
) -> None:
    def holds(spec: LaunchSpec) -> EngineScript:
        return EngineScript(
            model=spec.model, max_model_len=131072, hold=tmp_path / f"hold-{spec.model}"
        )

    async with running(tmp_path, holds, hardware=TWO_GPUS, queue_timeout_s=HANG_S) as gateway:
        await add(gateway, tmp_path, "pair", copies=2, args={"max-num-seqs": 1})
        await serving(gateway, "pair", 2)
        await add(gateway, tmp_path, "c")
        await gateway.until("c", "stopped")
        assert (await ask(gateway, "c")).status_code == 200
        await serving(gateway, "pair", 1)
        for name in ("c", "pair"):
            (tmp_path / f"hold-{name}").touch()
        task = asyncio.create_task(ask(gateway, "c"))
        await count_call(gateway, 'in_flight{model="c"} 1')
        answers = [
            asyncio.create_task(ask(gateway, "pair", prompt=str(number))) for number in range(6)
        ]
        await count_call(gateway, 'queued{model="pair"} 4')
        # The model c keeps its place while it answers.
        await asyncio.sleep(1.0)
        assert (await gateway.show("c"))["state"] == "ready"
        (tmp_path / "hold-c").unlink()
        assert (await task).status_code == 200
        async with asyncio.timeout(hang_s()):
            while engines(gateway.world, "pair") < 2:
                await asyncio.sleep(0.02)
        (tmp_path / "hold-pair").unlink()
        await serving(gateway, "pair", 2)
        await gateway.until("c", "stopped")
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}


@pytest.mark.parametrize("end", ["removed", "unloaded"])
async def test_a_copy_comes_back_at_once_where_its_room_is_free(tmp_path: Path, end: str) -> None:
    # Time that goes by brings nothing back in this test.
    with mock.patch("gateway.controller.fleet.managed_model.REPLAN_S", 10 * HANG_S):
        async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
            await add(gateway, tmp_path, "pair", copies=2)
            await serving(gateway, "pair", 2)
            await add(gateway, tmp_path, "c")
            await gateway.until("c", "stopped")
            assert (await ask(gateway, "c")).status_code == 200
            await serving(gateway, "pair", 1)
            async with asyncio.timeout(hang_s()):
                while "1 of 2 copies serve; " not in (await gateway.show("pair"))["detail"]:
                    await asyncio.sleep(0.02)
            if end == "removed":
                await gateway.client.delete("/admin/models/c")
            else:
                await gateway.client.patch("/admin/models/c", json={"policy": {"keep_alive": 0}})
            await serving(gateway, "pair", 2)


async def test_a_planned_eviction_is_logged_once_however_often_it_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ""

    def told_bytes() -> int:
        nonlocal output
        new = capsys.readouterr()
        output += new.out + new.err
        return output.count("others give")

    # No model has had its residence, and the awaited one is planned again all the time.
    long = (
        mock.patch("gateway.controller.decisions.eviction.MAX_S", HANG_S),
        mock.patch("gateway.controller.decisions.eviction.MIN_S", HANG_S),
    )
    residence_patch = mock.patch("gateway.controller.evictor.MIN_S", 0.05)
    # Their requests are known before the next plan: a model without requests leaves first, and then
    # another one would be logged.
    count_patch = mock.patch("gateway.controller.evictor._COUNT_S", 0.0)
    with long[0], long[1], residence_patch, count_patch:
        async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
            for name in "ab":
                await add(gateway, tmp_path, name)
                await gateway.until(name, "ready")
                assert (await ask(gateway, name)).status_code == 200
            await add(gateway, tmp_path, "c")
            await gateway.until("c", "stopped")
            task = asyncio.create_task(ask(gateway, "c"))
            async with asyncio.timeout(hang_s()):
                while not told_bytes():
                    await asyncio.sleep(0.02)
            await asyncio.sleep(2.0)
            assert told_bytes() == 1
            task.cancel()


async def test_a_model_loaded_without_request_leaves_at_once_for_a_request(
    tmp_path: Path,
) -> None:
    # A residence is longer than a request of `ask` may take.
    long = (
        mock.patch("gateway.controller.decisions.eviction.MAX_S", 2 * HANG_S),
        mock.patch("gateway.controller.decisions.eviction.MIN_S", 2 * HANG_S),
    )
    with long[0], long[1]:
        async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
            for name in "ab":
                await add(gateway, tmp_path, name)
                await gateway.until(name, "ready")
            assert (await ask(gateway, "b")).status_code == 200
            await add(gateway, tmp_path, "c")
            await gateway.until("c", "stopped")
            assert (await ask(gateway, "c")).status_code == 200
            assert loaded_models(gateway.world) == {"b", "c"}
            task = asyncio.create_task(ask(gateway, "a"))
            await gateway.until("a", "starting")

            async def waits() -> bool:
                return "to be unloaded" in (await gateway.show("a"))["detail"]

            await wait_until("a waits for another model", waits)
            assert loaded_models(gateway.world) == {"b", "c"}
            task.cancel()


async def test_a_model_stopped_by_its_owner_stays_stopped_after_failures(
    tmp_path: Path,
) -> None:
    def fails(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, exit_code=1, last_words="RuntimeError: no")

    async with running(
        tmp_path, fails, hardware=TWO_GPUS, backoff_s=HANG_S, backoff_max_s=HANG_S
    ) as gateway:
        await add(gateway, tmp_path, "m", max_attempts=1)
        await gateway.until("m", "quarantined")
        await gateway.client.post("/admin/models/m/stop")
        await gateway.until("m", "stopped")
        error = (await ask(gateway, "m")).json()["error"]
        assert "`fitserve start m` loads it again" in error["message"]
        await gateway.client.post("/admin/models/m/start")
        await gateway.until("m", "quarantined")


async def test_a_copy_without_evictions_is_not_planned_anew_for_each_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time that goes by has nothing planned in this test.
    monkeypatch.setattr("gateway.controller.fleet.managed_model.REPLAN_S", 10 * HANG_S)
    hold = tmp_path / "hold"

    def holds(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, max_model_len=131072, hold=hold)

    async with running(tmp_path, holds, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "c", pinned=True)
        await gateway.until("c", "ready")
        await add(gateway, tmp_path, "pair", copies=2, args={"max-num-seqs": 1})
        await serving(gateway, "pair", 1)
        async with asyncio.timeout(hang_s()):
            while "1 of 2 copies serve; " not in (await gateway.show("pair"))["detail"]:
                await asyncio.sleep(0.02)
        capsys.readouterr()
        for _ in range(6):
            hold.touch()
            answers = [
                asyncio.create_task(ask(gateway, "pair", prompt=str(number))) for number in range(4)
            ]
            await count_call(gateway, 'queued{model="pair"} 2')
            await asyncio.sleep(0.2)
            hold.unlink()
            assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
            await count_call(gateway, 'queued{model="pair"} 0')
            await asyncio.sleep(0.2)
        assert "no plan" not in capsys.readouterr().out


async def test_copies_of_a_pinned_model_never_leave(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        await add(gateway, tmp_path, "pair", copies=2, pinned=True)
        await serving(gateway, "pair", 2)
        await add(gateway, tmp_path, "c")
        await gateway.until("c", "no_plan")
        assert (await ask(gateway, "c")).status_code == 503
        assert engines(gateway.world, "pair") == 2


async def test_a_pinned_model_without_room_names_the_holders_and_ways_out(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        for name in "ab":
            await add(gateway, tmp_path, name, pinned=True)
            await gateway.until(name, "ready")
        await add(gateway, tmp_path, "c", pinned=True)
        detail = (await gateway.until("c", "no_plan"))["detail"]
        assert "a holds 78.11 GiB of GPU 0; b holds 78.11 GiB of GPU 1" in detail
        assert "Without that there is a plan: `fitserve stop a; fitserve stop b`." in detail
        assert "`fitserve set a --no-pinned` lets a leave for others." in detail
        # Each of the ways is one.
        change = await gateway.client.patch("/admin/models/a", json={"policy": {"pinned": False}})
        assert change.status_code == 200, change.text
        await gateway.until("c", "ready")
        assert loaded_models(gateway.world) == {"b", "c"}


async def test_a_pinned_model_that_waits_for_its_place_is_starting(tmp_path: Path) -> None:
    hold = tmp_path / "hold"

    def holds(spec: LaunchSpec) -> EngineScript:
        return EngineScript(
            model=spec.model, max_model_len=131072, hold=hold if spec.model in "ab" else None
        )

    async with running(tmp_path, holds, hardware=TWO_GPUS) as gateway:
        for name in "ab":
            await add(gateway, tmp_path, name)
            await gateway.until(name, "ready")
        hold.touch()
        answers = [asyncio.create_task(ask(gateway, name)) for name in "ab"]
        for name in "ab":
            await count_call(gateway, f'in_flight{{model="{name}"}} 1')
        for name in "cd":
            await add(gateway, tmp_path, name, pinned=True)
        # One waits for the other engine's answers, and one for its turn.
        async with asyncio.timeout(hang_s()):
            while "another model is unloaded" not in "".join(
                [(await gateway.show(name))["detail"] for name in "cd"]
            ):
                await asyncio.sleep(0.02)
        for _ in range(20):
            views = [await gateway.show(name) for name in "cd"]
            assert {view["state"] for view in views} == {"starting"}, [
                view["detail"] for view in views
            ]
            await asyncio.sleep(0.05)
        hold.unlink()
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
        for name in "cd":
            await gateway.until(name, "ready")


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S, 400 * DAY_S, -400 * DAY_S])
async def test_a_clock_that_is_set_unloads_no_model_and_keeps_none(
    tmp_path: Path, step_s: float
) -> None:
    wall = time.time
    async with running(tmp_path, healthy, hardware=TWO_GPUS) as gateway:
        for name in "ab":
            await add(gateway, tmp_path, name, keep_alive=3600)
            await gateway.until(name, "ready")
            assert (await ask(gateway, name)).status_code == 200
        await add(gateway, tmp_path, "c", keep_alive=3600)
        await gateway.until("c", "stopped")
        with mock.patch("time.time", side_effect=lambda: wall() + step_s):
            # The residences of a and b are over, whatever the clock says.
            assert (await ask(gateway, "c")).status_code == 200
            assert len(loaded_models(gateway.world)) == 2
            absent_name = ({"a", "b"} - loaded_models(gateway.world)).pop()
            assert (await ask(gateway, absent_name)).status_code == 200
        # And again where the clock is right.
        (absent_name,) = {"a", "b", "c"} - loaded_models(gateway.world)
        assert (await ask(gateway, absent_name)).status_code == 200
        metrics = (await gateway.client.get("/metrics")).text
        assert 'why="room"' in metrics
        assert 'why="idle"' not in metrics
