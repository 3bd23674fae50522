"""Drafters: every kept answer of vLLM equals the planner's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.engines.common.layers.build import build
from gateway.engines.common.speculative.mtp import drafting_bytes
from gateway.engines.common.speculative.speculative import drafter_bytes
from gateway.engines.common.speculative.speculative_rules import Speculation
from gateway.models.rank import Rank
from tests.conformance import speculative_questions
from tests.conformance.golden import pairs
from tests.conformance.speculative_questions import LISTS, Question
from tests.support.drafters import RULES, attends, drafter, engine, speculation_of, target, wish
from tests.support.paths import MODELS
from tests.support.published import model_from_config
from tests.support.versions import NEWEST_VLLM, VLLM

# Read in their files, which cannot be imported where the answers were asked (speculative.yaml says
# so).
UNASKED = {
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "PixtralForConditionalGeneration",
}


def make_planner_answer(version: str, question: Question) -> Speculation:
    changes: dict[str, Any] = (
        {} if question.layers is None else {"num_nextn_predict_layers": question.layers}
    )
    spec = target(question.target, **changes)
    if question.drafter:
        draft_model = drafter(question.drafter, spec if question.method != "draft_model" else None)
        request = wish(drafter="org/drafter", num_speculative_tokens=question.tokens)
        return speculation_of(
            spec,
            draft_model,
            request,
            engine(version),
            RULES[version],
            attends,
            Rank(tp=question.tp),
        )
    request = wish(speculative=question.method, num_speculative_tokens=question.tokens)
    return speculation_of(
        spec, None, request, engine(version), RULES[version], attends, Rank(tp=question.tp)
    )


@pytest.mark.parametrize("version", VLLM)
def test_every_answer_is_the_engines_own(version: str) -> None:
    count = 0
    for question, answer in pairs(speculative_questions, version, "9.0"):
        if not question.target:
            assert is_listed(version, question.method, answer), question
        elif answer[0] == "unanswered" or (question.tokens is None and answer[0] == "error"):
            continue  # without a number engines refuse such drafters
        elif answer[0] == "error":
            assert make_planner_answer(version, question).method.value == "none", (question, answer)
        else:
            own_answer = make_planner_answer(version, question)
            assert [
                own_answer.config["method"],
                own_answer.config["num_speculative_tokens"],
            ] == answer[:2], (
                question,
                own_answer,
            )
        count += 1
    assert count > 40


def is_listed(version: str, name: str, answer: list[str]) -> bool:
    rules = RULES[version]
    if name == LISTS[0]:
        return sorted(rules.methods) == answer
    if name == LISTS[1]:
        return sorted(rules.architectures) == answer
    return set(rules.hidden_states.architectures) - UNASKED == set(answer) - UNASKED


@pytest.mark.parametrize("version", ["0.19.1", NEWEST_VLLM])
def test_bytes_of_a_drafter_are_those_the_engine_allocates(version: str) -> None:
    count = 0
    for question, answer in pairs(speculative_questions, version, "9.0"):
        if (
            not question.drafter
            or answer[0] in ("error", "unanswered")
            or answer[3] is None
            or question.target != "qwen3-8b"
        ):
            continue
        assert drafter_bytes(
            drafter(question.drafter), Rank(tp=question.tp), build
        ) == pytest.approx(sum(answer[3]), rel=1e-4), question
        count += 1
    assert count >= 10


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "glm-4.5-air", "qwen3-next-80b-a3b", "qwen3.6-35b-a3b"]
)
def test_layers_that_draft_are_as_large_as_the_engine_builds_them(name: str) -> None:
    spec = model_from_config(json.loads((MODELS / f"{name}.json").read_text()), source=name)
    for question, answer in pairs(speculative_questions, NEWEST_VLLM, "9.0"):
        if question.target == name and question.layers is None and answer[0] == "mtp":
            # These two have a head in the drafting layer, which is the target's own where the files
            # have none.
            head = (
                spec.vocab * spec.hidden * 2 // question.tp
                if name in ("deepseek-v3", "glm-4.5-air")
                else 0
            )
            draft_bytes = drafting_bytes(spec, 1, Rank(tp=question.tp), build)
            assert draft_bytes is not None
            assert draft_bytes + head == pytest.approx(answer[3][0], rel=0.02), question
