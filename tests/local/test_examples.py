"""The examples: Python against a gateway with a scripted engine, the others by their programs."""

from __future__ import annotations

import ast
import asyncio
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.domain import Mount
from gateway.domain.units import GIB
from gateway.settings import load_settings
from gateway.wishes.export.engine_start import EngineStart
from gateway.wishes.export.kubernetes import kubernetes
from gateway.wishes.models_file import load
from tests.support.able_engines import ALL, add_model, doing
from tests.support.makers import machine
from tests.support.paths import MODELS, ROOT
from tests.support.patience import hang_s
from tests.support.running import running

EXAMPLES = ROOT / "examples"
# `fitserve export qwen3-8b --format kubernetes`, for one GPU.
START = EngineStart(
    model="qwen3-8b",
    image="vllm/vllm-openai:v0.33.0",
    argv=(
        "vllm",
        "serve",
        "/models/qwen3-8b",
        "--served-model-name",
        "qwen3-8b",
        "--max-model-len",
        "32768",
        "--gpu-memory-utilization",
        "0.9",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
    ),
    env={"VLLM_NO_USAGE_STATS": "1"},
    gpus=("GPU-00000000-0000-0000-0000-000000000000",),
    mounts=(Mount(source="/srv/models/qwen3-8b", target="/models/qwen3-8b", is_read_only=True),),
    port=8000,
    shm_bytes=8 * GIB,
    memory_bytes=None,
    pids=4096,
    scratch=("/tmp", "/root/.cache"),
)
COMPOSE = next(
    (
        command
        for command in (["docker-compose"], ["docker", "compose"])
        if shutil.which(command[0])
        and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
    ),
    None,
)


def run(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", **variables},
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "arguments", "printed"),
    [("client.py", ("m", "Hello"), ""), ("agent.py", ("m", "What is 17 * 23?"), "calculate(")],
)
async def test_a_client_gets_an_answer(
    tmp_path: Path, name: str, arguments: tuple[str, ...], printed: str
) -> None:
    async with running(tmp_path, doing(ALL), hardware=machine("3090")) as gateway:
        await add_model(gateway, tmp_path / "model")
        result = await asyncio.to_thread(run, name, *arguments, FITSERVE_URL=gateway.url)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert printed in result.stderr


def test_plans_are_printed_for_each_machine(tmp_path: Path) -> None:
    shutil.copy(MODELS / "qwen3-8b.json", tmp_path / "config.json")
    result = run("offline_plan.py", str(tmp_path), "2x3090", "2xh100")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.partition(": vllm==")[0] for line in lines] == ["2x3090", "2xh100"]


def test_the_file_of_models_is_valid() -> None:
    assert set(load(EXAMPLES / "compose/models.yaml").wishes) == {"qwen3:8b"}


@pytest.mark.skipif(COMPOSE is None, reason="Docker Compose is not installed")
def test_compose_accepts_the_example() -> None:
    assert COMPOSE is not None
    result = subprocess.run(
        [*COMPOSE, "-f", "compose.yaml", "-f", "examples/compose/compose.yaml", "config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    gateway = yaml.safe_load(result.stdout)["services"]["gateway"]
    assert "examples/compose/models.yaml" in str(gateway["volumes"])
    settings = gateway["environment"]
    assert settings["FITSERVE_MODELS_FILE"] == "/etc/fitserve/models.yaml"
    assert settings["FITSERVE_HOST_KIND"] == "agent"


def run_notebook(path: Path) -> list[Any]:
    """The value of the last line of each code cell, where that is an expression."""
    document = json.loads(path.read_text())
    assert (document["nbformat"], len({cell["id"] for cell in document["cells"]})) == (
        4,
        len(document["cells"]),
    )
    values: list[Any] = []
    names: dict[str, Any] = {}
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec"), names)
        if isinstance(last, ast.Expr):
            values.append(eval(compile(ast.Expression(last.value), str(path), "eval"), names))
    return values


def test_the_notebook_runs_and_shows_its_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    shutil.copy(MODELS / "qwen3-8b.json", folder / "config.json")
    monkeypatch.setenv("MODEL", str(folder))
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    decision, _, speeds, refusal = run_notebook(EXAMPLES / "plan.ipynb")
    assert speeds["h100"] > speeds["3090"] > 0
    page = html.unescape(decision._repr_html_())
    assert str(decision.plans[0].engine) in page
    assert decision.plans[0].max_model_len.reason in page
    assert not refusal.plans
    assert refusal.refusal[0] in html.unescape(refusal._repr_html_())


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    # The program and the user of this machine.
    text = (EXAMPLES / "systemd/fitserve.service").read_text()
    text = text.replace("/opt/fitserve/bin/fitserve", sys.executable)
    (tmp_path / "fitserve.service").write_text(text.replace("User=fitserve", "User=root"))
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "fitserve.service")],
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_kubernetes_objects_are_those_of_an_export() -> None:
    text = (EXAMPLES / "kubernetes/fitserve.yaml").read_text()
    assert list(yaml.safe_load_all(text)) == kubernetes(START)


