"""Abilities beyond plain answers (tool calls, reasoning, schemas): the requests that test them, and
the verdicts. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from gateway.domain import Abilities, Ability, Attempt, Failure, Plan
from gateway.engines.common.chat.parsers import NO_PARSER

# Most tokens of an answer: small models ramble, and a model that thinks needs room before its
# answer begins.
_TOKENS = 256
_THINKING_TOKENS = 2048
_MAX_WORDS = 80
# Only words of these lists fit, so that a weak model that is held to the schema comes to an end.
_CITIES = ["Paris", "Tokyo", "Lima"]
_UNITS = ["celsius", "fahrenheit"]
TOOL = "get_weather"
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": _CITIES},
        "unit": {"type": "string", "enum": _UNITS},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": _CITIES}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
    "additionalProperties": False,
}
_TOOL_SPEC = {"name": TOOL, "description": "The weather of a city now.", "parameters": ARGUMENTS}
_TOOLS = [{"type": "function", "function": _TOOL_SPEC}]
# Engines without it check only the form of a call and not its schema (vllm 0.33.0
# tool_parsers/structural_tag_registry.py).
_STRICT_TOOLS = [{"type": "function", "function": {**_TOOL_SPEC, "strict": True}}]
_WEATHER_QUESTION = "What is the weather in Paris now, in celsius? Use the tool."
_REASONING_QUESTION = "Which is larger, 9.11 or 9.8? Answer in one short sentence."
_SCHEMA_QUESTION = 'Is Paris a capital? Answer with a JSON object that has "city" and "capital".'
# How templates call the switch of models that think only on request.
_THINKING_SWITCHES = {"enable_thinking": True, "thinking": True}
# An engine that ends so soon after its proof, with questions open, has ended by them.
ABILITIES_TIMEOUT_S = 60.0
_NO_ANSWER = "the engine was asked, and has not answered"


class ParsedAnswer(NamedTuple):
    """Content of an answer.

    calls: names and arguments.
    is_complete: the answer ended before its token limit.
    """

    content: str
    thoughts: str
    calls: tuple[tuple[str, str], ...]
    is_complete: bool


def questions(plan: Plan) -> dict[str, dict[str, Any]]:
    """Bodies of /v1/chat/completions without their model, by the ability that each of them
    shows."""
    if plan.model.task != "generate" or plan.model.has_chat is False:
        return {}
    thinks = plan.reasoning_parser.value != NO_PARSER
    limit = min(_THINKING_TOKENS if thinks else _TOKENS, max(1, plan.max_model_len.value // 2))
    result: dict[str, dict[str, Any]] = {}
    if plan.tool_parser.value != NO_PARSER:
        result["required_tools"] = {
            **_question_body(_WEATHER_QUESTION, limit),
            "tools": _STRICT_TOOLS,
            "tool_choice": "required",
        }
        result["tools"] = {
            **_question_body(_WEATHER_QUESTION, limit),
            "tools": _TOOLS,
            "tool_choice": "auto",
        }
    if thinks:
        result["reasoning"] = {
            **_question_body(_REASONING_QUESTION, limit),
            "chat_template_kwargs": _THINKING_SWITCHES,
        }
    response_schema = {"name": "answer", "schema": ANSWER, "strict": True}
    result["json_schema"] = {
        **_question_body(_SCHEMA_QUESTION, limit),
        "response_format": {"type": "json_schema", "json_schema": response_schema},
    }
    return result


def _question_body(text: str, limit: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": limit, "temperature": 0}


def abilities_by_plan(plan: Plan) -> Abilities:
    """Abilities that need no request, because the plan decides them."""
    if plan.model.task != "generate":
        return Abilities.uniform(
            Ability(state="not proven", evidence="the model does not generate")
        )
    if plan.model.has_chat is False:
        return Abilities.uniform(
            Ability(state="not proven", evidence="the model has no chat template")
        )
    untested_abilities = dict.fromkeys(questions(plan), Ability(evidence=_NO_ANSWER))
    tools = Ability(state="not proven", evidence=plan.tool_parser.reason)
    reasoning = Ability(state="not proven", evidence=plan.reasoning_parser.reason)
    return Abilities.model_validate(
        {"tools": tools, "required_tools": tools, "reasoning": reasoning, **untested_abilities}
    )


def judge(name: str, parsed: ParsedAnswer) -> Ability:
    """The verdict on one ability."""
    if name in ("tools", "required_tools"):
        problem = _call(parsed)
        proof = f"it called {TOOL} with arguments that fit"
    elif name == "reasoning":
        problem = (
            ""
            if parsed.thoughts.strip()
            else f"its answer comes without thoughts apart: {_conversation_begin(parsed.content)}"
        )
        problem = problem or ("" if parsed.content.strip() else "its thoughts came, and no answer")
        proof = f"{len(parsed.thoughts)} characters of thoughts came apart from the answer"
    else:
        problem = (
            ""
            if fits(parsed.content, ANSWER)
            else f"its answer does not fit the schema: {_conversation_begin(parsed.content)}"
        )
        proof = "its answer fits the schema"
    if not problem:
        return Ability(state="proven", evidence=proof)
    if not parsed.is_complete:
        return Ability(
            evidence=f"{problem}; the answer was cut off at the most tokens that are waited for"
        )
    return Ability(state="not proven", evidence=problem)


def _call(parsed: ParsedAnswer) -> str:
    """The fault of a tool call; "": none."""
    if not parsed.calls:
        return f"it called no tool, and said: {_conversation_begin(parsed.content)}"
    name, arguments = parsed.calls[0]
    if name != TOOL:
        return f"it called {_conversation_begin(name)}, which was not offered"
    return (
        ""
        if fits(arguments, ARGUMENTS)
        else f"the arguments of its call do not fit: {_conversation_begin(arguments)}"
    )


def fits(text: str, schema: dict[str, Any]) -> bool:
    """Whether the text is JSON that fits one of the two schemas here: an object whose properties
    are words of a list, or booleans."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    properties = schema["properties"]
    if not isinstance(value, dict) or value.keys() != properties.keys():
        return False
    return all(
        argument in properties[key].get("enum", (True, False))
        and _has_type(argument, properties[key])
        for key, argument in value.items()
    )


