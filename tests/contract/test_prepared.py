"""Engines that a prepared process forks: like plain starts in all that others see of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from gateway.hosts.process import host as process_host
from gateway.hosts.process import procfs
from gateway.hosts.process.host import ProcessHost
from gateway.hosts.process.prepared import fork_client, pool
from tests.support.patience import HANG_S

from .harness import answering, find, until, wait_for_exit
from .prepared_harness import PreparedHarness
from .process_harness import killed_at_line, living_in

pytestmark = pytest.mark.anyio
KILLS = 95


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared process is looked after in each pass."""
    monkeypatch.setattr(pool, "TEND_S", 0.0)
    monkeypatch.setattr(pool, "RESTART_S", 0.0)
    # A busy machine takes longer to fork. Only starts beside a stopped process wait for so long.
    monkeypatch.setattr(fork_client, "PATIENCE_S", 10.0)
    # So does the parent of an engine to note its exit code.
    monkeypatch.setattr(process_host, "RECORD_TIMEOUT_S", 10.0)


@pytest.fixture
async def harness(tmp_path: Path, anyio_backend: str) -> AsyncIterator[PreparedHarness]:
    prepared_harness = PreparedHarness(tmp_path)
    try:
        yield prepared_harness
    finally:
        await prepared_harness.cleanup()


async def start_engine(harness: PreparedHarness, spec: LaunchSpec) -> bool:
    """Start an engine, and wait until it answers. Returns whether it was forked."""
    await answering(await harness.host.start(spec))
    return harness.is_forked(spec.name)


async def prepare(harness: PreparedHarness) -> int:
    """A plain start, and the prepared process that follows. Returns its pid."""
    assert not await start_engine(harness, harness.make_spec("plain"))
    (pid,) = await harness.prepared_pids()
    return pid


async def test_a_forked_engine_sees_the_same_as_a_plain_one(harness: PreparedHarness) -> None:
    await prepare(harness)
    spec = harness.make_spec("forked", script=["--print", "two words"])
    assert (await harness.host.conditions(spec.engine, "")).origin == "fork"
    assert await start_engine(harness, spec)
    assert {instance.name: instance.origin for instance in await harness.host.list()} == {
        "plain": "process",
        "forked": "fork",
    }
    plain, fork = harness.description("plain"), harness.description("forked")
    assert fork["argv"][-2:] == ["--print", "two words"]
    assert fork["cwd"] == str(harness.data_dir / "run/forked")
    for name in ("argv", "orig_argv", "cwd"):
        del plain[name], fork[name]
    keys = [report["env"].pop("VLLM_API_KEY") for report in (plain, fork)]
    assert keys[0] != keys[1]
    cwds = [report["path"].pop(0) for report in (plain, fork)]
    assert cwds == [str(harness.data_dir / "run" / name) for name in ("plain", "forked")]
    assert plain["env"]["SET_BY_IMPORT"] == "1"
    assert "DROPPED_BY_IMPORT" not in plain["env"]
    # The file to which a fork writes its imports is open beside those of a plain start.
    assert fork.pop("number") <= plain.pop("number") + 1
    assert fork == plain


async def test_a_start_that_was_announced_is_forked_immediately(harness: PreparedHarness) -> None:
    spec = harness.make_spec("first").evolve(model="first")
    await harness.host.prepare_fork(spec)
    assert await harness.prepared_pids()
    assert await start_engine(harness, spec)
    (order,) = harness.data_dir.glob("prepared/*/order.json")
    assert "VLLM_API_KEY" not in order.read_text()


