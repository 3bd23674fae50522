"""Engines that freeze: real processes that are stopped, and the clients that wait for them. Core
and HTTP server of the scripted engine are two
processes, as those of a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.watch.watcher import start_poll_s
from gateway.diagnosis.checks.check_index import CheckIndex
from gateway.diagnosis.log_reader import LogReader
from gateway.domain import LaunchSpec
from tests.support.paths import FAKE_ENGINE, LOGS
from tests.support.patience import HANG_S, hang_s
from tests.support.process_engines import running_processes
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

ASK = {"model": "m", "prompt": "hi", "max_tokens": 3}


@asynccontextmanager
async def processes(
    folder: Path, *script: str, replicas: int = 1, **settings: Any
) -> AsyncIterator[Running]:
    """A gateway with one model of so many replicas, all ready. script: more flags of the engine."""
    program = (sys.executable, "-S", str(FAKE_ENGINE), "--spawn-child", *script)
    async with running_processes(
        folder, program, **{"silent_after_s": HANG_S, "hang_after_s": HANG_S, **settings}
    ) as gateway:
        await gateway.add("m", model_folder(folder / "model"), replicas=replicas)
        await until_replicas(gateway, *["ready"] * replicas)
        yield gateway


async def first_failure(gateway: Running) -> Any:
    """The failure of the first attempt, once it has one."""
    async with asyncio.timeout(hang_s()):
        while not (attempts := (await gateway.show("m"))["attempts"]) or not attempts[0]["failure"]:
            await asyncio.sleep(0.02)
    return attempts[0]["failure"]


async def until_replicas(gateway: Running, *states: str) -> None:
    async with asyncio.timeout(hang_s()):
        while [replica["state"] for replica in (await gateway.show("m"))["replicas"]] != [*states]:
            await asyncio.sleep(0.02)


def members(folder: Path, replica: int = 0) -> tuple[int, list[int]]:
    """The pids of the engine's HTTP server, and of the rest of it."""
    (record,) = (folder / "data/instances").glob(f"m-r{replica}-a*.json")
    leader = json.loads(record.read_text())["pid"]
    rest = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if os.getsid(int(entry.name)) == leader != int(entry.name):
                rest.append(int(entry.name))
    return leader, rest


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.parametrize("part", ["server", "core", "both"])
async def test_clients_of_a_stopped_engine_are_answered_by_another(
    tmp_path: Path, part: str
) -> None:
    hold = tmp_path / "hold"
    async with processes(tmp_path, "--hold", str(hold), replicas=2) as gateway:
        leader, rest = members(tmp_path)
        pids = {"server": [leader], "core": rest, "both": [leader, *rest]}[part]
        assert pids
        hold.touch()
        asking = [
            asyncio.create_task(gateway.client.post("/v1/completions", json=ASK)) for _ in range(8)
        ]
        async with asyncio.timeout(hang_s()):
            while (
                "fitserve_requests_in_flight"
                not in (page := (await gateway.client.get("/metrics")).text)
                or " 8" not in page
            ):
                await asyncio.sleep(0.02)
        send(pids, signal.SIGSTOP)
        try:
            await until_replicas(gateway, "unreachable", "ready")
            assert "are stopped" in (await gateway.show("m"))["replicas"][0]["detail"]
            hold.unlink()
            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}
            for _ in range(4):
                assert (await gateway.client.post("/v1/completions", json=ASK)).status_code == 200
        finally:
            send(pids, signal.SIGCONT)
        await until_replicas(gateway, "ready", "ready")
        assert len((await gateway.show("m"))["attempts"]) == 2


async def test_clients_hear_that_the_only_engine_froze_and_a_frozen_engine_is_replaced(
    tmp_path: Path,
) -> None:
    hold = tmp_path / "hold"
    async with processes(
        tmp_path, "--hold", str(hold), hang_after_s=2, backoff_s=HANG_S, backoff_max_s=HANG_S
    ) as gateway:
        leader, rest = members(tmp_path)
        hold.touch()
        plain = asyncio.create_task(gateway.client.post("/v1/completions", json=ASK))
        async with gateway.client.stream(
            "POST", "/v1/completions", json={**ASK, "stream": True}
        ) as stream:
            lines = stream.aiter_lines()
            # Its first token is out, so nobody else can go on with it.
            first_line = await anext(lines)
            send([leader, *rest], signal.SIGSTOP)
            events = [first_line, *[line async for line in lines]]
        assert "error" in json.loads(
            events[-1].removeprefix("data: ") or events[-2].removeprefix("data: ")
        )
        assert "[DONE]" not in "".join(events)
        answer = await plain
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
        async with asyncio.timeout(hang_s()):
            while len((view := await gateway.show("m"))["attempts"]) == 1:
                await asyncio.sleep(0.02)
        assert view["attempts"][0]["failure"]["kind"] == "hang"
        with pytest.raises(ProcessLookupError):
            os.kill(leader, 0)


