"""gateway.domain.base: plans of a process without pydantic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.domain import Wish
from gateway.domain.base import become_lean, is_lean
from gateway.planner.service.offline import OfflinePlanner
from tests.support.paths import MODELS, ROOT

# Dense, experts with MLA, states, a picture tower, an embedder.
SOME = (
    "llama-3.1-8b",
    "deepseek-v3",
    "qwen3-30b-a3b",
    "bge-large-en-v1.5",
)
MACHINES = ("2x3090", "8xh100", "gb10")

PLANS = """
import json, sys
from gateway.domain.base import become_lean
become_lean()
from gateway.domain import Wish
from gateway.planner.service.offline import OfflinePlanner
planner = OfflinePlanner.read_environment()
for line in sys.stdin.read().splitlines():
    folder, machine = line.split("\\t")
    decision = planner.decide(Wish(name="plan", source=folder), machine, include_alternatives=True)
    text = decision.model_dump_json(by_alias=True)
    # The form that a gateway sends. JSON writes the infinite numbers of an embedder's plan as null.
    if "bge" not in folder:
        sent = type(decision).model_validate(json.loads(text))
        assert sent.model_dump_json(by_alias=True) == text
    print(text)
assert not {name for name in sys.modules if name.startswith("pydantic")}
"""


def run(*command: str, text: str = "", data: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        input=text,
        env={**os.environ, "FITSERVE_DATA_DIR": str(data), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((MODELS / "llama-3.1-8b.json").read_text())
    return folder


def test_plans_are_those_of_a_process_with_pydantic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    cases = []
    for name in SOME:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text((MODELS / f"{name}.json").read_text())
        cases += [(str(folder), machine) for machine in MACHINES]
    text = "\n".join("\t".join(case) for case in cases)
    result = run("-c", PLANS, text=text, data=tmp_path / "data")
    assert result.returncode == 0, result.stderr[-2000:]
    planner = OfflinePlanner.read_environment()
    for (source, machine), line in zip(cases, result.stdout.splitlines(), strict=True):
        wish = Wish(name="plan", source=source)
        decision = planner.decide(wish, machine, include_alternatives=True)
        assert line == decision.model_dump_json(by_alias=True), (source, machine)


@pytest.mark.parametrize(
    "more", [(), ("--json",), ("--for", "latency", "--context", "8192", "--arg", "max-num-seqs=8")]
)
def test_the_command_imports_no_pydantic(
    model: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    command = ("-X", "importtime", "-m", "gateway.__main__", "plan", str(model))
    result = run(*command, "--hardware", "2x3090", *more, data=tmp_path / "data")
    assert result.returncode == 0, result.stderr[-2000:]
    assert "gateway.planner.decide" in result.stderr
    assert "pydantic" not in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "--for",
            "speed",
            "--for takes 'balanced', 'latency', 'throughput', 'context' or 'agents'.",
        ),
        ("--concurrency", "0", "Invalid value for '--concurrency': must be at least"),
        ("--revision", "a b", "'a b' is not allowed here: a branch, a tag or a commit"),
        ("--gpus", "0", "--gpus takes all, few, a number of at least 1"),
    ],
)
def test_wrong_input_has_the_message_of_pydantic(
    model: Path, tmp_path: Path, option: str, value: str, message: str
) -> None:
    command = ("-m", "gateway.__main__", "plan", str(model), "--hardware", "2x3090")
    result = run(*command, option, value, data=tmp_path / "data")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_snapshot_has_the_message_of_pydantic(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "machine.json"
    snapshot.write_text(json.dumps({"arch": "x86_64", "cpu_cores": "many"}))
    command = ("-m", "gateway.__main__", "plan", str(model), "--hardware", str(snapshot))
    result = run(*command, data=tmp_path / "data")
    assert "is not a hardware snapshot: cpu_cores: must be a whole number" in result.stderr


def test_rules_of_a_user_are_validated(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profiles" / "engines" / "vllm"
    (folder / "0.33.0").mkdir(parents=True)
    shipped = ROOT / "profiles" / "engines" / "vllm"
    (folder / "0.33.0.yaml").write_text((shipped / "0.33.0.yaml").read_text())
    (folder / "0.33.0" / "linear.yaml").write_text(
        "extends: vllm==0.26.0\nkernels:\n  K: {mispelt: 1}\n"
    )
    command = ("-m", "gateway.__main__", "plan", str(model), "--hardware", "2x3090")
    os.environ["FITSERVE_PROFILES_DIR"] = str(tmp_path / "profiles")
    try:
        result = run(*command, data=tmp_path / "data")
    finally:
        del os.environ["FITSERVE_PROFILES_DIR"]
    assert "linear.yaml is wrong at" in result.stderr


def test_a_process_that_knows_values_does_not_become_lean() -> None:
    become_lean()
    assert not is_lean()
