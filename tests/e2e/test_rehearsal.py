"""The real engines' own code refuses starts before weights are loaded: each row is one `raise`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.domain import EngineRef, Question, StartSettings
from gateway.domain.units import GIB
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.engines.inquiry.inquiry_document import StatedGpus
from gateway.planner.service.engine_check import model_files
from gateway.profiles.profiles import Profiles
from tests.conformance.engine.option_defaults import defaults
from tests.conformance.engine.planned_options import is_planned, keys, planned_names
from tests.conformance.engine.reviewed_refusals import reviewed_refusals
from tests.conformance.engine.start_path import KINDS, Refusal, Sources, fields, refusals
from tests.conformance.kept import DownloadFolder
from tests.e2e.conftest import ENGINE
from tests.e2e.refused_starts import SGLANG, VLLM, RefusedStart, change_config
from tests.e2e.test_unpacked_engines import ENOUGH_S, Unpacked
from tests.support.paths import MODELS, ROOT
from tests.support.published import config
from tests.support.versions import SGLANG_REF, VLLM_REF

pytestmark = pytest.mark.engine

GPUS = StatedGpus("9.0", 80 << 30, 8, "NVIDIA H100 80GB HBM3")
ROWS = {VLLM_REF: VLLM, SGLANG_REF: SGLANG}
CONTEXT = {VLLM_REF: "--max-model-len", SGLANG_REF: "--context-length"}
SEQS = {VLLM_REF: "--max-num-seqs", SGLANG_REF: "--max-running-requests"}
# Rows that take the whole way of an inquiry too.
INQUIRED = ("llama-3.2-1b", 12)
# This many of the refusals that a configuration may lead to are triggered.
LEAST = {VLLM_REF: 186, SGLANG_REF: 94}
SOURCES = (VLLM_REF, SGLANG_REF)
# Fields of published files that tests/models leaves out, and without which SGLang's code crashes.
INTERVAL = {"text_config": {"full_attention_interval": 4}}
LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma-2-9b": {"hidden_act": "gelu_pytorch_tanh"},
    "qwen3.5-9b": INTERVAL,
    "qwen3.6-35b-a3b": INTERVAL,
}
# Published shapes whose starts run: a length, and requests at once.
LIMITS = ((2048, 64), (1024, 64), (2048, 8), (512, 1))


class Rehearsals(NamedTuple):
    """Answers to the rows; to the starts of all published models; and to smaller limits."""

    refusals: list[tuple[RefusedStart, dict[str, Any]]]
    published: list[tuple[str, dict[str, Any]]]
    smaller: list[tuple[str, dict[str, Any]]]
    paths: list[Refusal]


def ask_engine(
    files: dict[str, dict[str, Any]],
    argv: list[str],
    size: int,
    env: Mapping[str, str] | None = None,
    traced: bool = True,
) -> dict[str, Any]:
    return {
        "files": files,
        "argv": argv,
        "env": dict(env or {}),
        "kv_bytes": size,
        "traced": traced,
    }


def settings(ref: str, package: Path, published: set[str]) -> set[str]:
    """Flags of the engine, fields of published config.json, and of the engine's configurations."""
    flags = {name.replace("-", "_") for name in Profiles().engine(ref).flags}
    return flags | published | fields(package / "config")


def paths_of(
    ref: str, package: Path, entered: set[tuple[str, int]], devices: Mapping[str, bool]
) -> list[Refusal]:
    """The refusals that starts with the planner's options can meet. devices: of the stated GPU."""
    published = {
        name for path in MODELS.glob("*.json") for name in keys(json.loads(path.read_text()))
    }
    choices = {
        name.replace("-", "_"): (flag.default, *flag.choices)
        for name, flag in Profiles().engine(ref).flags.items()
        if flag.choices
    }
    files = {file for file, _ in entered if (package / file).is_file()}
    kind = ref.partition("==")[0]
    known_defaults = defaults(package, kind, planned_names() | published, choices, files)
    names = settings(ref, package, published)
    sources = Sources(package, files, names, known_defaults, devices)
    return refusals(sources, entered, reviewed_refusals(kind))


