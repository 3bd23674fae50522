"""The kernels of dense layers: every kept answer of vLLM equals the planner's."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.common.kernels.linear import (
    KernelChoice,
    LinearRules,
    choose,
    disabling,
)
from gateway.models.scheme import LinearShape
from tests.conformance import linear_questions
from tests.conformance.golden import golden
from tests.conformance.linear_questions import Question, questions
from tests.support.engine_rules import scheme_of
from tests.support.versions import VLLM
from tests.unit.engines.common.kernels.test_linear import RULES

ALL_PACKAGES = frozenset(
    {"flashinfer", "humming", "deep_gemm", "conch", "b12x", "fbgemm_gpu", "quark"}
)


def shape_of(q: Question) -> LinearShape:
    return LinearShape(k=q.k, n=q.n, scheme=scheme_of(q), dtype=q.dtype, full_k=q.full_k)


@pytest.mark.parametrize("version", VLLM)
def test_every_answer_is_the_engines_own(version: str) -> None:
    question_list = list(questions(version))
    shapes = [shape_of(question) for question in question_list]
    wrong = []
    for machine, answers in golden(linear_questions, version).items():
        for question, shape, engine_answer in zip(question_list, shapes, answers, strict=True):
            planner_answer = accepting(RULES[version], question, shape, machine)
            if planner_answer != engine_answer:
                wrong.append((machine, question, engine_answer, planner_answer))
    assert wrong == []


def accepting(
    rules: LinearRules, question: Question, shape: LinearShape, machine: str
) -> list[Any]:
    """As the engine was asked: disable the chosen kernel, until none is left."""
    capability, _, variant = machine.partition(" ")
    packages = {"": None, "none": frozenset[str](), "all": ALL_PACKAGES}[variant]
    names = set(filter(None, question.disabled.split(",")))
    kernels: list[str] = []
    first: KernelChoice | None = None
    while True:
        choice = choose(
            rules, shape, capability, packages, disabling(names), question.forced or None
        )
        first = first or choice
        kernel = "unknown" if choice.status == "unknown" else choice.kernel
        if kernel is None or kernel in kernels:
            return [kernels, list(first.padded_to) if first.padded_to else None]
        kernels.append(kernel)
        names.add(kernel)


def test_the_golden_answers_are_many_and_of_every_kind() -> None:
    versions = [
        [answer for row in golden(linear_questions, version).values() for answer in row]
        for version in VLLM
    ]
    assert sum(map(len, versions)) > 20_000
    assert (
        len({kernel for answers in versions for accepting, _ in answers for kernel in accepting})
        > 50
    )
    assert all([[], None] in answers for answers in versions)
