"""The output of the command line about a plan."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.present import FULL_DETAIL, show_decision, show_matrix, show_plan
from gateway.planner.matrix import cells
from gateway.profiles.profiles import Profiles
from tests.support.makers import make_decision, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.stateful_cases import CASES, ENGINES, MACHINES, RULES


def test_a_plan_names_the_stages_that_were_not_rehearsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = decide(CASES["qwen-27b"], MACHINES["2xh100"], ENGINES, wish(), rules=RULES).plans[0]
    show_plan(plan)
    assert "leaves out" not in capsys.readouterr().out
    show_plan(plan.evolve(unrehearsed=("capture of CUDA graphs",)))
    out = capsys.readouterr().out
    assert "The check before the start leaves out\n  capture of CUDA graphs" in out


CPU_WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"goal": "throughput"},
    {"replicas": 2},
    {"context": 9_999_999},
    {"args": {"max-num-seqs": 4}},
)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "phi-4", "deepseek-v3", "bge-m3", "qwen3-vl-8b"])
def test_a_machine_without_gpus_reads_of_cpu_and_ram(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles = Profiles()
    engines = profiles.engines(device="cpu")
    for fields in CPU_WISHES:
        decision = decide(
            published_model(name),
            profiles.hardware("cpu"),
            engines,
            wish(**fields),
            rules=profiles.rules(engines),
        )
        show_decision(decision, as_json=False, detail=FULL_DETAIL)
        text = capsys.readouterr().out
        assert ("on the CPU" in text and "Memory (RAM)" in text) == bool(decision.plans)
        assert [word for word in ("GPU", "VRAM", "device", "TP=") if word in text] == []


def test_a_number_of_gpus_without_a_gpu_is_a_warning() -> None:
    engines = Profiles().engines(device="cpu")
    hardware, spec = Profiles().hardware("cpu"), published_model("llama-3.1-8b")
    (best, *_) = decide(spec, hardware, engines, wish(gpus=7)).plans
    assert "`--gpus 7` changes nothing: this machine has no GPU" in " ".join(best.warnings)
    (best, *_) = decide(spec, hardware, engines, wish(gpus="few")).plans
    assert "--gpus" not in " ".join(best.warnings)


def test_a_matrix_of_single_ranks_has_no_layout(capsys: pytest.CaptureFixture[str]) -> None:
    (cell,) = cells(make_decision("2x3090"), ["vllm==9.9.0"])
    show_matrix([cell], as_json=False)
    assert "LAYOUT" not in capsys.readouterr().out
    show_matrix([cell.evolve(why="", tokens_s=80.8)], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0].split()[-1], lines[1].split()[-1]) == ("TOK/S", "80.8")
    show_matrix([cell, cell.evolve(tensor_parallel=2)], as_json=False)
    assert capsys.readouterr().out.splitlines()[0].split()[4] == "LAYOUT"
