"""Proofs of tool calls, thoughts and schemas in answers; the questions; and proofs of earlier
attempts."""

from __future__ import annotations

import json

import pytest

from gateway.domain import Abilities, Ability, Plan, StrChoice
from gateway.engines.common.chat.abilities import (
    ABILITIES_TIMEOUT_S,
    ANSWER,
    TOOL,
    ParsedAnswer,
    abilities_by_plan,
    earlier,
    fits,
    judge,
    questions,
    was_ended_by_asking,
)
from tests.support.makers import attempt, plan

CALL = json.dumps({"city": "Paris", "unit": "celsius"})
SHOWN = Abilities.uniform(Ability(state="proven", evidence="seen"))


def chat_plan(tools: str = "hermes", reasoning: str = "qwen3", context: int = 8192) -> Plan:
    new_plan = plan()
    choices = {name: StrChoice(value=value, reason=f"because of {value}", source="test") for name,
        value in
              (("tool_parser", tools), ("reasoning_parser", reasoning))}  # fmt: skip
    length = new_plan.max_model_len.evolve(value=context)
    return new_plan.evolve(
        model=new_plan.model.evolve(has_chat=True), max_model_len=length, **choices
    )


@pytest.mark.parametrize(
    ("name", "answer", "state", "evidence"),
    [
        ("tools", ParsedAnswer("", "", ((TOOL, CALL),), True), "proven", "arguments that fit"),
        ("required_tools", ParsedAnswer("", "thought", ((TOOL, CALL), (TOOL, CALL)), False),
            "proven",
            "arguments that fit"),
        ("tools", ParsedAnswer("It rains.", "", (), True), "not proven",
            "called no tool, and said: 'It rains.'"),
        ("tools", ParsedAnswer("", "", ((TOOL, '{"city": "Rome", "unit": "celsius"}'),), True),
            "not proven", "do not fit"),
        ("tools", ParsedAnswer("", "", ((TOOL, '{"city": "Paris"'),), False), "unknown", "cut off"),
        ("tools", ParsedAnswer("", "", (("rm", CALL),), True), "not proven", "not offered"),
        ("reasoning", ParsedAnswer("9.8", "Well.", (), True), "proven", "5 characters of thoughts"),
        ("reasoning", ParsedAnswer("<think>Well.</think>9.8", "", (), True), "not proven",
            "without thoughts apart"),
        ("reasoning", ParsedAnswer("", "Well,", (), False), "unknown",
            "no answer; the answer was cut off"),
        ("reasoning", ParsedAnswer(" ", "Well.", (), True), "not proven", "and no answer"),
        ("json_schema", ParsedAnswer('{"city": "Paris", "capital": true}', "", (), True),
            "proven", "fits"),
        ("json_schema", ParsedAnswer('{"city": "Paris", "capital": 1}', "", (), True), "not proven",
            "does not fit"),
        ("json_schema", ParsedAnswer('{"city": "Paris", "capital": true, "x": 1}', "", (), True),
            "not proven", "does not fit"),
        ("json_schema", ParsedAnswer('```json\n{"city": "Paris", "capital": true}\n```',
            "", (), True),
            "not proven", "```json"),
        ("json_schema", ParsedAnswer("[" * 100_000, "", (), True), "not proven", "does not fit"),
        ("json_schema", ParsedAnswer("", "", (), False), "unknown",
            "nothing; the answer was cut off"),
    ],
)  # fmt: skip
def test_an_answer_proves_an_ability(
    name: str, answer: ParsedAnswer, state: str, evidence: str
) -> None:
    proof = judge(name, answer)
    assert (proof.state, evidence in proof.evidence) == (state, True), proof


@pytest.mark.parametrize(
    "text",
    ["null", '{"city": ["Paris"], "capital": true}', '{"city": true, "capital": true}', "{}"],
)
def test_a_value_of_another_type_does_not_fit(text: str) -> None:
    assert not fits(text, ANSWER)


def test_a_model_is_asked_about_abilities_with_a_parser() -> None:
    assert set(questions(chat_plan())) == {"tools", "required_tools", "reasoning", "json_schema"}
    assert set(questions(chat_plan("none", "none"))) == {"json_schema"}
    silent = abilities_by_plan(chat_plan("none", "qwen3"))
    assert (silent.tools.state, silent.tools.evidence) == ("not proven", "because of none")
    assert silent.reasoning.state == silent.json_schema.state == "unknown"


def test_a_model_that_does_not_chat_is_not_asked() -> None:
    model_plan = chat_plan()
    base, embeds = (
        model_plan.evolve(model=model_plan.model.evolve(**change))
        for change in ({"has_chat": False}, {"task": "embed"})
    )
    for plan_without_chat, why in ((base, "no chat template"), (embeds, "does not generate")):
        assert not questions(plan_without_chat)
        assert all(
            ability.state == "not proven" and why in ability.evidence
            for _, ability in abilities_by_plan(plan_without_chat)
        )


def test_thoughts_get_more_room_and_no_question_more_than_half_a_context() -> None:
    thinking, plain = (
        questions(chat_plan(reasoning=parser))["json_schema"]["max_tokens"]
        for parser in ("qwen3", "none")
    )
    assert thinking > plain
    assert {body["max_tokens"] for body in questions(chat_plan(context=128)).values()} == {64}


def test_equal_plans_are_probed_once() -> None:
    now = attempt(3, started_at=30.0)
    attempt_in_service = attempt(1, "stopped", started_at=10.0, ready_at=11.0, abilities=SHOWN)
    other_attempt = attempt(
        2, "stopped", started_at=20.0, ready_at=21.0, abilities=Abilities(), fingerprint="another"
    )
    assert earlier(now, [attempt_in_service, other_attempt], 0.0) == SHOWN
    assert earlier(now, [attempt_in_service, other_attempt], 10.0) is None, (
        "somebody asked to try again since"
    )
    assert earlier(now, [other_attempt], 0.0) is None


def test_an_engine_that_ended_when_it_was_asked_is_not_asked_again() -> None:
    abilities = abilities_by_plan(chat_plan())
    dead_attempt = attempt(1, "failed", started_at=10.0, abilities=abilities, fingerprint="another")
    assert was_ended_by_asking(dead_attempt)
    earlier_value = earlier(attempt(2, started_at=20.0), [dead_attempt], 0.0)
    assert earlier_value is not None
    assert (earlier_value.tools.state, earlier_value.tools.evidence) == (
        "not proven",
        "attempt 1 ended when it was asked",
    )
    for living_attempt in (
        dead_attempt.evolve(state="stopped"),
        dead_attempt.evolve(ready_at=12.0),
        dead_attempt.evolve(ready_at=12.0, ended_at=12.0 + ABILITIES_TIMEOUT_S + 1),
        dead_attempt.evolve(abilities=SHOWN),
    ):
        assert not was_ended_by_asking(living_attempt)
    assert was_ended_by_asking(dead_attempt.evolve(ready_at=12.0, ended_at=13.0)), (
        "it served meanwhile"
    )


def test_a_question_without_an_answer_is_asked_again_at_the_next_start() -> None:
    abilities = abilities_by_plan(chat_plan())
    attempt_in_service = attempt(1, "stopped", started_at=10.0, ready_at=11.0, abilities=abilities)
    assert earlier(attempt(2, started_at=20.0), [attempt_in_service], 0.0) is None
