"""The real engine is asked in its own environment: its answer is true of its start."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.domain import Engine
from gateway.profiles.profiles import Profiles
from tests.e2e.conftest import ENGINE, START_S, Gateway, fitserve, share_engine_files, wait_for

pytestmark = pytest.mark.engine


@pytest.fixture
def engine_data(engines: Path, tmp_path: Path) -> Path:
    """A data folder of its own, with the engines that are installed."""
    data = tmp_path / "data"
    data.mkdir()
    share_engine_files(data, engines, "caches")
    return data


def run_command(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that asks the engine; once more where it gave up, for a busy machine may import an
    engine for longer than a minute."""

    def in_time() -> Any:
        result = fitserve(data, *arguments)
        return " within 60 s" not in result.stderr and result

    outcome: subprocess.CompletedProcess[str] = wait_for(
        "the engine answers in time", in_time, START_S, every_s=0
    )
    return outcome


def test_a_plan_is_checked_by_the_engines_own_code(engine_data: Path, demo_model: Path) -> None:
    forecast = json.loads(
        fitserve(engine_data, "plan", str(demo_model), "--engine", ENGINE, "--json").stdout
    )
    result = run_command(
        engine_data, "plan", str(demo_model), "--engine", ENGINE, "--check", "--json"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    best: dict[str, Any] = json.loads(result.stdout)["plans"][0]
    assert (forecast["plans"][0]["grade"], best["grade"]) == ("predicted", "checked")
    assert best["argv"] == forecast["plans"][0]["argv"]
    assert {row["backend"] for row in best["attention"]} == {"CPU_ATTN"}
    assert best["memory"]["weights_bytes"] == forecast["plans"][0]["memory"]["weights_bytes"]


def test_a_config_that_the_engine_refuses_is_told_in_its_words(
    engine_data: Path, demo_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "rope_scaling": {"rope_type": "no-such-rope", "factor": 2.0}})
    )
    result = run_command(engine_data, "plan", str(model), "--engine", ENGINE, "--check", "--json")
    rejections = json.loads(result.stdout)["rejected"]
    assert result.returncode == 3
    assert [rejection["verdict"] for rejection in rejections] == ["engine_refuses"]
    assert "no-such-rope" in rejections[0]["reasons"][0]
    # The rules took it for loadable: that is text for a report, without a name or a place of the
    # model.
    stdout = fitserve(engine_data, "engine", "gaps").stdout
    assert (
        f"### {ENGINE} on a CPU: refusal\n- its rules say: loads\n- the engine says: ValueError:"
        " Unknown RoPE" in stdout
    )
    assert "- model: LlamaForCausalLM, model_type=llama" in stdout
    assert str(tmp_path) not in stdout


def test_an_installed_version_reports_its_own_number(engine_data: Path) -> None:
    """Asked in an environment that is named, as one that nobody installed here would be."""
    python = engine_data / "engines" / ENGINE.replace("==", "-") / "bin/python"
    result = run_command(engine_data, "engine", "learn", ENGINE, "--python", str(python))
    assert result.returncode == 0, result.stderr
    profiles = Profiles(data=engine_data)
    path = engine_data / "learned/engines" / f"{ENGINE.replace('==', '/')}.yaml"
    new_engine = Engine.model_validate(yaml.safe_load(path.read_text()))
    known_engine = profiles.engine(ENGINE)
    assert (new_engine.flags, set(new_engine.architectures), new_engine.user_env) == (
        known_engine.flags,
        set(known_engine.architectures),
        known_engine.user_env,
    )
    assert (new_engine.quantizations, new_engine.default_seqs) == (
        known_engine.quantizations,
        known_engine.default_seqs,
    )
    assert new_engine.guessed_from == ENGINE
    assert new_engine.sources["flags"] == f"asked of {python}"


def test_a_model_is_checked_before_its_start(
    engines: Path, demo_model: Path, tmp_path: Path
) -> None:
    attempts = itertools.count()

    def checked_start() -> Any:
        """As in `run_command`: a machine that is too busy for the check starts the model without.

        Each attempt has a data folder of its own, because a start is remembered.
        """
        data = tmp_path / f"data{next(attempts)}"
        data.mkdir()
        share_engine_files(data, engines, "caches")
        with contextlib.closing(Gateway(data, data / "gateway.log")) as gateway:
            gateway.start()
            result = gateway.cli("add", "demo", str(demo_model), "--engine", ENGINE, "--json")
            assert json.loads(result.stdout)["plan"] is None
            checking = wait_for(
                "it is checked",
                lambda: (view := gateway.show("demo"))["detail"].startswith("checking") and view,
            )
            assert checking["plan"]["grade"] == "predicted"
            ready = gateway.until("demo", "ready", START_S)
            answers = [json.loads(path.read_text()) for path in (data / "answers").glob("*.json")]
            with contextlib.closing(sqlite3.connect(data / "fitserve.db")) as database:
                ((plan,),) = database.execute("SELECT plan FROM attempts")
        return answers and (ready, answers, json.loads(plan))

    ready, (answer,), instance = wait_for(
        "the engine answers before the start", checked_start, START_S, every_s=0
    )
    assert ready["plan"]["memory"]["weights_bytes"] == answer["weights"]
    assert {row["backend"] for row in ready["plan"]["attention"]} == {
        row["backend"] for row in answer["attention"]
    }
    assert [attempt["state"] for attempt in ready["attempts"]] == ["ready"]
    assert instance["grade"] == "checked", "the grade of a plan before its start"
