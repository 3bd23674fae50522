"""The real engines' own code refuses starts before weights are loaded: each row is one `raise`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from gateway.domain import EngineRef, Question, StartSettings
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.document import StatedGpus
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.planner.service.engine_check import model_files
from tests.conformance.kept import Kept
from tests.e2e.conftest import ENGINE
from tests.e2e.refused_starts import SGLANG, VLLM, RefusedStart
from tests.e2e.test_unpacked_engines import ENOUGH_S, Unpacked
from tests.support.paths import ROOT
from tests.support.published import config
from tests.support.versions import SGLANG_REF, VLLM_REF

pytestmark = pytest.mark.engine

GPUS = StatedGpus("9.0", 80 << 30, 8, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("ref", "rows", "context"),
    [(VLLM_REF, VLLM, "--max-model-len=512"), (SGLANG_REF, SGLANG, "--context-length=512")],
)
def test_refusals_before_weights_are_found(
    engines: Path, tmp_path: Path, ref: str, rows: list[RefusedStart], context: str
) -> None:
    kind, _, version = ref.partition("==")
    sources = {ref: Kept(ROOT / ".cache/engines").sources(kind, version)}
    python = engines / ENGINE.replace("==", "-") / "bin/python"
    inquirer = Inquirer(Unpacked(python, sources, tmp_path), AnswerCache(tmp_path / "answers"))
    engine = EngineRef(kind=kind, version=version, image=None)
    by_model: dict[str, list[RefusedStart]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    unseen = []
    for model, asked in by_model.items():
        starts = {
            Question(
                engine=ref,
                capability=GPUS.capability,
                argv=(context, f"--{'seed' if kind == 'vllm' else 'random-seed'}={number}"),
            ): StartSettings(argv=row.argv, kv_bytes=row.kv_bytes)
            for number, row in enumerate(asked)
        }
        files = model_files(config(model), None)
        found = asyncio.run(inquirer.answers(engine, GPUS, files, [*starts], ENOUGH_S, starts))
        for question, row in zip(starts, asked, strict=True):
            start = found[question].start if question in found else None
            if start is None or row.words.lower() not in start.refused.lower():
                unseen.append((row, start))
    assert not unseen
