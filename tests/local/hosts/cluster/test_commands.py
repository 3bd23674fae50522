"""A machine leaves its cluster: with engines, without a supervisor, and with a slow one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.errors import Conflict, SettingsError
from gateway.hosts.cluster import commands
from gateway.hosts.cluster.commands import leave_cluster
from gateway.hosts.cluster.membership import (
    Membership,
    read_membership,
    remove_membership,
    write_membership,
)
from gateway.hosts.cluster.node_service import NodeService
from gateway.hosts.process.host import ProcessHost
from gateway.store.data_folder import lock_file
from tests.contract.process_harness import ProcessHarness
from tests.support.hub_commits import disk_of
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio

# Ends in order after one SIGTERM, and is killed by another, as Python is once its loop has ended.
SUPERVISOR = """
import fcntl, os, signal, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(str(os.getpid()))
file.flush()
def end(*_):
    global is_ending
    is_ending = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
is_ending = False
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while not is_ending:
    time.sleep(0.05)
time.sleep(1)
"""


@pytest.fixture
def world(tmp_path: Path) -> ProcessHarness:
    process_harness = ProcessHarness(tmp_path)
    write_membership(tmp_path, membership(process_harness))
    return process_harness


def membership(world: ProcessHarness) -> Membership:
    return Membership(
        name="one",
        role="head",
        head="127.0.0.1:6379",
        address="127.0.0.1",
        token_file=world.data_dir / "token",
    )


@contextmanager
def supervisor(world: ProcessHarness) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-S", "-c", SUPERVISOR, str(world.data_dir / "cluster.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


async def leave(world: ProcessHarness) -> None:
    await asyncio.to_thread(leave_cluster, world.data_dir, membership(world))


async def test_a_supervisor_that_ends_slowly_gets_one_signal(world: ProcessHarness) -> None:
    service = NodeService(world.host, membership(world), world.data_dir, disk_of(world.data_dir), 0)
    with supervisor(world) as process:
        async with service.running():
            await leave(world)
        assert await asyncio.to_thread(process.wait, hang_s()) == 0
    assert read_membership(world.data_dir) is None


async def test_engines_that_outlive_their_supervisor_keep_the_machine(
    world: ProcessHarness,
) -> None:
    engine = await world.host.start(world.make_spec("a1"))
    try:
        with pytest.raises(Conflict, match=f"Engines run on one: {engine.name}"):
            await leave(world)
        assert read_membership(world.data_dir) == membership(world)
    finally:
        await world.host.stop("a1", 0)
    await leave(world)
    assert read_membership(world.data_dir) is None


async def test_a_restarted_node_service_is_asked_for_its_engines(
    world: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.host.start(world.make_spec("a1"))
    has_asked = threading.Event()

    def rest(seconds: float) -> None:
        has_asked.set()
        time.sleep(seconds)

    monkeypatch.setattr(commands, "_sleep", rest)
    try:
        with supervisor(world) as process:
            leaving = asyncio.create_task(leave(world))
            assert await asyncio.to_thread(has_asked.wait, hang_s())
            service = NodeService(
                world.host, membership(world), world.data_dir, disk_of(world.data_dir), 0
            )
            async with service.running():
                with pytest.raises(Conflict, match="Engines run on one: a1"):
                    await leaving
            assert process.poll() is None
    finally:
        await world.host.stop("a1", 0)


async def test_an_engine_that_starts_while_the_supervisor_ends_keeps_the_machine(
    world: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = commands._stop_supervisor

    def start_and_end(lock: Path, member: Membership) -> int:
        asyncio.run(ProcessHost(world.data_dir).start(world.make_spec("a1")))
        return end(lock, member)

    monkeypatch.setattr(commands, "_stop_supervisor", start_and_end)
    try:
        with pytest.raises(Conflict, match="Engines run on one: a1"):
            await leave(world)
        assert read_membership(world.data_dir) == membership(world)
    finally:
        await world.host.stop("a1", 0)


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("has_joined", [False, True])
async def test_only_a_machine_that_the_head_refuses_first_is_no_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_refused: bool, has_joined: bool
) -> None:
    world = ProcessHarness(tmp_path)
    error = SettingsError("The head refuses.", hint="Mend it.") if is_refused else OSError("full")

    async def supervise(_member: Membership, _data: Path, join_event: asyncio.Event) -> None:
        if has_joined:
            join_event.set()
        raise ExceptionGroup("failures", [error])

    monkeypatch.setattr(commands, "supervise", supervise)
    with pytest.raises(type(error), match=str(error)[:10]):
        await commands._join_cluster(world.data_dir, membership(world))
    is_member = read_membership(world.data_dir) is not None
    assert is_member is (has_joined or not is_refused)


async def test_a_machine_forgets_its_cluster_before_another_program_joins(
    world: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free: list[bool] = []
    remove = remove_membership

    def look_and_remove(data: Path) -> None:
        try:
            os.close(lock_file(data / "cluster.lock"))
            is_free.append(True)
        except BlockingIOError:
            is_free.append(False)
        remove(data)

    monkeypatch.setattr(commands, "remove_membership", look_and_remove)
    await leave(world)
    assert is_free == [False]


async def test_a_silent_node_service_is_named(
    world: ProcessHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_LEAVE_S", 0.0)
    with supervisor(world), pytest.raises(SettingsError, match="its node service does not answer"):
        await leave(world)
    assert read_membership(world.data_dir) == membership(world)
