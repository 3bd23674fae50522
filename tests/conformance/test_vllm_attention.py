"""The attention backends of vLLM: every kept answer of the engine equals the planner's."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.common.rules.subject import AttentionQuery, Subject
from gateway.engines.vllm.attention import choose_backend
from gateway.engines.vllm.attention_rules import AttentionRules, refusals
from tests.conformance import attention_questions
from tests.conformance.attention_questions import Question, questions
from tests.conformance.golden import golden
from tests.support.versions import VLLM
from tests.unit.engines.vllm.test_attention import RULES, group, rows

# The engine's answers name refusals of a backend by these.
CODES = {
    "multimodal_prefix": "prefix",
    "sliding_window": "window",
    "non_causal": "causal",
    "combination": "other",
}


def query_of(q: Question) -> AttentionQuery:
    fields = {
        name: value for name, value in q._asdict().items() if name not in ("forced", "kv_heads")
    }
    has_sinks = fields.pop("sinks")
    recurrent = q.recurrent or ""
    return AttentionQuery(**fields | {"recurrent": recurrent, "has_sinks": has_sinks})


@pytest.mark.parametrize("version", VLLM)
def test_every_answer_is_the_engines_own(version: str) -> None:
    question_list = list(questions(version))
    queries = [
        None if question.kind == "gemma4" else query_of(question) for question in question_list
    ]
    wrong = []
    for machine, answers in golden(attention_questions, version).items():
        for question, query, engine_answer in zip(question_list, queries, answers, strict=True):
            if query is None and machine.endswith(" none"):
                continue  # a whole model is planned for the image
            planner_answer = (
                gemma4(version, question, machine)
                if query is None
                else answer(RULES[version], question, query, machine)
            )
            if planner_answer != engine_answer:
                wrong.append((machine, question, engine_answer, planner_answer))
    assert wrong == []


def answer(
    rules: AttentionRules, question: Question, query: AttentionQuery, machine: str
) -> list[Any]:
    """The planner's answer in the form of the engine's: the choice, the possible backends, and all
    refusals of the others."""
    capability, _, variant = machine.partition(" ")
    packages = frozenset({"tokenspeed_mla"}) if variant == "none" else None
    choice = choose_backend(rules, query, capability, packages, question.forced or None)
    backend = "unknown" if choice.status == "unknown" else choice.backend
    if question.forced or question.kind in ("vision", "recurrent"):
        return [backend, choice.version, None, None]
    subject = Subject(
        capability, frozenset(rules.packages) if packages is None else packages, attention=query
    )
    valid, refusal_rows = [], []
    for name in rules.order(subject):
        criteria = {
            criterion for criterion, _ in refusals(rules.backends[name], rules.asks, subject)
        }
        if criteria:
            refusal_rows.append(
                f"{name}:"
                f" {' '.join(sorted(CODES.get(criterion, criterion) for criterion in criteria))}"
            )
        else:
            valid.append(name)
    return [backend, choice.version, " ".join(valid), ", ".join(refusal_rows)]


def gemma4(version: str, question: Question, machine: str) -> list[Any]:
    groups = (group("sliding", 256, window=1024), group("full", question.head_dim))
    planner_rows = rows(
        version,
        machine,
        *groups,
        kv=question.kv_dtype,
        forced_name=question.forced or None,
        architecture="Gemma4ForCausalLM",
    )
    # A selected backend may refuse once it is made, which was not asked here:
    # tests/conformance/test_starts.py.
    backends = [
        next((refusal.kernel for refusal in row.refusals if refusal.is_at_start), row.backend)
        for row in planner_rows
    ]
    return [
        part
        for row, backend in zip(planner_rows, backends, strict=True)
        for part in (backend, row.version)
    ]


def test_the_golden_answers_are_many_and_of_every_kind() -> None:
    answers = [
        answer
        for version in VLLM
        for row in golden(attention_questions, version).values()
        for answer in row
    ]
    assert len(answers) > 15_000
    assert len({each_answer[0] for each_answer in answers}) > 20
    assert {answer[1] for answer in answers} == {None, 2, 3, 4}
    assert any(answer[0] is None and answer[2] == "" for answer in answers)
