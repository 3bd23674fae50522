"""Quantization blocks in every published place and form are read as each engine reads them."""

from __future__ import annotations

import pytest

from gateway.domain import Engine
from gateway.engines.sglang.kv_dtype import declared_dtype
from gateway.engines.vllm.kv_dtype import adopted_dtype
from gateway.models.quantization_block import FILE
from gateway.models.spec import add_quant_files
from gateway.planner.quantization_methods import MethodRefusalError, check, resolve
from gateway.profiles.profiles import Profiles
from tests.conformance import quant_place_questions, sglang_quant_place_questions
from tests.conformance.golden import pairs
from tests.conformance.quant_place_cases import CAPABILITIES, CASES, files
from tests.support.published import model_from_config
from tests.support.versions import SGLANG, VLLM

PROFILES = Profiles()
(CAPABILITY,) = CAPABILITIES
# Two blocks that contradict each other: of those vLLM's choice is taken for every engine.
CONTRADICTIONS = {"compression_config beside a file", "text_config beside a file"}
# SGLang begins to load these, and cannot end it: the rules say why.
FAILS_LATER = {"file MXFP8", "flat MIXED, layers in the file"}
# The plan sets the dtype that the checkpoint names, where SGLang would not have looked for it.
NAMED_CACHE = {
    "flat FP8, KV by name",
    "flat MIXED",
    "flat MIXED, layers in the file",
    "file MIXED",
}


def make_planner_answer(engine: Engine, name: str) -> list[str]:
    config, file = files(CASES[name])
    spec = model_from_config(config)
    spec = spec if file is None else add_quant_files(spec, {FILE: file})
    try:
        scheme = resolve(engine, spec.quant, "", spec.model_type, CAPABILITY)
        check(engine, scheme, CAPABILITY, "bfloat16")
    except MethodRefusalError:
        return ["refused"]
    sglang = engine.kind == "sglang"
    cache = (
        declared_dtype(spec.quant, engine) if sglang else adopted_dtype(spec, engine, CAPABILITY)
    )
    return ["ok", scheme.method, cache]


def agree(name: str, engine_answer: list[str], planner_answer: list[str]) -> bool:
    """Quantized weights that an engine takes for unquantized have no plan."""
    if engine_answer[:2] == ["ok", "none"] and name != "file KV alone":
        return planner_answer == ["refused"]
    return planner_answer == engine_answer


@pytest.mark.parametrize("version", VLLM)
def test_vllm_reads_the_same_block(version: str) -> None:
    engine = PROFILES.engine(f"vllm=={version}")
    differences = [
        (name, engine_answer, make_planner_answer(engine, name))
        for (name, _), engine_answer in pairs(quant_place_questions, version, CAPABILITY)
    ]
    assert [row for row in differences if not agree(*row)] == []
    assert sum(row[1][0] == "ok" for row in differences) > 25


@pytest.mark.parametrize("version", SGLANG)
def test_sglang_reads_the_same_block(version: str) -> None:
    engine = PROFILES.engine(f"sglang=={version}")
    wrong = []
    for (name, _), engine_answer in pairs(sglang_quant_place_questions, version, CAPABILITY):
        planner_answer = make_planner_answer(engine, name)
        later = name in FAILS_LATER and planner_answer == ["refused"]
        is_cache_of_name = (
            name in NAMED_CACHE
            and planner_answer[:2] == engine_answer[:2]
            and planner_answer[2:] == ["fp8_e4m3"]
        )
        if not (
            name in CONTRADICTIONS
            or later
            or is_cache_of_name
            or agree(name, engine_answer, planner_answer)
        ):
            wrong.append((name, engine_answer, planner_answer))
    assert wrong == []
