"""The kernels of experts: every kept answer of vLLM equals the planner's."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.common.kernels.expert_kernels import MoeChoice, choose_moe
from gateway.models.scheme import MoeShape
from tests.conformance import moe_questions
from tests.conformance.golden import golden
from tests.conformance.moe_questions import Question, questions
from tests.support.engine_rules import scheme_of
from tests.support.versions import VLLM
from tests.unit.engines.common.kernels.test_expert_kernels import RULES


def shape_of(q: Question) -> MoeShape:
    return MoeShape(
        hidden=q.hidden,
        intermediate=q.intermediate // (1 if q.ep else q.tp),
        experts=q.experts,
        scheme=scheme_of(q),
        origin="" if q.origin == "none" else q.origin,
        dtype=q.dtype,
        function=q.activation,
        bias=q.bias,
        routing=q.routing,
        family=q.family,
        ep=q.ep,
    )


def answer(choice: MoeChoice) -> list[Any]:
    """As the golden answers have it; a method that is its own kernel has no backend there."""
    if choice.status in ("none", "unknown"):
        return [choice.status]
    backend = None if choice.kernel == choice.method else choice.kernel
    return [choice.method, backend, list(choice.padded_to) if choice.padded_to else None]


@pytest.mark.parametrize("version", VLLM)
def test_every_answer_is_the_engines_own(version: str) -> None:
    question_list = list(questions(version))
    shapes = [shape_of(question) for question in question_list]
    wrong, unknown_layers = [], set()
    for machine, answers in golden(moe_questions, version).items():
        capability, _, packages = machine.partition(" ")
        packages_here = frozenset[str]() if packages == "none" else None
        for question, shape, engine_answer in zip(question_list, shapes, answers, strict=True):
            planner_answer = answer(
                choose_moe(
                    RULES[version], shape, capability, packages_here, question.forced or None
                )
            )
            if planner_answer == ["unknown"]:
                unknown_layers.add((question.origin, question.kind))
            elif planner_answer != engine_answer:
                wrong.append((machine, question, engine_answer, planner_answer))
    assert wrong == []
    # The engine takes both for FP8 per tensor, which they are not.
    assert unknown_layers == {("modelopt", "fp8_token"), ("modelopt", "fp8_block")}


def test_the_golden_answers_are_many_and_of_every_kind() -> None:
    versions = [
        [answer for row in golden(moe_questions, version).values() for answer in row]
        for version in VLLM
    ]
    assert sum(map(len, versions)) > 50_000
    assert (
        len(
            {
                (each_answer[0], each_answer[1])
                for answers in versions
                for each_answer in answers
                if each_answer != ["none"]
            }
        )
        > 60
    )
    assert all(["none"] in answers for answers in versions)
