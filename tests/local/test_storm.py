"""The storm of kills finds programs and engines that a killed gateway left, and lost changes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.decisions.eviction import STOP_REASON
from tests.e2e.conftest import wait_for
from tests.e2e.ledger import KeyOrder, ModelOrder
from tests.e2e.storm import Storm, descendants, orders, phase

_CHILD = "import time; print('runs', flush=True); time.sleep(600)"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {_CHILD!r}])"


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def family(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child, both in this working directory."""
    command = [sys.executable, "-S", "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        children = descendants(parent.pid)
        assert children
        try:
            yield parent
        finally:
            for pid, _ in children:
                kill(pid)
            parent.kill()


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Storm]:
    new_storm = Storm(tmp_path, random.Random(1))
    with contextlib.closing(new_storm.gateway.client):
        yield new_storm


def test_a_program_that_outlives_its_gateway_is_an_orphan(storm: Storm, tmp_path: Path) -> None:
    with family(tmp_path) as parent:
        storm.gateway.process = parent
        (child,) = (pid for pid, _ in descendants(parent.pid))
        storm.kill()
        assert storm.kill_count == 1
        assert storm.left_programs() == {f"program {child}"}
        kill(child)
        wait_for("its end", lambda: not storm.left_programs())


def test_a_second_first_process_of_an_engine_is_seen(storm: Storm, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "run" / "m-r0-a1"
    folder.mkdir(parents=True)
    with family(folder) as engine_family:
        assert storm.engines() == {"m-r0-a1": [engine_family.pid]}
        with family(folder) as second_family:
            assert sorted(storm.engines()["m-r0-a1"]) == sorted(
                [engine_family.pid, second_family.pid]
            )


def test_every_counted_loss_fails_the_storm(storm: Storm) -> None:
    storm.check()
    ledger = storm.target.ledger
    ledger.begin(("keys", "a0"), KeyOrder())
    ledger.acknowledge(("keys", "a0"))
    storm.lost += ledger.losses({})
    assert storm.figures()["lost"] == 1
    for counts in (storm.lost, storm.orphans, storm.twins, storm.restarts):
        counts[:] = ["a0"]
        with pytest.raises(AssertionError, match="a0"):
            storm.check()
        counts.clear()


def test_views_of_models_tell_their_phase_and_their_orders() -> None:
    view: dict[str, Any] = {
        "detail": "",
        "state": "ready",
        "wish": {"max_context": 512},
        "change": None,
    }
    assert phase(view) == "serving"
    assert orders(view, at_once=False) == (ModelOrder(512),)
    view["change"] = {
        "state": "underway",
        "wish": [{"field": "max_context", "former": "512", "present": "256"}],
    }
    assert phase(view) == "changing"
    assert orders(view, at_once=False) == (ModelOrder(256),)
    view |= {"state": "stopped", "detail": "no room", "change": None}
    assert orders(view, at_once=False) == (ModelOrder(512),)
    view |= {"detail": STOP_REASON}
    assert orders(view, at_once=False) == (ModelOrder(512, stopped=True),)
    view |= {"state": "stopping", "detail": "it is being removed"}
    assert (phase(view), orders(view, at_once=False)) == ("deleting", ())
