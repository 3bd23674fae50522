"""The modules that programs load, and so keep or wait for: none pays for an unused one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli.demo.checkpoint import make_model
from tests.support.paths import ROOT

# Each takes memory for as long as a gateway lives, or time of every command.
NEVER = {
    "rich",
    "pygments",
    "httpx",
    "huggingface_hub",
    "docker",
    "requests",
    "jinja2",
    "argparse",
    "structlog",
    "pydantic_settings",
}
UNUSED = {
    "gateway.server.server": (
        NEVER
        | {
            "typer",
            "pynvml",
            "gateway.cli",
            "gateway.planner.service.plan_program",
            "gateway.planner.decide",
            # Only a cluster needs it.
            "ray",
            "gateway.hosts.cluster",
            "gateway.planner.nodes",
        }
    ),
    # The parser of every command.
    "gateway.cli.main": NEVER
    | {"ray", "pydantic", "gateway.domain.value", "sqlite3", "asyncio", "yaml"},
    # One for each core: it holds tables, and no values of the planner.
    "gateway.proxy.workers.worker": (
        NEVER
        | {"pydantic", "fastapi", "yaml", "sqlite3", "gateway.domain", "gateway.settings"}
        | {"gateway.server", "gateway.server.batches"}
    ),
}


@pytest.mark.parametrize("module", UNUSED)
def test_a_server_loads_no_optional_module(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = set(result.stdout.split())
    assert module in modules
    assert modules & UNUSED[module] == set()


def test_a_second_plan_reads_no_yaml_and_loads_no_server(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "gateway.__main__",
        "plan",
        str(tmp_path / "model"),
    ]
    environment = {
        **os.environ,
        "FITSERVE_DATA_DIR": str(tmp_path / "data"),
        "FITSERVE_HOST_KIND": "docker",
    }
    module_sets: list[set[str]] = []
    snapshot = ("--hardware", "2x3090")
    for hardware_arguments in ((), (), snapshot, snapshot):
        result = subprocess.run(
            [*command, *hardware_arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode in (0, 3), result.stderr[-2000:]  # 3: this machine is too small
        module_sets.append(set(re.findall(r"\| +([\w.]+)$", result.stderr, re.MULTILINE)))
    assert "yaml" in module_sets[0]
    assert "gateway.planner.decide" in module_sets[1]
    assert (
        module_sets[1]
        & (
            NEVER
            | {
                "yaml",
                "fastapi",
                "starlette",
                "uvicorn",
                "uvloop",
                "gateway.server",
                "gateway.controller",
                "gateway.diagnosis.code_history",
            }
        )
        == set()
    )
    running = {"gateway.domain.running", "gateway.store.store", "sqlite3"}
    assert module_sets[3] & ({"yaml"} | running) == set()
    assert module_sets[2] & {"asyncio", "ssl", "gateway.planner.service.images"} == set()
