"""The gateway dies at every point where it does something, and anywhere in between: a restart finds or mends everything."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import httpx
import pytest

from gateway.failpoint import POINTS
from tests.e2e.conftest import wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, starts
from tests.e2e.storm import Storm
from tests.running import model_folder

pytestmark = pytest.mark.e2e

TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (4096), (4.00 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.0 GiB). Based on the available memory, the estimated maximum model length is 1024."
)


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_an_effect_costs_one_restart(tmp_path: Path, point: str) -> None:
    # The first engine fails, so that every effect happens: plan, launch, fail, stop, plan, launch, verify, publish.
    gateway = scripted_gateway(tmp_path, ["--print", TOO_LONG, "--no-serve"], [])
    gateway.environment["FITSERVE_FAILPOINT"] = point
    gateway.start()
    body = {"name": "m", "source": str(model_folder(tmp_path / "model")), "engines": [ENGINE]}
    # It may die before its answer is out; what it was asked for is on the disk by then.
    with contextlib.suppress(httpx.HTTPError):
        added = gateway.client.post("/admin/models", json=body)
        assert added.status_code == 202, added.text
    assert gateway.process is not None
    assert gateway.process.wait(30) == -signal.SIGKILL
    del gateway.environment["FITSERVE_FAILPOINT"]
    gateway.start()
    try:
        view = gateway.until("m", "ready", 30)
        running = engines(gateway)
        assert list(running) == [view["attempts"][-1]["instance"]]
        assert len(next(iter(running.values()))) == 1
        # The engine that failed and the one that serves; no start for nothing.
        assert starts(gateway) == 2
        assert [attempt["state"] for attempt in view["attempts"]] == ["failed", "ready"]
    finally:
        gateway.close()
    assert not engines(gateway)


def test_deaths_at_random_leave_neither_orphans_nor_twins(tmp_path: Path) -> None:
    storm = Storm(tmp_path, random.Random(7))
    storm.rounds(12)
    storm.settle()
    storm.close()


def test_an_engine_killed_under_a_gateway_that_is_away_is_started_again(tmp_path: Path) -> None:
    gateway = scripted_gateway(tmp_path)
    gateway.start()
    gateway.client.post(
        "/admin/models", json={"name": "m", "source": str(model_folder(tmp_path / "model")), "engines": [ENGINE]}
    )
    gateway.until("m", "ready", 30)
    gateway.kill()
    for pids in engines(gateway).values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    wait_for("no engine", lambda: not engines(gateway), 10)
    gateway.start()
    try:
        wait_for("another attempt", lambda: len(gateway.show("m")["attempts"]) == 2, 20)
        gateway.until("m", "ready", 30)
    finally:
        gateway.close()


def test_an_adopted_engine_serves_within_five_seconds(tmp_path: Path) -> None:
    gateway = scripted_gateway(tmp_path)
    gateway.start()
    gateway.client.post(
        "/admin/models", json={"name": "m", "source": str(model_folder(tmp_path / "model")), "engines": [ENGINE]}
    )
    gateway.until("m", "ready", 30)
    before = engines(gateway)
    gateway.kill()
    began = time.monotonic()
    gateway.start()
    try:
        gateway.until("m", "ready", 5)
        assert time.monotonic() - began < 10
        assert engines(gateway) == before
    finally:
        gateway.close()