def env_variables() -> dict[str, str]:
    """The variables of `.env.example` with their values; all are commented out."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    pairs = [match for line in lines if (match := re.fullmatch(r"# ([A-Z_]+)=(.*)", line))]
    assert all(line.startswith("#") or not line for line in lines)
    return {match[1]: match[2] for match in pairs}


def test_the_example_of_env_has_every_variable_of_compose_with_its_default() -> None:
    text = (ROOT / "compose.yaml").read_text()
    defaults: dict[str, set[str]] = {}
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text):
        defaults.setdefault(name, set()).add(default)
    example_variables = env_variables()
    assert set(example_variables) == set(defaults)
    assert all(example_variables[name] in values for name, values in defaults.items())
    assert subprocess.run(
        ["git", "check-ignore", "-q", ".env"], cwd=ROOT, check=False
    ).returncode in (0, 128)
    assert ".env" in (ROOT / ".dockerignore").read_text().split()


def test_every_name_that_compose_gives_is_one_of_the_installation() -> None:
    """A fixed name would be that of another installation on the machine too."""
    composition = yaml.safe_load((ROOT / "compose.yaml").read_text())
    names = {
        f"{kind} {key}": entry["name"]
        for kind in ("volumes", "networks")
        for key, entry in composition.get(kind, {}).items()
        if entry and "name" in entry
    }
    assert {"volumes fitserve-data", "volumes fitserve-models"} <= {*names}
    for key, name in names.items():
        assert re.fullmatch(r"\$\{FITSERVE_[A-Z]+_VOLUME:-[a-z-]+\}", name), (key, name)
    assert not [key for key, entry in composition["services"].items() if "container_name" in entry]


def test_documented_filters_name_one_installation() -> None:
    filters = [
        (path.name, label)
        for path in (ROOT / "docs").glob("*.md")
        for label in re.findall(r"label=fitserve\.\w+\S*", path.read_text())
    ]
    assert len(filters) >= 3
    assert not [(page, label) for page, label in filters if "=$ID" not in label]


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({}, "fitserve-models"),
        ({"FITSERVE_MODELS_VOLUME": "second"}, "second"),
        ({"FITSERVE_MODELS_VOLUME": "second", "FITSERVE_MODELS": "/data"}, "/data"),
    ],
)
@pytest.mark.skipif(COMPOSE is None, reason="Docker Compose is not installed")
def test_engines_get_the_models_of_their_gateway(
    variables: dict[str, str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert COMPOSE is not None
    result = subprocess.run(
        [*COMPOSE, "-f", "compose.yaml", "config"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    composition = yaml.safe_load(result.stdout)
    assert composition["volumes"]["fitserve-models"]["name"] == variables.get(
        "FITSERVE_MODELS_VOLUME", "fitserve-models"
    )
    for service in ("gateway", "agent"):
        for name in [name for name in os.environ if name.startswith("FITSERVE_")]:
            monkeypatch.delenv(name)
        for name, value in composition["services"][service]["environment"].items():
            if name.startswith("FITSERVE_MODELS"):
                monkeypatch.setenv(name, str(value))
        assert load_settings().shared_models == source


@pytest.mark.skipif(COMPOSE is None, reason="Docker Compose is not installed")
def test_a_key_in_env_is_there_at_every_start(tmp_path: Path) -> None:
    assert COMPOSE is not None
    (tmp_path / "compose.yaml").write_bytes((ROOT / "compose.yaml").read_bytes())
    (tmp_path / ".env").write_text("FITSERVE_HOST=0.0.0.0\nFITSERVE_ADMIN_KEY=kept-key\n")
    variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    result = subprocess.run(
        [*COMPOSE, "config"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    environment = yaml.safe_load(result.stdout)["services"]["gateway"]["environment"]
    assert (environment["FITSERVE_HOST"], environment["FITSERVE_ADMIN_KEY"]) == (
        "0.0.0.0",
        "kept-key",
    )
