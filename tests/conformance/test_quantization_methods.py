"""The treatment of a quantization method by every engine version equals the planner's."""

from __future__ import annotations

import pytest

from gateway.domain import Engine, Quant
from gateway.planner.quantization_methods import MethodRefusalError, check, resolve
from tests.conformance import method_questions, sglang_method_questions
from tests.conformance.golden import golden, pairs
from tests.conformance.method_questions import BLOCKS, CAPABILITIES, Question
from tests.support.method_plans import ENGINES, PROFILES, make_decision
from tests.support.versions import SGLANG, VLLM


def make_planner_answer(
    engine: Engine, question: Question, capability: str, *, parser: bool = True
) -> list[str]:
    block = BLOCKS[question.block]
    quant = Quant(method=block["quant_method"], config=block) if block else None
    if parser and question.user and question.user not in engine.quantizations:
        return ["refused", "parser"]
    try:
        scheme = resolve(engine, quant, question.user, question.model_type, capability)
        check(engine, scheme, capability, question.dtype)
    except MethodRefusalError as error:
        return ["refused", error.refusal_reason]
    return ["ok", scheme.method]


@pytest.mark.parametrize("version", VLLM)
def test_every_answer_is_the_engines_own(version: str) -> None:
    count, wrong = 0, []
    for capability in CAPABILITIES:
        for question, engine_answer in pairs(method_questions, version, capability):
            # Where the class refuses its own block, the schemes of the layers say so: the test
            # below.
            if engine_answer == ["refused", "block"]:
                continue
            count += 1
            planner_answer = make_planner_answer(ENGINES[version], question, capability)
            if planner_answer != engine_answer:
                wrong.append((capability, question, engine_answer, planner_answer))
    assert wrong == []
    assert count > 7900


@pytest.mark.parametrize("version", VLLM)
def test_the_answers_are_of_every_kind(version: str) -> None:
    state_pairs = {
        tuple(answer) for row in golden(method_questions, version).values() for answer in row
    }
    assert {why for state, why in state_pairs if state == "refused"} >= {
        "mismatch",
        "unknown",
        "deprecated",
        "dtype",
        "online",
        "block",
        "capability",
    }
    assert len({method for state, method in state_pairs if state == "ok"}) > 12


@pytest.mark.parametrize("version", VLLM)
def test_a_block_that_its_class_refuses_has_no_plan(version: str) -> None:
    blocks = {
        question.block
        for question, engine_answer in pairs(method_questions, version, "8.6")
        if engine_answer[1] == "block" and not question.user
    }
    assert blocks
    for block in blocks:
        decision = make_decision(version, "3090", BLOCKS[block])
        assert not decision.plans, (version, block)
        assert decision.rejected[0].reasons


SGLANG_ENGINES = {version: PROFILES.engine(f"sglang=={version}") for version in SGLANG}


@pytest.mark.parametrize("version", SGLANG)
def test_every_answer_is_sglangs_own(version: str) -> None:
    wrong = []
    for capability in sglang_method_questions.CAPABILITIES:
        for question, engine_answer in pairs(sglang_method_questions, version, capability):
            if engine_answer == ["refused", "block"]:
                continue
            planner_answer = make_planner_answer(
                SGLANG_ENGINES[version], question, capability, parser=False
            )
            if planner_answer != engine_answer:
                wrong.append((capability, question, engine_answer, planner_answer))
    assert wrong == []