def _has_type(value: object, schema: dict[str, Any]) -> bool:
    return isinstance(value, bool if schema["type"] == "boolean" else str)


def _conversation_begin(text: str) -> str:
    return (
        repr(text[:_MAX_WORDS] + ("..." if len(text) > _MAX_WORDS else ""))
        if text.strip()
        else "nothing"
    )


def earlier(attempt: Attempt, history: Iterable[Attempt], since_at: float) -> Abilities | None:
    """Verdicts of earlier attempts since `since_at`; None: no verdict.

    An attempt with the same plan has the same verdicts. An engine that ended during these requests
    is not tested again, whatever its plan.
    """
    for item in reversed(
        [past for past in history if past.started_at > since_at and past.abilities is not None]
    ):
        # A gateway that ended before the answers asks again.
        is_of_plan = item.fingerprint == attempt.fingerprint
        if item.ready_at is not None and is_of_plan and not _is_open(item):
            return item.abilities
        if was_ended_by_asking(item) and item.plan.engine == attempt.plan.engine:
            reason = f"attempt {item.id} ended when it was asked"
            return Abilities.uniform(Ability(state="not proven", evidence=reason))
    return None


def test_failure() -> Failure:
    """The failure of an engine that answers nothing more after a question."""
    return Failure(
        kind="verification_failed",
        phase="verifying",
        message=(
            "The engine ended or stopped answering while it was tested for tool calls, thoughts and"
            " answers by a schema."
        ),
        advice="The engine starts again without these tests, and serves without these abilities.",
        proven_subject="nothing",
    )


def was_ended_by_asking(attempt: Attempt) -> bool:
    """Whether the engine ended before the questions that only apps need."""
    if not _is_open(attempt) or attempt.state == "stopped":
        return False
    if attempt.ready_at is None:
        return True
    return (
        attempt.ended_at is not None and attempt.ended_at - attempt.ready_at <= ABILITIES_TIMEOUT_S
    )


def _is_open(attempt: Attempt) -> bool:
    """Whether the engine was asked, and its answers are not known."""
    return attempt.abilities is not None and any(
        item.evidence == _NO_ANSWER for _, item in attempt.abilities
    )