@pytest.mark.parametrize(
    ("spins", "does"), [(False, "does nothing"), (True, "computes without an end")]
)
async def test_a_frozen_engine_with_good_health_gets_no_requests(
    tmp_path: Path, spins: bool, does: str
) -> None:
    def mute(spec: LaunchSpec) -> EngineScript:
        # Verification asks three times; nothing is answered after that.
        return EngineScript(model=spec.model, hang_after=3, spins=spins)

    async with running(tmp_path, mute, silent_after_s=2, hang_after_s=HANG_S) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        answer = await gateway.client.post("/v1/completions", json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
        assert (await gateway.until("m", "unreachable"))["detail"].startswith(
            f"the engine gives its clients nothing, {does}"
        )


async def test_an_engine_that_spins_is_replaced_once_it_was_mute_for_long(tmp_path: Path) -> None:
    specs: list[str] = []

    def spinning(spec: LaunchSpec) -> EngineScript:
        specs.append(spec.name)
        return EngineScript(model=spec.model, hang_after=3 if len(specs) == 1 else None, spins=True)

    async with running(tmp_path, spinning, silent_after_s=1, hang_after_s=3) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        assert (await gateway.client.post("/v1/completions", json=ASK)).status_code == 503
        async with asyncio.timeout(hang_s()):
            while len(specs) < 2:
                await asyncio.sleep(0.02)
        view = await gateway.until("m", "ready")
        assert view["attempts"][0]["failure"]["kind"] == "hang"
        assert "computes without an end" in view["attempts"][0]["failure"]["message"]


async def test_a_prompt_that_is_read_for_long_at_full_load_costs_no_engine_its_place(
    tmp_path: Path,
) -> None:
    """Nobody is answered meanwhile, the smallest request neither; the metrics move."""

    def slow(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, spins=True, prefill_tokens_per_second=600)

    async with running(tmp_path, slow, silent_after_s=3, hang_after_s=HANG_S) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        (engine,) = gateway.world.engines.values()
        asking = asyncio.create_task(
            gateway.client.post("/v1/completions", json={**ASK, "prompt": [1] * 3500})
        )
        states = set()
        while not asking.done():
            states.add((await gateway.show("m"))["state"])
            await asyncio.sleep(0.02)
        assert (await asking).status_code == 200
        assert states == {"ready"}
        assert any(b"/metrics" in line for line in engine.log)


async def test_the_lines_after_a_failure_do_not_have_it_described_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each description reads the cures: a long log after an error would stop the gateway."""
    describe, failures = vars(LogReader)["failure"].fget, list[LogReader]()

    def count(reader: LogReader) -> object:
        failures.append(reader)
        return describe(reader)

    monkeypatch.setattr(LogReader, "failure", property(count))
    words = (LOGS / "failed-oom-load-0.19.1.log").read_text().splitlines()
    lines = tuple((0.0, line) for line in words + ["INFO the end is near"] * 500)

    def fails(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, lines=lines, exit_code=1, serve=False)

    async with running(tmp_path, fails, backoff_s=HANG_S, backoff_max_s=HANG_S) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        failure = await first_failure(gateway)
    assert failure["kind"] == "gpu_oom"
    assert len(failures) < 2 * len(words)


async def test_the_checks_of_an_engine_are_read_in_a_thread_and_freed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tables take a fifth of a second of the gateway's loop, and 12 MB of its memory."""
    threads: list[bool] = []
    tables = list[CheckIndex]()
    open_tables = CheckIndex._open_tables

    def record(index: CheckIndex) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        tables.append(index)
        return open_tables(index)

    monkeypatch.setattr(CheckIndex, "_open_tables", record)
    lines = ("Traceback (most recent call last):", "FrobError: no frob of this engine is known")

    def fails(spec: LaunchSpec) -> EngineScript:
        script = tuple((0.0, line) for line in lines)
        return EngineScript(model=spec.model, lines=script, exit_code=1, serve=False)

    async with running(tmp_path, fails, backoff_s=HANG_S, backoff_max_s=HANG_S) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        failure = await first_failure(gateway)
    assert failure["line"].endswith("no frob of this engine is known")
    assert threads
    assert not any(threads)
    assert [index._tables for index in tables] == [None] * len(tables)


async def test_an_engine_that_soon_listens_is_looked_at_more_often() -> None:
    """A forked 8B waited up to half a second of 20 for the look at its first answer."""
    early_s = {start_poll_s(phase) for phase in ("starting", "load", "profile", "compile")}
    late_s = {start_poll_s(phase) for phase in ("kv", "graphs", "serving")}
    assert max(late_s) * 4 < min(early_s)
