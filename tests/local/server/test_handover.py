"""One owner of the data folder, whatever gateways ask for it at once."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.errors import SettingsError
from gateway.server.handover import Handover, HandoverOffer, request_takeover
from gateway.server.lock_watch import LockWatch
from gateway.store.data_folder import has_lock, lock, own_lock
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio


async def test_one_of_several_gateways_that_take_over_at_once_gets_the_data_folder(
    tmp_path: Path,
) -> None:
    names = []

    async def release() -> list[str]:
        await asyncio.sleep(0)
        names.append("m")
        return ["m"]

    async def drain() -> None: ...

    data_lock = lock(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        offer = HandoverOffer(data_lock, [listener], release, drain, lambda _: None)
        handover = Handover(tmp_path, offer)
        try:
            takeovers = [await asyncio.to_thread(request_takeover, tmp_path) for _ in range(3)]
            results = await asyncio.gather(
                *(asyncio.to_thread(takeover.wait_for_release) for takeover in takeovers),
                return_exceptions=True,
            )
        finally:
            await handover.close()
            os.close(data_lock)
        for takeover in takeovers:
            takeover.confirm()
            os.close(takeover.lock)
            for inherited_listener in takeover.listeners:
                inherited_listener.close()
    refusals = [error for error in results if error is not None]
    assert names == ["m"]
    assert len(refusals) == 2
    assert all(
        isinstance(error, SettingsError) and "handing over to another gateway" in str(error)
        for error in refusals
    )


def test_another_lock_file_or_another_owner_ends_the_ownership(tmp_path: Path) -> None:
    data_lock = lock(tmp_path)
    file = tmp_path / "gateway.lock"
    try:
        assert has_lock(tmp_path, data_lock)
        file.write_text("1")
        assert not has_lock(tmp_path, data_lock)
        own_lock(data_lock)
        assert has_lock(tmp_path, data_lock)
        file.unlink()
        assert has_lock(tmp_path, data_lock)  # nobody else has it
        file.touch()
        assert not has_lock(tmp_path, data_lock)
    finally:
        os.close(data_lock)


def test_a_lock_file_that_cannot_be_written_keeps_its_owner(tmp_path: Path) -> None:
    (tmp_path / "gateway.lock").write_text("1")
    descriptor = os.open(tmp_path / "gateway.lock", os.O_RDONLY)
    try:
        assert has_lock(tmp_path, descriptor)
    finally:
        os.close(descriptor)


async def test_the_loss_of_the_lock_is_logged_once(tmp_path: Path) -> None:
    data_lock, lost_event, words = lock(tmp_path), asyncio.Event(), []

    async def end() -> None:
        words.append("lost")
        lost_event.set()

    watch = LockWatch(tmp_path, data_lock, end, look_s=0.01)
    try:
        another = "import os, sys; from gateway.store.data_folder import own_lock; own_lock(3)"
        await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", another],
            check=True,
            preexec_fn=lambda: os.dup2(data_lock, 3),
            pass_fds=(3,),
        )
        async with asyncio.timeout(hang_s()):
            await lost_event.wait()
        await asyncio.sleep(0.05)
        assert words == ["lost"]
    finally:
        await watch.close()
        os.close(data_lock)
