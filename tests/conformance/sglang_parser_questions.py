"""The parsers of SGLang that read back the tool calls and thoughts of published models. Questions
as in parser_questions.py.

An answer is the names of all parsers of tool calls that find the call in it, or of all parsers of
thoughts that tell thought and answer apart.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.conformance.dialects import ANSWER, ARGUMENTS, NAME, THOUGHT, TOOLS, kept_dialects

ENGINE = "sglang"
CAPABILITIES = ("9.0",)


class Question(NamedTuple):
    """about: "calls" or "thinks"; said: how the model writes it."""

    model: str
    about: str
    said: str


def questions(version: str) -> Iterator[Question]:
    del version
    for dialect in kept_dialects():
        for about, texts in (("calls", dialect.calls), ("thinks", dialect.thinks)):
            if texts is not None:
                yield Question(dialect.name, about, texts)


def answers(version: str) -> list[list[str]]:
    protocol: Any = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    calls: Any = importlib.import_module(
        "sglang.srt.function_call.function_call_parser"
    ).FunctionCallParser
    try:
        thoughts: Any = importlib.import_module(
            "sglang.srt.parser.reasoning_parser"
        ).ReasoningParser
    except ImportError:
        thoughts = importlib.import_module("sglang.srt.reasoning_parser").ReasoningParser
    tools = [protocol.Tool(**tool) for tool in TOOLS]
    rows, counts = [], {dialect.name: dialect.times for dialect in kept_dialects()}
    for question in questions(version):
        if question.about == "calls":
            case = question.said, counts[question.model]
            rows.append(
                [
                    name
                    for name in sorted(calls.ToolCallParserEnum)
                    if _calls(calls, tools, name, *case)
                ]
            )
        else:
            rows.append(
                [
                    name
                    for name in sorted(thoughts.DetectorMap)
                    if _thinks(thoughts, name, question.said)
                ]
            )
    return rows


def _calls(parser: Any, tools: list[Any], name: str, text: str, count: int) -> bool:
    """Whether the parser finds each call, with its arguments in their types."""
    try:
        _, calls = parser(tools, name).parse_non_stream(text)
        return [(call.name, json.loads(call.parameters)) for call in calls] == [
            (NAME, ARGUMENTS)
        ] * count
    except Exception:  # a parser that cannot be made, or breaks on the text, does not read it
        return False


def _thinks(parser: Any, name: str, text: str) -> bool:
    """Whether the parser tells thought and answer apart; the end of a turn is not its affair. Where
    the prompt has begun the thought, the server tells the parser so by the template
    (managers/template_manager.py: force_reasoning)."""
    for has_begun in (False, True):
        try:
            thoughts, answer = parser(
                name, stream_reasoning=False, force_reasoning=has_begun
            ).parse_non_stream(text)
        except Exception:  # as above
            continue
        if (
            (thoughts or "").strip() == THOUGHT
            and ANSWER in (answer or "")
            and THOUGHT not in (answer or "")
        ):
            return True
    return False
