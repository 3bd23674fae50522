"""Promises of the process host alone: it survives kill -9 of the gateway, shares no secret and
signals no stranger."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import EngineRef, LaunchSpec
from gateway.errors import HostError
from gateway.hosts.process import open_files, procfs
from gateway.hosts.process.host import ProcessHost
from gateway.hosts.process.instance_records import Record, Records
from tests.support.patience import HANG_S

from .harness import answering, find, until, wait_for_exit
from .process_harness import ProcessHarness, killed_at_line, living_in

pytestmark = pytest.mark.anyio


@pytest.fixture
async def harness(tmp_path: Path, anyio_backend: str) -> Any:
    process_harness = ProcessHarness(tmp_path)
    yield process_harness
    await process_harness.cleanup()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not ours, leader of a session of its own."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        assert process.poll() is None, "somebody signalled the stranger"
        process.kill()


def program(harness: ProcessHarness, source: str, **changes: Any) -> LaunchSpec:
    """A spec that runs this Python program."""
    return harness.make_spec("a1").evolve(argv=(sys.executable, "-S", "-c", source), **changes)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# --- a gateway that dies ---


def test_kill_at_any_line_of_start_leaves_nothing_or_an_instance_that_list_shows(
    tmp_path: Path,
) -> None:
    harness = ProcessHarness(tmp_path)
    outcomes: list[bool] = []

    async def check(spec: LaunchSpec) -> bool:
        host = harness.restart()
        instance = await find(host, spec.name)
        assert (instance is not None) == (harness.members(spec.name) == 1), (
            f"killed at line {number}"
        )
        assert await host.start(spec) == (instance or await find(host, spec.name))
        assert harness.members(spec.name) == 1, f"killed at line {number}"
        await host.stop(spec.name, grace_s=0)
        assert harness.members(spec.name) == 0
        assert not list((tmp_path / "run").iterdir())
        return instance is not None

    number = 1
    make_host = partial(ProcessHost, tmp_path)
    while killed_at_line(
        number, make_host, spec := harness.make_spec(f"a{number}", script=["--no-serve"])
    ):
        outcomes.append(asyncio.run(check(spec)))
        number += 1
    asyncio.run(harness.host.stop(spec.name, grace_s=0))
    assert number > 40
    # The new process and the death of its parent run at the same time in between.
    assert (outcomes[0], outcomes[-1]) == (False, True)


async def test_an_engine_that_renamed_itself_is_still_adopted(harness: ProcessHarness) -> None:
    # setproctitle writes over the environment, which the kernel then shows: an empty one is the
    # same to us.
    spec = program(
        harness, "import os, time\nif os.environ: os.execve('/bin/sleep', ['engine', '600'], {})"
    )
    first_start = await harness.host.start(spec)
    pid = harness.pid("a1")

    async def is_renamed() -> bool:
        return command_line(pid).startswith(b"engine")

    await until("the engine has another name", is_renamed)
    assert await harness.restart().list() == [first_start]


async def test_an_engine_whose_gateway_died_before_it_knew_the_pid_is_found_by_its_log(
    harness: ProcessHarness,
) -> None:
    """Also one that renamed itself, and of one that died the workers."""
    source = (
        "import os, subprocess\nif os.environ: subprocess.Popen(['/bin/sleep', '600']);"
        " os.execve('/bin/sleep', ['e', '600'], {})"
    )
    instance = await harness.host.start(program(harness, source))
    records = Records(harness.data_dir / "instances")
    record = records.read("a1")
    assert record is not None
    assert record.pid is not None

    async def two() -> bool:
        return harness.members("a1") == 2

    await until("it has a worker", two)
    records.write(record.evolve(pid=None, start_ticks=None))
    assert await harness.restart().list() == [instance]
    assert harness.pid("a1") == record.pid
    records.write(record.evolve(pid=None, start_ticks=None))
    os.kill(record.pid, signal.SIGKILL)
    assert (await wait_for_exit(harness.restart(), "a1")).exit_code in (-9, None)
    await harness.host.stop("a1", grace_s=0)
    assert harness.members("a1") == 0


async def test_an_engine_that_takes_long_to_be_born_is_waited_for(harness: ProcessHarness) -> None:
    """Its gateway died between fork and exec, and the machine is busy."""
    spec = harness.make_spec("a1")
    for folder in ("logs", "run/a1"):
        (harness.data_dir / folder).mkdir(parents=True)
    record = Record(
        name="a1",
        model="m",
        attempt=1,
        fingerprint="f1",
        port=spec.port,
        boot_id=procfs.boot_id(),
        born_in=os.getsid(0),
    )
    Records(harness.data_dir / "instances").write(record)
    waiting, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        log = os.open(harness.data_dir / "logs/a1.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.read(waiting, 1)
        os.setsid()
        os.dup2(log, 1)
        os.chdir(harness.data_dir / "run/a1")
        os.execv(spec.argv[0], spec.argv)
    try:
        await until(
            "it has its log", lambda: asyncio.sleep(0, (harness.data_dir / "logs/a1.log").exists())
        )
        listing = asyncio.create_task(harness.host.list())
        await asyncio.sleep(1.5)
        assert not listing.done()
        os.write(go, b"!")
        (instance,) = await listing
        assert (instance.state, harness.pid("a1")) == ("running", pid)
        await answering(instance)
    finally:
        os.kill(pid, signal.SIGKILL)


async def test_a_reader_of_the_log_is_not_taken_for_an_engine(
    harness: ProcessHarness, stranger: subprocess.Popen[bytes]
) -> None:
    log = harness.data_dir / "logs" / "a1.log"
    log.parent.mkdir(parents=True)
    log.touch()
    with subprocess.Popen(["tail", "-f", str(log)], start_new_session=True) as reader:  # noqa: ASYNC220
        record = Record(
            name="a1", model="m", attempt=1, fingerprint="f1", port=1, boot_id=procfs.boot_id()
        )
        Records(harness.data_dir / "instances").write(record)
        assert await harness.host.list() == []
        assert reader.poll() is None
        reader.kill()


async def test_a_record_whose_process_was_never_born_is_dropped(harness: ProcessHarness) -> None:
    spec = harness.make_spec("a1")
    record = Record(
        name="a1", model="m", attempt=1, fingerprint="f1", port=1, boot_id=procfs.boot_id()
    )
    Records(harness.data_dir / "instances").write(record)
    assert await harness.host.list() == []
    assert not harness.record("a1").exists()
    await answering(await harness.host.start(spec))


# --- the engine's key ---

_TELLS = """
import json, os, sys, time
files = {argument: open(argument).read() for argument in sys.argv[1:] if argument.endswith(".yaml")}
print(json.dumps({"env": os.environ.get("THE_KEY"), "files": files}), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["key_env", "key_option"])
async def test_each_start_gets_a_key_that_nobody_else_can_read(
    harness: ProcessHarness, way: str
) -> None:
    keys = {"key_env": "THE_KEY", "key_option": "api-key"}
    umask = os.umask(0o022)
    try:
        instance = await harness.host.start(program(harness, _TELLS, **{way: keys[way]}))
    finally:
        os.umask(umask)
    assert instance.key is not None
    assert len(instance.key.reveal()) >= 32
    line = await anext(aiter(harness.host.follow("a1")))
    document = json.loads(line)
    if way == "key_env":
        assert document == {"env": instance.key.reveal(), "files": {}}
    else:
        ((path, text),) = document["files"].items()
        assert text == f'api-key: "{instance.key.reveal()}"\n'
        assert os.stat(path).st_mode & 0o077 == 0  # noqa: PTH116
        assert command_line(harness.pid("a1")).split(b"\0")[-3:-1] == [b"--config", path.encode()]
    assert instance.key.reveal_bytes() not in command_line(harness.pid("a1"))
    assert harness.record("a1").stat().st_mode & 0o077 == 0
    assert instance.key.reveal() not in repr(instance)
    # A gateway that comes after knows the key; another start without a cache has another one.
    assert (await find(harness.restart(), "a1")) == instance
    await harness.host.stop("a1", grace_s=0)
    assert not harness.record("a1").exists()
    assert not list((harness.data_dir / "run").iterdir())
    second_instance = await harness.host.start(program(harness, _TELLS, **{way: keys[way]}))
    assert second_instance.key not in (None, instance.key)


