"""Every plan for SGLang starts with flags that SGLang's own parser takes, and that its own code
then resolves.

Of each version the Python sources of its wheel are asked, for one machine. The published models, as
they are and quantized.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.planner.service.offline import OfflinePlanner
from tests.conformance.kept import DownloadFolder
from tests.conformance.layer_cases import QUANTS
from tests.e2e.conftest import ENGINE
from tests.support.makers import wish
from tests.support.paths import MODELS, ROOT
from tests.support.planning import decide
from tests.support.published import config, model_from_config
from tests.support.versions import SGLANG_REF, since

pytestmark = pytest.mark.engine

MACHINES = {
    "sglang==0.5.10.post1": "2x3090",
    "sglang==0.5.15.post1": "h200",
    SGLANG_REF: "2x5090",
}
SOURCES = (*MACHINES,)
FORMATS = ("fp8-dynamic", "awq", "nvfp4")
NEWER = "0.5.16"  # versions before are made for a transformers before 5.13
EAGER = ("llama-3.1-8b", "eager")


class Start(NamedTuple):
    name: tuple[str, str]
    config: dict[str, Any]
    argv: tuple[str, ...]
    tp: int


def checkpoints() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for model in sorted(path.stem for path in MODELS.glob("*.json")):
        published = config(model)
        yield (model, "as published"), published
        if "quantization_config" not in published:
            yield from (
                ((model, name), published | {"quantization_config": QUANTS[name]})
                for name in FORMATS
            )
    yield EAGER, config(EAGER[0])


def plan_starts(engine: str) -> tuple[int, str, list[Start]]:
    """The machine's GPUs, and every plan for it."""
    planner = OfflinePlanner.read_environment()
    _, machine = planner.machine(MACHINES[engine])
    profile = planner.profiles.engine(engine)
    rules, starts = planner.profiles.rules([profile]), []
    for name, fields in checkpoints():
        spec = model_from_config(fields)
        args = {profile.spelling["enforce-eager"]: True} if name == EAGER else {}
        decision = decide(spec, machine, [profile], wish(args=args, text_only=True), rules=rules)
        starts += [
            # Groups of ranks are a part of SGLang's tensor parallel size.
            Start(name, fields, plan.argv, plan.tensor_parallel.value * plan.data_parallel.value)
            for plan in decision.plans
        ]
    gpu = machine.gpus[0]
    assert gpu.total_bytes is not None
    assert gpu.capability is not None
    return gpu.total_bytes >> 20, gpu.capability, starts


def ask_starts(
    python: Path, answers: DownloadFolder, engine: str
) -> list[tuple[Start, dict[str, Any]]]:
    kind, _, version = engine.partition("==")
    memory_mib, capability, starts = plan_starts(engine)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SGLANG", "SGL_", "HF_", "PYTHON", "CUDA"))
    }
    over = {} if since(version, NEWER) else {"PYTHONPATH": str(answers.older())}
    command = [
        str(python),
        "-m",
        "tests.conformance.engine",
        "--engine",
        kind,
        "--version",
        version,
        "--capability",
        capability,
    ]
    result = subprocess.run(
        [
            *command,
            "--sources",
            str(answers.sources(kind, version)),
            "tests.conformance.engine.sglang_starts",
        ],
        input=json.dumps(
            {"memory_mib": memory_mib, "starts": [(start.config, start.argv) for start in starts]}
        ),
        cwd=ROOT,
        env=environment | over | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return list(zip(starts, json.loads(result.stdout), strict=True))


@pytest.fixture(scope="module")
def answers(engines: Path) -> dict[str, list[tuple[Start, dict[str, Any]]]]:
    """Two versions at a time: an import takes a core for seconds."""
    engine_cache = DownloadFolder(ROOT / ".cache/engines")
    engine_cache.folder.mkdir(parents=True, exist_ok=True)
    engine_cache.older()
    python = engines / ENGINE.replace("==", "-") / "bin/python"
    with ThreadPoolExecutor(2) as pool:
        return dict(
            zip(
                MACHINES,
                pool.map(lambda engine: ask_starts(python, engine_cache, engine), MACHINES),
                strict=True,
            )
        )


@pytest.mark.parametrize("engine", MACHINES)
def test_the_engine_takes_the_flags_of_every_plan(
    answers: dict[str, list[tuple[Start, dict[str, Any]]]], engine: str
) -> None:
    answer = answers[engine]
    # The other checkpoints of about 150 do not fit or have no kernel.
    assert len({start.name for start, _ in answer}) > 75
    wrong = [
        f"{' '.join(start.name)} {' '.join(start.argv)}: {answer_row['refused']}"
        for start, answer_row in answer
        if "refused" in answer_row
    ]
    assert wrong == []
    assert [start for start, answer_row in answer if answer_row["tp"] != start.tp] == []


@pytest.mark.parametrize("engine", MACHINES)
def test_a_plan_without_graphs_captures_none(
    answers: dict[str, list[tuple[Start, dict[str, Any]]]], engine: str
) -> None:
    """Later versions call the switch deprecated, and still heed it."""
    assert {
        answer_row["graphs"] for start, answer_row in answers[engine] if start.name == EAGER
    } == {False}
    assert {
        answer_row["graphs"]
        for start, answer_row in answers[engine]
        if start.name == (EAGER[0], "as published")
    } == {True}