async def test_a_start_waits_for_the_rest_of_its_imports(
    harness: PreparedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WAIT_S", HANG_S)
    begin_file, let_go = harness.data_dir / "begun", harness.data_dir / "go"
    with (harness.packages / "described.py").open("a") as file:
        file.write(
            "import pathlib, time\n"
            f"pathlib.Path({str(begin_file)!r}).touch()\n"
            f"while not pathlib.Path({str(let_go)!r}).exists(): time.sleep(0.01)\n"
        )
    spec = harness.make_spec("first")
    await harness.host.prepare_fork(spec)
    await harness.host.list()

    async def is_importing() -> bool:
        return begin_file.exists()

    await until("the prepared process imports", is_importing)
    starting = asyncio.ensure_future(start_engine(harness, spec))
    await asyncio.wait({starting}, timeout=0.1)
    let_go.touch()
    assert await starting


async def test_a_start_does_not_wait_long_for_imports(
    harness: PreparedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WAIT_S", 0.1)
    begin_file = harness.data_dir / "begun"
    with (harness.packages / "described.py").open("a") as file:
        file.write(
            "import pathlib, time\n"
            f"begun = pathlib.Path({str(begin_file)!r})\n"
            "if not begun.exists():\n    begun.touch()\n    time.sleep(10_000)\n"
        )
    spec = harness.make_spec("first")
    await harness.host.prepare_fork(spec)
    await harness.host.list()

    async def is_importing() -> bool:
        return begin_file.exists()

    await until("the prepared process imports", is_importing)
    assert not await start_engine(harness, spec)


async def test_only_the_fork_gets_the_key(harness: PreparedHarness) -> None:
    pid = await prepare(harness)
    assert await start_engine(harness, harness.make_spec("forked"))
    keys = [
        json.loads(harness.record(name).read_text())["key"].encode() for name in ("plain", "forked")
    ]
    folder = harness.data_dir / "prepared"
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    texts += [(procfs.PROC / str(pid) / name).read_bytes() for name in ("environ", "cmdline")]
    assert texts
    assert not [text for text in texts if any(key in text for key in keys)]
    assert {path.stat().st_mode & 0o077 for path in folder.rglob("socket")} == {0}


async def test_the_exit_code_of_an_engine_is_known_even_to_the_next_gateway(
    harness: PreparedHarness,
) -> None:
    await prepare(harness)
    spec = harness.make_spec("coded", script=["--exit-code", "7", "--exit-after", "0.1"])
    # Its model may not have listened: the next start of that model would be a plain one.
    spec = spec.evolve(model="coded")
    await harness.host.start(spec)
    assert harness.is_forked("coded")
    assert (await wait_for_exit(harness.host, "coded")).exit_code == 7
    assert await start_engine(harness, harness.make_spec("killed"))
    harness.kill_engine("killed")
    harness.restart()
    assert (await wait_for_exit(harness.host, "killed")).exit_code == -signal.SIGKILL


async def test_an_ended_prepared_process_still_notes_exit_codes(harness: PreparedHarness) -> None:
    pid = await prepare(harness)
    assert await start_engine(harness, harness.make_spec("forked"))
    os.kill(pid, signal.SIGTERM)
    (other_pid,) = await harness.prepared_pids(unlike=[pid])
    assert other_pid != pid
    os.kill(harness.pid("forked"), signal.SIGKILL)
    assert (await wait_for_exit(harness.host, "forked")).exit_code == -signal.SIGKILL

    async def is_gone() -> bool:
        await harness.host.list()
        return procfs.read(pid) is None

    await until("the former process has nothing left to note", is_gone)


async def test_a_process_whose_socket_is_gone_ends(harness: PreparedHarness) -> None:
    """As where a gateway replaces a process that it could not know yet."""
    pid = await prepare(harness)
    (path,) = harness.data_dir.glob("prepared/*/socket")
    path.unlink()

    async def is_gone() -> bool:
        await harness.host.list()
        return procfs.read(pid) is None

    await until("the process has ended", is_gone)


async def test_an_engine_outlives_its_prepared_process(harness: PreparedHarness) -> None:
    pid = await prepare(harness)
    assert await start_engine(harness, harness.make_spec("forked"))
    os.kill(pid, signal.SIGKILL)
    # Nothing is prepared now, and nothing waits for it.
    assert not await start_engine(harness, harness.make_spec("next"))
    assert (await find(harness.host, "forked")) is not None
    harness.kill_engine("forked")
    exit_state = await wait_for_exit(harness.host, "forked")
    assert exit_state.exit_code is None
    await harness.prepared_pids(unlike=[pid])
    assert await start_engine(harness, harness.make_spec("last"))


async def test_a_stopped_prepared_process_delays_no_start(harness: PreparedHarness) -> None:
    pid = await prepare(harness)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not await start_engine(harness, harness.make_spec("next"))
    finally:
        os.kill(pid, signal.SIGCONT)
    await harness.host.list()
    assert harness.members("next") == 1


async def test_an_update_of_the_engine_ends_its_prepared_process(harness: PreparedHarness) -> None:
    pid = await prepare(harness)
    with (harness.packages / "described.py").open("a") as file:
        file.write("READ = 'as updated'\n")
    assert not await start_engine(harness, harness.make_spec("updated"))
    assert harness.description("updated")["read"] == "as updated"
    (other_pid,) = await harness.prepared_pids(unlike=[pid])
    assert other_pid != pid
    assert await start_engine(harness, harness.make_spec("next"))
    assert harness.description("next")["read"] == "as updated"


async def test_a_variable_that_was_read_at_import_must_agree(harness: PreparedHarness) -> None:
    await prepare(harness)
    spec = harness.make_spec("other")
    equal_spec = spec.evolve(env={**spec.env, "VLLM_NOT_READ": "1"})
    assert await start_engine(harness, equal_spec)
    assert harness.description("other")["env"]["VLLM_NOT_READ"] == "1"
    spec = harness.make_spec("read")
    read = spec.evolve(env={**spec.env, "VLLM_READ_AT_IMPORT": "1"})
    assert not await start_engine(harness, read)
    assert harness.description("read")["read"] == "1"


async def test_gpus_are_chosen_for_each_fork(harness: PreparedHarness) -> None:
    spec = harness.make_spec("plain").evolve(gpus=("GPU-0",))
    assert not await start_engine(harness, spec)
    await harness.prepared_pids()
    assert await start_engine(harness, harness.make_spec("forked").evolve(gpus=("GPU-1", "GPU-2")))
    assert harness.description("forked")["env"]["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"


async def test_another_cache_is_another_prepared_process(harness: PreparedHarness) -> None:
    """The code of a repository decides the content of its cache: nothing is shared with others."""
    plain = harness.make_spec("plain").evolve(cache="one", caches={"VLLM_CACHE_ROOT": "vllm"})
    assert not await start_engine(harness, plain)
    (pid,) = await harness.prepared_pids()
    spec = harness.make_spec("other").evolve(cache="two", caches={"VLLM_CACHE_ROOT": "vllm"})
    assert not await start_engine(harness, spec)
    await harness.prepared_pids(unlike=[pid])
    second_spec = harness.make_spec("again").evolve(cache="two", caches={"VLLM_CACHE_ROOT": "vllm"})
    assert await start_engine(harness, second_spec)


async def test_no_more_environments_are_prepared_than_allowed(tmp_path: Path) -> None:
    harness = PreparedHarness(tmp_path, limit=2)
    try:
        for version in ("2", "3"):
            folder = tmp_path / f"engines/fake-{version}"
            (folder / "bin").mkdir(parents=True)
            (folder / ".complete").touch()
        await prepare(harness)

        def spec(name: str, version: str) -> LaunchSpec:
            new_spec = harness.make_spec(name)
            return new_spec.evolve(engine=new_spec.engine.evolve(version=version))

        assert not await start_engine(harness, spec("first", "2"))
        pids = await harness.prepared_pids(2)
        assert await start_engine(harness, spec("second", "2"))
        assert await start_engine(harness, spec("third", "1"))
        assert {view.engine for view in harness.views()} == {"fake==1", "fake==2"}
        assert not await start_engine(harness, spec("fourth", "3"))
        await harness.prepared_pids(1, unlike=pids)
        assert len(harness.views()) == 2
        assert "fake==3" in {view.engine for view in harness.views()}
        # An engine that is no longer installed is not prepared either.
        (tmp_path / "engines/fake-3/.complete").unlink()

        async def is_ended() -> bool:
            await harness.host.list()
            return "fake==3" not in {view.engine for view in harness.views()}

        await until("the removed engine's process has ended", is_ended)
    finally:
        await harness.cleanup()


async def test_memory_is_read_once_a_minute_however_often_it_is_shown(
    harness: PreparedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[int] = []

    def read(pid: int) -> int:
        readings.append(pid)
        return 7

    monkeypatch.setattr(fork_client, "read_pss", read)
    monkeypatch.setattr(fork_client, "MEMORY_S", 10 * HANG_S)
    pid = await prepare(harness)
    readings.clear()
    for _ in range(3):
        assert [view.pss_bytes for view in await harness.host.prepared_views()] == [7]
    assert readings == [pid]
    monkeypatch.setattr(fork_client, "MEMORY_S", 0.0)
    await harness.host.prepared_views()
    assert readings == [pid, pid]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import threading\n"
            "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
            "starts a thread",
        ),
        (
            "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n",
            "starts a process",
        ),
        (
            "import sys, types\n"
            "sys.modules['torch.cuda'] = types.SimpleNamespace(_initialized=True)\n",
            "initialises CUDA",
        ),
    ],
    ids=["thread", "process", "cuda"],
)
async def test_a_module_that_survives_no_fork_is_left_to_the_fork(
    harness: PreparedHarness, source: str, reason: str
) -> None:
    (harness.packages / "culprit.py").write_text(source)
    (harness.packages / "between.py").write_text("import culprit\n")
    with (harness.packages / "described.py").open("a") as file:
        file.write("import between, colorsys\n")
    began = time.time()
    await prepare(harness)
    (view,) = harness.views()
    assert began - 1 <= view.since <= time.time() + 1
    assert [prepared_view.pid for prepared_view in await harness.host.prepared_views()] == [
        view.pid
    ]
    assert view.refused["culprit"] == reason
    assert view.refused["between"] == "imports culprit"
    assert "colorsys" not in view.refused
    assert await start_engine(harness, harness.make_spec("forked"))
    for pid in procfs.session(view.pid):
        assert pid.pid == view.pid


async def test_modules_that_engines_import_later_are_prepared_next_time(
    harness: PreparedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MANY_NEW_MODULES", 1)
    (harness.packages / "later.py").write_text("print('LATER', flush=True)\n")
    pid = await prepare(harness)
    assert await start_engine(harness, harness.make_spec("first", script=["--late"]))
    (other_pid,) = await harness.prepared_pids(unlike=[pid])
    assert await start_engine(harness, harness.make_spec("second", script=["--late"]))
    assert "LATER" in (harness.data_dir / "logs/first.log").read_text()
    assert "LATER" not in (harness.data_dir / "logs/second.log").read_text()
    assert [view.pid for view in harness.views()] == [other_pid]


async def test_a_fork_that_dies_before_it_listens_makes_the_next_start_plain(
    harness: PreparedHarness,
) -> None:
    await prepare(harness)
    await harness.host.start(harness.make_spec("bad", script=["--no-serve", "--exit-code", "1"]))
    assert harness.is_forked("bad")
    await wait_for_exit(harness.host, "bad")
    await harness.host.list()
    assert not await start_engine(harness, harness.make_spec("plain2"))
    assert await start_engine(harness, harness.make_spec("forked2"))


async def test_nothing_is_prepared_where_memory_is_short(
    harness: PreparedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "available_bytes", lambda: pool.FREE_TO_PREPARE)
    assert not await start_engine(harness, harness.make_spec("plain"))
    for _ in range(5):
        await harness.host.list()
    assert not list((harness.data_dir / "prepared").glob("*/log"))
    monkeypatch.undo()
    monkeypatch.setattr(pool, "TEND_S", 0.0)
    await harness.prepared_pids()
    monkeypatch.setattr(pool, "available_bytes", lambda: 0)

    async def is_ended() -> bool:
        await harness.host.list()
        return not harness.views()

    await until("the process has ended", is_ended)


async def test_kill_at_any_line_of_a_forked_start_leaves_no_engine_without_a_record(
    harness: PreparedHarness,
) -> None:
    await prepare(harness)
    await harness.host.stop("plain", 0)
    number, forks = 1, 0
    while True:
        spec = harness.make_spec(f"a{number}", script=["--no-serve"])
        make_host = partial(ProcessHost, harness.data_dir, 1)
        pids = await asyncio.to_thread(killed_at_line, number, make_host, spec)
        host = harness.restart()
        folder = harness.data_dir / "run" / spec.name
        instance = await find(host, spec.name)
        if instance is None or instance.state == "exited":
            assert not living_in(folder), f"killed at line {number}"
        else:
            forks += harness.is_forked(spec.name)
            assert len(living_in(folder)) <= 1
        await host.stop(spec.name, grace_s=0)
        assert not living_in(folder)
        if not pids:
            break
        number += 7
    assert number > 100
    assert forks


async def test_a_process_killed_during_its_imports_is_prepared_again(
    harness: PreparedHarness,
) -> None:
    await prepare(harness)
    (first,) = await harness.prepared_pids()
    other_processes = set(harness.processes())
    os.kill(first, signal.SIGKILL)
    pids: list[int] = []

    async def is_killed() -> bool:
        await harness.host.list()
        pids[:] = set(harness.processes()) - other_processes
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return bool(pids)

    await until("a new prepared process is killed", is_killed)
    assert await harness.prepared_pids(unlike=[first, *pids])


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_import_that_outlives_its_gateway_has_no_twin(
    harness: PreparedHarness, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """One that takes too long is killed, and another process prepared."""
    begin_file, let_go = harness.data_dir / "begun", harness.data_dir / "go"
    with (harness.packages / "described.py").open("a") as file:
        file.write(
            "import os, pathlib, time\n"
            f"with pathlib.Path({str(begin_file)!r}).open('a') as file:\n"
            "    file.write(f'{os.getpid()}\\n')\n"
            f"while not pathlib.Path({str(let_go)!r}).exists(): time.sleep(0.01)\n"
        )
    await harness.host.prepare_fork(harness.make_spec("first"))

    async def imports() -> bool:
        await harness.host.list()
        return begin_file.exists() and bool(begin_file.read_text())

    await until("the prepared process imports", imports)
    (first,) = map(int, begin_file.read_text().split())
    for _ in range(3):
        harness.restart()
        for _ in range(3):
            await harness.host.list()
    assert set(harness.processes()) == {first}
    if hangs:
        monkeypatch.setattr(pool, "IMPORT_S", 0.0)
        await until("its end", lambda: _has_ended(harness, first))
        monkeypatch.setattr(pool, "IMPORT_S", HANG_S)
    let_go.touch()
    (pid,) = await harness.prepared_pids()
    assert (pid == first) != hangs


async def _has_ended(harness: PreparedHarness, pid: int) -> bool:
    await harness.host.list()
    return pid not in harness.processes()


async def test_random_kills_leave_no_orphan(harness: PreparedHarness) -> None:
    """Engines, prepared processes and gateways die at any time, in any order."""
    chance = random.Random(34)
    await prepare(harness)
    kills, number, most_bytes = 0, 0, 0
    begin_s = time.monotonic()
    while kills < KILLS:
        number += 1
        assert time.monotonic() - begin_s < 10 * HANG_S
        spec = harness.make_spec(f"k{number}")
        starting = asyncio.ensure_future(harness.host.start(spec))
        await asyncio.sleep(chance.random() * 0.05)
        kind = chance.choice(["engine", "prepared", "both", "gateway"])
        if kind in ("prepared", "both"):
            for view in harness.views():
                most_bytes = max(most_bytes, view.pss_bytes or 0)
                os.kill(view.pid, signal.SIGKILL)
                kills += 1
        with suppress(asyncio.CancelledError):
            await starting
        if kind in ("engine", "both"):
            harness.kill_engine(spec.name)
            kills += 1
        if kind == "gateway":
            harness.restart()
            kills += 1
        await harness.host.list()
        if chance.random() < 0.5:
            await harness.prepared_pids()
        await harness.host.stop(spec.name, 0)
        assert not living_in(harness.data_dir / "run" / spec.name)
    await harness.host.stop("plain", 0)

    async def is_clean() -> bool:
        await harness.host.list()
        process = {
            pid
            for pid in harness.processes()
            if (child_process := procfs.read(pid)) and child_process.is_alive
        }
        return process <= {view.pid for view in harness.views()}

    await until("only what is prepared is left", is_clean)
    print(f"{kills} kills, {number} starts, at most {most_bytes >> 20} MiB")  # noqa: T201
