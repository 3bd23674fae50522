"""Several models planned for one machine keep to its memory together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.domain import Decision, Wish
from gateway.domain.plan import RAM
from gateway.planner.service.neighbours import JointPlanning, make_names_unique
from gateway.planner.service.offline import OfflinePlanner
from tests.support.paths import MODELS
from tests.support.program import app


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfflinePlanner:
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path / "data"))
    # No name of a model may reach the Hub.
    monkeypatch.setenv("FITSERVE_HF_ENDPOINT", "http://127.0.0.1:9")
    return OfflinePlanner.read_environment()


def folder(parent: Path, name: str) -> str:
    (path := parent / name).mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text((MODELS / f"{name}.json").read_text())
    return str(path)


def wishes(parent: Path, *names: str) -> list[Wish]:
    return [Wish(name="plan", source=folder(parent, name)) for name in names]


def sum_promises(decisions: list[Decision]) -> Counter[str]:
    """Bytes of each device that the first plans take together."""
    total: Counter[str] = Counter()
    for decision in decisions:
        for plan in decision.plans[:1]:
            total.update(dict.fromkeys(plan.devices, plan.memory.promised_bytes))
            if plan.offloaded_bytes:
                total.update({RAM: plan.offloaded_bytes})
    return total


@pytest.mark.parametrize("hardware", ["3090", "2x3090", "cpu"])
def test_models_keep_to_the_memory_of_their_machine(
    planner: OfflinePlanner, tmp_path: Path, hardware: str
) -> None:
    name, machine = planner.machine(hardware)
    models = wishes(tmp_path, "qwen2.5-1.5b", "llama-3.2-1b", "qwen3-embedding-0.6b")
    decisions = JointPlanning(planner.decide_request, name, machine).plan(models)
    assert all(decision.plans for decision in decisions)
    sizes = {gpu.uuid: gpu.total_bytes or 0 for gpu in machine.gpus}
    for device, count in sum_promises(decisions).items():
        assert 0 < count <= sizes.get(device, machine.ram_total_bytes)


def test_an_earlier_model_gives_the_kv_cache_that_a_later_one_needs(
    planner: OfflinePlanner, tmp_path: Path
) -> None:
    name, machine = planner.machine("3090")
    models = wishes(tmp_path, "llama-3.2-1b", "granite-3.1-2b")
    lone_memory = planner.decide_on(models[0], name, machine).plans[0].memory
    first, second = JointPlanning(planner.decide_request, name, machine).plan(models)
    assert first.plans[0].memory.promised_bytes < lone_memory.promised_bytes
    assert second.taken_offers[0].model == "llama-3.2-1b"


def test_advice_is_a_context_with_which_all_fit(planner: OfflinePlanner, tmp_path: Path) -> None:
    name, machine = planner.machine("cpu")
    neighbourhood = JointPlanning(planner.decide_request, name, machine)
    models = wishes(tmp_path, "granite-3.1-2b", "qwen3-8b")
    decisions = neighbourhood.plan(models)
    assert [bool(decision.plans) for decision in decisions] == [True, False]
    assert neighbourhood.advice(models, decisions) == "All of them fit with `--context 8192`."
    shorter = [model.evolve(context=8192) for model in models]
    decisions = neighbourhood.plan(shorter)
    assert all(decision.plans for decision in decisions)
    assert neighbourhood.advice(shorter, decisions) == ""


def test_equal_folders_have_names_of_their_own() -> None:
    sources = ("/a/m", "/b/m/", "Org/m", "/c/n")
    models = make_names_unique(Wish(name="plan", source=source) for source in sources)
    assert [model.name for model in models] == ["m", "m-2", "m-3", "n"]


def test_the_command_plans_its_models_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: OfflinePlanner
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    del planner  # for its environment
    sources = [folder(tmp_path, name) for name in ("granite-3.1-2b", "qwen3-8b")]
    result = CliRunner().invoke(app, ["plan", *sources, "--hardware", "cpu"])
    assert result.exit_code == 3
    head, *_ = result.stdout.splitlines()
    assert head.split() == ["MODEL", "ENGINE", "DEVICES", "CONTEXT", "MEMORY"]
    assert "All of them fit with `--context 8192`." in result.stdout
    assert "without the other models" in result.stdout
    arguments = ["plan", *sources, "--hardware", "cpu", "--context", "8192", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stdout
    assert [document["model"] for document in json.loads(result.stdout)] == sources
    for option in ("--check", "--network=200gbit"):
        refusal = CliRunner().invoke(app, ["plan", *sources, "--hardware", "cpu", option])
        assert refusal.exit_code == 2


def test_caches_in_ram_of_several_models_fit_the_machine(
    planner: OfflinePlanner, tmp_path: Path
) -> None:
    name, machine = planner.machine("4xh100")
    names = ("qwen3-8b", "llama-3.1-8b", "granite-3.1-2b", "llama-3.2-1b")
    models = [wish.evolve(goal="agents") for wish in wishes(tmp_path, *names)]
    decisions = JointPlanning(planner.decide_request, name, machine).plan(models)
    promised_bytes = sum_promises(decisions)[RAM]
    assert machine.shm_bytes is not None
    assert 0 < promised_bytes <= machine.shm_bytes
