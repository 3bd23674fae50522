"""A disk that is full or read-only under the gateway: what runs goes on, changes are refused in words, and it heals by itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.support.running import model_folder

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system of its own"),
]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[Gateway, Path]]:
    """A gateway with one ready model, and the file system of 16 MiB that its data are on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        with contextlib.closing(scripted_gateway(disk)) as gateway:
            gateway.log = tmp_path / "gateway.log"
            gateway.start()
            source = model_folder(tmp_path / "model")
            gateway.client.post("/admin/models", json={"name": "m", "source": str(source), "engines": [ENGINE]})
            gateway.until("m", "ready")
            yield gateway, disk
        wait_for("no engine", lambda: not engines(gateway))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1024 * 1024, 4096):
            while True:
                try:
                    if file.write(b"x" * size) < size:
                        break
                except OSError:
                    break
    return filler


def refused(gateway: Gateway) -> bool:
    """Many small changes: the journal may have room for the first."""
    for number in range(200):
        body = {"name": f"n{number}", "endpoints": [f"http://127.0.0.1:9/{'x' * 2000}/{place}" for place in range(8)]}
        answer = gateway.client.post("/admin/models", json=body)
        if answer.status_code == 507:
            error = answer.json()["error"]["message"]
            return "could not be written" in error or "Nothing can be changed now" in error
        assert answer.status_code == 202, answer.text
    return False


def serves(gateway: Gateway) -> None:
    answer = gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3})
    assert answer.status_code == 200, answer.text


def ready(gateway: Gateway) -> bool:
    return gateway.client.get("/readyz").status_code == 200


def test_a_full_disk_refuses_changes_and_stops_nothing(small: tuple[Gateway, Path]) -> None:
    gateway, disk = small
    before = engines(gateway)
    filler = fill(disk)
    assert refused(gateway)
    serves(gateway)
    wait_for("not ready", lambda: gateway.client.get("/readyz").json()["problems"] == ["store"])
    # Also for a gateway that starts now.
    gateway.kill()
    gateway.start()
    gateway.until("m", "ready")
    serves(gateway)
    assert engines(gateway) == before
    filler.unlink()
    if not ready(gateway):
        # It began with a copy: what it does now would be lost, so it says so until it is started again.
        gateway.kill()
        gateway.start()
    wait_for("ready again", lambda: ready(gateway))
    assert gateway.client.post("/admin/models", json={"name": "last", "endpoint": "http://127.0.0.1:9/v1"}).status_code == 202
    assert engines(gateway) == before


def test_room_that_is_made_heals_a_running_gateway(small: tuple[Gateway, Path]) -> None:
    gateway, disk = small
    filler = fill(disk)
    assert refused(gateway)
    wait_for("not ready", lambda: not ready(gateway))
    filler.unlink()
    wait_for("ready again", lambda: ready(gateway))
    serves(gateway)


def test_a_read_only_disk_refuses_changes_and_stops_nothing(small: tuple[Gateway, Path]) -> None:
    gateway, disk = small
    before = engines(gateway)
    gateway.kill()
    # Files that are open for writing keep a file system from becoming read-only, and engines write their logs: bind it instead.
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(disk)], check=True)
    try:
        gateway.start()
        gateway.until("m", "ready")
        serves(gateway)
        assert refused(gateway)
        wait_for("not ready", lambda: gateway.client.get("/readyz").json()["problems"] == ["store"])
        assert engines(gateway) == before
    finally:
        gateway.kill()
        subprocess.run(["umount", "-l", str(disk)], check=True)
    gateway.start()
    gateway.until("m", "ready")
    wait_for("ready again", lambda: ready(gateway))
    assert engines(gateway) == before