@pytest.fixture(scope="module", params=[VLLM_REF, SGLANG_REF])
def rehearsals(request: pytest.FixtureRequest, engines: Path) -> tuple[str, Rehearsals]:
    """One process for each engine: its import takes a core for seconds."""
    ref = str(request.param)
    kind, _, version = ref.partition("==")
    sources = DownloadFolder(ROOT / ".cache/engines").sources(kind, version)
    python = engines / ENGINE.replace("==", "-") / "bin/python"
    rows, context, names_of_plans = ROWS[ref], CONTEXT[ref], planned_names()
    models = sorted(path.stem for path in MODELS.glob("*.json"))
    starts = [
        ask_engine(
            row.files,
            [*([] if context in " ".join(row.argv) else [f"{context}=512"]), *row.argv],
            row.kv_bytes,
            dict(row.env),
            is_planned(row.argv, dict(row.env), names_of_plans),
        )
        for row in rows
    ]
    starts += [
        ask_engine(
            {"config.json": change_config(config(name), LEFT_OUT.get(name, {}))},
            [f"{context}=512"],
            24 * GIB,
        )
        for name in models
    ]
    limited = [
        (name, limit) for name in ("llama-3.2-1b", "granite-4.0-h-micro") for limit in LIMITS
    ]
    starts += [
        ask_engine(
            {"config.json": config(name)}, [f"{context}={length}", f"{SEQS[ref]}={seqs}"], 24 * GIB
        )
        for name, (length, seqs) in limited
    ]
    command = [str(python), "-m", "tests.conformance.engine", "--engine", kind]
    command += ["--memory-gib", str(GPUS.memory_bytes // GIB)]
    command += ["--version", version, "--capability", GPUS.capability, "--sources", str(sources)]
    result = subprocess.run(
        [*command, "tests.conformance.engine.rehearsed_starts"],
        input=json.dumps(starts),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    document = json.loads(result.stdout)
    answers = document["starts"]
    first, last = len(rows), len(rows) + len(models)
    entered = {(file, line) for file, line in document["entered"]}
    paths = paths_of(ref, sources / kind, entered, document["devices"])
    return ref, Rehearsals(
        list(zip(rows, answers, strict=False)),
        list(zip(models, answers[first:last], strict=True)),
        list(zip((name for name, _ in limited), answers[last:], strict=True)),
        paths,
    )


def test_refusals_before_weights_are_found(rehearsals: tuple[str, Rehearsals]) -> None:
    _, rehearsal = rehearsals
    unseen = [
        f"{row.model} {row.changes} {' '.join(row.argv)}: {answer['refused'] or answer['left_out']}"
        for row, answer in rehearsal.refusals
        if row.words.lower() not in answer["refused"].lower() or not answer["place"]
    ]
    assert not unseen, "\n".join(unseen)


def test_no_published_model_is_refused(rehearsals: tuple[str, Rehearsals]) -> None:
    _, rehearsal = rehearsals
    refusals = [
        (name, answer["refused"]) for name, answer in rehearsal.published if answer["refused"]
    ]
    assert refusals == []


def test_a_start_that_runs_also_runs_with_smaller_limits(
    rehearsals: tuple[str, Rehearsals],
) -> None:
    """So that a plan with smaller limits is proven by it: planner/rehearsed_start.py."""
    _, rehearsal = rehearsals
    assert [
        (name, answer["refused"]) for name, answer in rehearsal.smaller if answer["refused"]
    ] == []


def test_a_share_of_refusals_is_triggered(rehearsals: tuple[str, Rehearsals]) -> None:
    """Prints the counts. A refusal that a row with planned options leads to counts as one that a
    configuration may lead to, whatever its conditions say."""
    ref, rehearsal = rehearsals
    names_of_plans = planned_names()
    places = {answer["place"] for _, answer in rehearsal.refusals}
    met = {
        answer["place"]
        for row, answer in rehearsal.refusals
        if is_planned(row.argv, dict(row.env), names_of_plans)
    }
    counts = Counter(path.kind for path in rehearsal.paths)
    possible = {
        path.place for path in rehearsal.paths if path.kind == "config" or path.place in met
    }
    triggered = possible & places
    beyond = {path.place for path in rehearsal.paths if path.place in places} - possible
    lines = [f"{ref}: {len(rehearsal.paths)} raise statements in the start path"]
    lines += [f"    {counts[kind]:4} {kind}: {why}" for kind, why in KINDS.items()]
    lines += [
        f"    triggered and found {len(triggered)} of {len(possible)}"
        f" ({len(triggered) / len(possible):.0%}), and {len(beyond)} that no plan leads to,"
        f" in {len(rehearsal.refusals)} starts"
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    assert len(triggered) >= LEAST[ref]
    assert not [path for path in rehearsal.paths if path.kind == "option" and path.place in met]
    reviewed = {row.kind for row in reviewed_refusals(ref.partition("==")[0])}
    assert not [path for path in rehearsal.paths if path.kind in reviewed and path.place in places]


@pytest.mark.parametrize("ref", SOURCES)
def test_an_inquiry_finds_refusals(engines: Path, tmp_path: Path, ref: str) -> None:
    kind, _, version = ref.partition("==")
    sources = {ref: DownloadFolder(ROOT / ".cache/engines").sources(kind, version)}
    python = engines / ENGINE.replace("==", "-") / "bin/python"
    inquirer = Inquirer(Unpacked(python, sources, tmp_path), AnswerCache(tmp_path / "answers"))
    engine = EngineRef(kind=kind, version=version, image=None)
    model, count = INQUIRED
    rows = [row for row in ROWS[ref] if row.model == model and not (row.changes or row.env)]
    seed = "--seed" if kind == "vllm" else "--random-seed"
    starts = {
        Question(
            engine=ref,
            capability=GPUS.capability,
            argv=(f"{CONTEXT[ref]}=512", f"{seed}={number}"),
        ): StartSettings(argv=row.argv, kv_bytes=row.kv_bytes)
        for number, row in enumerate(rows[:count])
    }
    files = model_files(config(model), None)
    stored_measurement = asyncio.run(
        inquirer.answers(engine, GPUS, files, [*starts], ENOUGH_S, starts)
    )
    unseen = []
    for question, row in zip(starts, rows, strict=False):
        start = stored_measurement[question].start if question in stored_measurement else None
        if start is None or row.words.lower() not in start.refused.lower():
            unseen.append((row, start))
    assert not unseen