async def test_engines_with_one_cache_have_one_key(harness: ProcessHarness) -> None:
    """An engine that names its compiled graphs by its key finds them again."""
    keys = []
    for cache in ("a" * 16, "a" * 16, "b" * 16):
        spec = program(harness, _TELLS, key_env="THE_KEY", cache=cache)
        keys.append((await harness.host.start(spec)).key)
        await harness.host.stop("a1", grace_s=0)
    assert keys[0] == keys[1]
    assert keys[2] not in (None, keys[0])


async def test_an_engine_that_takes_no_key_gets_none(harness: ProcessHarness) -> None:
    assert (await harness.host.start(harness.make_spec("a1"))).key is None


# --- strangers ---


async def test_a_pid_that_was_given_away_is_never_signalled(
    harness: ProcessHarness, stranger: subprocess.Popen[bytes]
) -> None:
    record = Record(
        name="a1", model="m", attempt=1, fingerprint="f1", port=1, boot_id=procfs.boot_id()
    )
    Records(harness.data_dir / "instances").write(record.evolve(pid=stranger.pid, start_ticks=1))
    instance = await wait_for_exit(harness.host, "a1")
    assert instance.exit_code is None
    await harness.host.stop("a1", grace_s=0)
    assert await harness.host.list() == []


@pytest.mark.parametrize("leader_lives", [True, False])
async def test_a_record_of_another_boot_signals_nobody(
    harness: ProcessHarness, leader_lives: bool
) -> None:
    command = "echo $$; exec sleep 600" if leader_lives else "sleep 600 >/dev/null & echo $!"
    shell = ["sh", "-c", command]
    with subprocess.Popen(shell, start_new_session=True, stdout=subprocess.PIPE) as leader:  # noqa: ASYNC220
        assert leader.stdout is not None
        stranger = procfs.read(int(leader.stdout.readline()))
        assert stranger is not None
        if not leader_lives:
            leader.wait()
        record = Record(
            name="a1",
            model="m",
            attempt=1,
            fingerprint="f1",
            port=1,
            boot_id="another",
            pid=leader.pid,
        )
        Records(harness.data_dir / "instances").write(
            record.evolve(start_ticks=stranger.start_ticks)
        )
        assert (await wait_for_exit(harness.host, "a1")).exit_code is None
        await harness.host.stop("a1", grace_s=0)
        assert await harness.host.list() == []
        after = procfs.read(stranger.pid)
        assert after is not None
        assert after.is_alive
        procfs.send(after, signal.SIGKILL)


