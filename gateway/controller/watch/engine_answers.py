"""The answers of engines, as far as proofs read them."""

from __future__ import annotations

from typing import Any

import msgspec


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    text: str
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct):
    """The part of a /v1/completions answer that is read."""

    choices: list[_Choice]


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    """The message of a chat answer.

    `reasoning` is the name in vLLM since 0.16 (entrypoints/openai/chat_completion/protocol.py);
    `reasoning_content` is older, and SGLang's.
    """

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class ChatCompletion(msgspec.Struct):
    choices: list[_ChatChoice]


class _Embedding(msgspec.Struct):
    embedding: list[float]


class EmbeddingAnswer(msgspec.Struct):
    data: list[_Embedding]


class _Score(msgspec.Struct):
    relevance_score: float


class RankingAnswer(msgspec.Struct):
    results: list[_Score]


class LabelAnswer(msgspec.Struct):
    data: list[Any]


class TranscriptionAnswer(msgspec.Struct):
    text: str


class SleepAnswer(msgspec.Struct):
    is_sleeping: bool
