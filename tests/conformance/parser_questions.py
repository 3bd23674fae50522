"""The parsers of vLLM that read back the tool calls of published models: asked of the parsers
themselves.

A question is how a model writes one call (tests/conformance/dialects.json); an answer is the names
of all parsers that find that call in it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

from tests.conformance.dialects import ARGUMENTS, ASKED, NAME, TOOLS, kept_dialects

CAPABILITIES = ("9.0",)


class Vocabulary(dict[str, int]):
    """Of a tokenizer that has every token."""

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> int:
        return self.setdefault(key, 1_000_000 + len(self))


class Tokenizer:
    """Every character is a token, and every name too."""

    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.vocabulary = Vocabulary()

    def get_vocab(self) -> Vocabulary:
        return self.vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(token) for token in tokens)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.vocabulary[token]


def questions(version: str) -> Iterator[tuple[str, str]]:
    """(model, how it writes the call)."""
    del version
    return (
        (dialect.name, dialect.calls) for dialect in kept_dialects() if dialect.calls is not None
    )


def answers(version: str) -> list[list[str]]:
    manager = importlib.import_module("vllm.tool_parsers").ToolParserManager
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    request = protocol.ChatCompletionRequest(
        model="m", messages=ASKED, tools=TOOLS, tool_choice="auto"
    )
    names = sorted({*manager.lazy_parsers, *manager.tool_parsers})
    counts = {dialect.name: dialect.times for dialect in kept_dialects()}
    return [
        [name for name in names if reads(manager, name, answer_text, request, counts[model])]
        for model, answer_text in questions(version)
    ]


def reads(manager: Any, name: str, text: str, request: Any, count: int) -> bool:
    """Whether the parser finds each call, with its arguments in their types."""
    try:
        tool_parser = manager.get_tool_parser(name)
        try:
            parser = tool_parser(Tokenizer(), request.tools)
        except TypeError:  # before parsers were told of the tools
            parser = tool_parser(Tokenizer())
        tool_calls = parser.extract_tool_calls(text, request=request)
        read = [
            (call.function.name, json.loads(call.function.arguments))
            for call in tool_calls.tool_calls
        ]
        return bool(tool_calls.tools_called) and read == [(NAME, ARGUMENTS)] * count
    except Exception:  # a parser that cannot be made, or breaks on the text, does not read it
        return False