async def test_hosts_of_two_data_folders_do_not_see_each_other(
    harness: ProcessHarness, tmp_path: Path
) -> None:
    instance = await harness.host.start(harness.make_spec("a1"))
    other_process_host = ProcessHost(tmp_path / "other")
    assert await other_process_host.list() == []
    await other_process_host.stop("a1", grace_s=0)
    await answering(instance)


@pytest.mark.parametrize("name", ["../a1", ".hidden", "a/b", ""])
async def test_a_name_that_leads_out_of_the_folder_is_refused(
    harness: ProcessHarness, name: str
) -> None:
    with pytest.raises(HostError, match="cannot be the name"):
        await harness.host.stop(name, grace_s=0)


# --- the environment of an engine ---


async def test_an_engine_gets_its_own_environment_and_no_secret(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITSERVE_ADMIN_KEY", "a secret of the gateway")
    monkeypatch.setenv("HF_TOKEN", "another one")
    monkeypatch.setenv("SSL_CERT_FILE", "/ca.pem")
    source = """
import json, os
links = {fd: f"/proc/self/fd/{fd}" for fd in range(20)}
files = {fd: os.readlink(link) for fd, link in links.items() if os.path.exists(link)}
leads = os.getsid(0) == os.getpgid(0) == os.getpid()
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "leads": leads, "files": files}))
"""
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        await harness.host.start(
            program(harness, source, env={"MINE": "1"}, gpus=("GPU-b", "GPU-a"))
        )
    finally:
        os.close(descriptor)
    lines = [line async for line in harness.host.follow("a1")]
    report = json.loads(lines[0])
    variables = report["env"]
    assert not [name for name in variables if name.startswith("FITSERVE_")]
    assert "HF_TOKEN" not in variables
    assert (variables["MINE"], variables["SSL_CERT_FILE"]) == ("1", "/ca.pem")
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["CUDA_DEVICE_ORDER"]) == (
        "GPU-b,GPU-a",
        "PCI_BUS_ID",
    )
    assert variables["HOME"] == str(harness.data_dir / "home")
    assert variables["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert report["cwd"] == str(harness.data_dir / "run/a1")
    assert report["leads"]
    log = str(harness.data_dir / "logs/a1.log")
    assert report["files"] == {"0": "/dev/null", "1": log, "2": log}


async def test_an_engine_has_the_limit_on_open_files_that_the_gateway_was_started_with(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "_started_with", None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert open_files.raise_fd_limit(700) == 700
        await harness.host.start(harness.make_spec("a1"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(harness.pid("a1"), resource.RLIMIT_NOFILE) == (512, hard)


async def test_sigterm_goes_to_the_main_process_first_and_to_workers_it_leaves(
    harness: ProcessHarness,
) -> None:
    source = """
import os, signal, sys, time
def bye(words, wait_s):
    def handler(*_):
        time.sleep(wait_s)
        print(words, flush=True)
        os._exit(0)
    signal.signal(signal.SIGTERM, handler)
if os.fork():
    bye("main", 0.3)
    print("ready", flush=True)
else:
    os.setpgid(0, 0)
    bye("worker", 0)
    print("ready", flush=True)
time.sleep(600)
"""
    await harness.host.start(program(harness, source))
    log = harness.data_dir / "logs/a1.log"

    async def ready() -> bool:
        return log.read_bytes().count(b"ready") == 2

    await until("both are ready", ready)
    await harness.host.stop("a1", grace_s=HANG_S)
    assert log.read_text().splitlines()[2:] == ["main", "worker"]


# --- a host that cannot ---


async def test_a_missing_program_leaves_nothing(harness: ProcessHarness) -> None:
    spec = harness.make_spec("a1").evolve(argv=("/nowhere/bin/python",))
    with pytest.raises(HostError, match="No such file") as error:
        await harness.host.start(spec)
    assert "fitserve engine install fake==1" in error.value.hint
    assert await harness.host.list() == []
    assert not (harness.data_dir / "run/a1").exists()


async def test_an_engine_whose_record_cannot_be_written_is_not_left_running(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Records.write

    def full(self: Records, record: Record) -> Record:
        if record.pid is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, record)

    monkeypatch.setattr(Records, "write", full)
    with pytest.raises(HostError, match="No space left"):
        await harness.host.start(harness.make_spec("a1"))
    assert living_in(harness.data_dir / "run/a1") == []
    assert await harness.host.list() == []


async def test_a_data_folder_that_cannot_be_used_is_a_host_error(tmp_path: Path) -> None:
    (tmp_path / "instances").write_text("a file where the folder should be")
    host = ProcessHost(tmp_path)
    with pytest.raises(HostError) as error:
        await host.stop("a1", grace_s=0)
    assert error.value.hint


@pytest.mark.parametrize("missing", ["bin/python", ".complete"])
async def test_prepare_refuses_half_an_environment(harness: ProcessHarness, missing: str) -> None:
    engine = EngineRef(kind="fake", version="1")
    (harness.data_dir / "engines/fake-1" / missing).unlink()
    with pytest.raises(HostError) as error:
        await harness.host.prepare(engine, lambda report: None)
    assert error.value.hint == "Run `fitserve engine install fake==1`."


# --- ports and logs ---


async def test_ports_are_given_away_once(harness: ProcessHarness) -> None:
    spec = harness.make_spec("a1", script=["--no-serve"])
    await harness.host.start(spec)
    ports = [await harness.host.allocate_port() for _ in range(200)]
    assert len({spec.port, *ports}) == 201


async def test_ports_are_given_again_once_all_were(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that swaps models starts more engines than there are ports."""
    monkeypatch.setattr("gateway.hosts.process.host.ENGINE_PORTS", range(20_000, 20_006))
    monkeypatch.setattr(
        "gateway.hosts.process.host._is_port_free", lambda address, port: port != 20_003
    )
    spec = harness.make_spec("a1", script=["--no-serve"]).evolve(port=20_001)
    await harness.host.start(spec)
    ports = [await harness.host.allocate_port() for _ in range(12)]
    assert {*ports} == {20_000, 20_002, 20_004, 20_005}
    assert all(len({*ports[at : at + 4]}) == 4 for at in range(9))


async def test_follow_of_a_name_that_never_ran_ends_immediately(harness: ProcessHarness) -> None:
    assert [line async for line in harness.host.follow("a1")] == []


async def test_list_trims_a_log_that_floods(
    harness: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.hosts.process.log_file.LIMIT", 200_000)
    monkeypatch.setattr("gateway.hosts.process.log_file.KEEP", 1_000)
    await harness.host.start(
        harness.make_spec("a1", script=["--print", "first", "--flood", "30000", "--exit-code", "0"])
    )
    lines = [line async for line in harness.host.follow("a1")]
    assert len(lines) == 30001
    log = harness.data_dir / "logs/a1.log"
    assert log.stat().st_size > 200_000
    assert await find(harness.host, "a1") is not None
    assert log.stat().st_size == 1_000
    older = log.with_name("a1.log.1").read_bytes()
    assert len(older) == 200_000
    assert b"\n".join(lines).endswith(older.rstrip(b"\n"))
    async with aclosing(harness.host.follow("a1")) as log_lines:
        assert await anext(log_lines) == b"first"


async def test_a_stopped_process_is_listed_with_its_engine_and_memory(
    harness: ProcessHarness,
) -> None:
    await answering(await harness.host.start(harness.make_spec("a1", script=["--spawn-child"])))
    os.kill(harness.pid("a1"), signal.SIGSTOP)

    async def is_seen() -> bool:
        return any(process.is_stopped for process in await harness.host.processes("a1"))

    # A signal reaches a process at work on another core a moment later.
    await until("one is stopped", is_seen)
    stopped_processes = [
        process for process in await harness.host.processes("a1") if process.is_stopped
    ]
    assert [process.pid for process in stopped_processes] == [harness.pid("a1")]
    assert "fake_engine.py" in stopped_processes[0].command
    assert stopped_processes[0].cpu_s > 0
    # It takes no SIGTERM, and ends all the same.
    await harness.host.stop("a1", 0.1)
    assert harness.members("a1") == 0


async def test_compiled_kernels_are_kept_for_starts_that_may_share_them_and_for_no_other(
    harness: ProcessHarness,
) -> None:
    """Each start leaves a file in its cache, and tells of the files there."""
    source = """
import os, sys
from pathlib import Path
for name in ("HOME", "KERNELS"):
    print(*sorted(path.name for path in Path(os.environ[name]).iterdir() if path.is_file()))
    (Path(os.environ[name]) / sys.argv[1]).touch()
"""

    async def is_cold(cache: str) -> bool | None:
        return (await harness.host.conditions(engine, cache)).is_cache_empty

    engine = program(harness, source).engine

    async def run(number: int, cache: str) -> list[bytes]:
        spec = program(harness, source, cache=cache, caches={"KERNELS": "kernels"})
        await harness.host.start(spec.evolve(argv=(*spec.argv, str(number))))
        lines = [line async for line in harness.host.follow("a1")]
        await harness.host.stop("a1", 0)
        return lines

    assert await is_cold("a" * 16)
    assert await run(1, "a" * 16) == [b"", b""]
    assert [await is_cold(cache) for cache in ("a" * 16, "b" * 16, "")] == [False, True, True]
    assert await run(2, "a" * 16) == [b"1", b"1"]
    assert await run(3, "b" * 16) == [b"", b""]
    assert await run(4, "a" * 16) == [b"1 2", b"1 2"]
    # Installed anew it may be made of something else.
    os.utime(harness.data_dir / "engines/fake-1/.complete", (1, 1))
    assert await is_cold("a" * 16)
    assert await run(5, "a" * 16) == [b"", b""]
    assert len([*(harness.data_dir / "caches/fake-1").iterdir()]) == 3
    assert {
        path.stat().st_mode & 0o077 for path in (harness.data_dir / "caches/fake-1").iterdir()
    } == {0}
