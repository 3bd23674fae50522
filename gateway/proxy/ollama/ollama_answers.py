"""Answers of /v1 as answers of Ollama's API. Pure.

Fields: api/types.go of Ollama 0.12 (ChatResponse, GenerateResponse, EmbedResponse, Metrics).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gateway.errors import UpstreamError
from gateway.proxy.routing.model_route import ModelCard

_NANOSECONDS = 10**9
LOADED_STATES = ("ready", "degraded")
_COUNT_UNITS = {"B": 10**9, "M": 10**6, "K": 10**3}
# Clients take such a time ahead as no end.
_CENTURY_S = 100 * 365 * 86_400.0
# Most characters of the tool calls of an answer, which are kept until its end. Each call counts as
# at least this many.
CALLS_LENGTH = 4 * 1024 * 1024
_CALL_LENGTH = 256


class AnswerTimes(NamedTuple):
    """Unix seconds: of the request, of the first token (None: unknown), and of the end."""

    start_s: float
    first: float | None
    end_s: float


class ToolCall(NamedTuple):
    """The pieces of a tool call."""

    name: list[str]
    arguments: list[str]


class StreamedAnswer:
    """The answer to one request, from events of /v1 to lines of Ollama's API."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self.model = model
        self.is_chat = is_chat
        self._usage: Mapping[str, Any] = {}
        self._reason = "stop"
        self._calls: dict[int, ToolCall] = {}
        self._calls_length = 0

    def lines(self, event: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
        """The lines of one event. now: Unix seconds. Raises UpstreamError."""
        if "error" in event:
            return [{"error": error_text(event)}]
        self._usage = event.get("usage") or self._usage
        lines = []
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice.get("message") or {}
            self._reason = choice.get("finish_reason") or self._reason
            self._add_calls(delta.get("tool_calls") or ())
            # Ollama's API has no field for a refusal, so the client reads it as the answer.
            texts = (delta.get("content"), choice.get("text"), delta.get("refusal"))
            text = next((text for text in texts if text), "")
            thoughts = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or thoughts:
                lines.append(self._stream_line(text, thoughts, now))
        return lines

    def last_lines(self, times: AnswerTimes) -> list[dict[str, Any]]:
        """The tool calls, and the line that ends the answer with its figures."""
        lines = []
        if self._calls and self.is_chat:
            line = self._stream_line("", "", times.end_s)
            line["message"]["tool_calls"] = self._tool_calls()
            lines.append(line)
        return [*lines, self._stream_line("", "", times.end_s) | self._last_fields(times)]

    def whole(self, event: Mapping[str, Any], times: AnswerTimes) -> dict[str, Any]:
        """The answer of a request without a stream."""
        lines = self.lines(event, times.end_s)
        text = lines[0] if lines else self._stream_line("", "", times.end_s)
        if self._calls and self.is_chat:
            text["message"]["tool_calls"] = self._tool_calls()
        return text | self._last_fields(times)

    def load_end(self, times: AnswerTimes, reason: str = "load") -> dict[str, Any]:
        """The answer of a request that only loads or unloads the model."""
        end = {"done": True, "done_reason": reason}
        return self._stream_line("", "", times.end_s) | end

    def _stream_line(self, text: str, thoughts: str, now: float) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self.model, "created_at": time_text(now)}
        if not self.is_chat:
            thinking = {"thinking": thoughts} if thoughts else {}
            return {**line, "response": text, **thinking, "done": False}
        message = {"role": "assistant", "content": text}
        if thoughts:
            message["thinking"] = thoughts
        return {**line, "message": message, "done": False}

    def _last_fields(self, times: AnswerTimes) -> dict[str, Any]:
        """The last fields. Without a first token's time, all time counts as that of the answer, so
        a client's tokens per second are a lower bound."""
        usage = self._usage
        first = times.start_s if times.first is None else times.first
        prompt_time = {"prompt_eval_duration": _nanoseconds(first - times.start_s)}
        return {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": _nanoseconds(times.end_s - times.start_s),
            "load_duration": 0,
            "prompt_eval_count": usage.get("prompt_tokens") or 0,
            **(prompt_time if times.first is not None else {}),
            "eval_count": usage.get("completion_tokens") or 0,
            "eval_duration": max(1, _nanoseconds(times.end_s - first)),
        }

    def _add_calls(self, calls: Iterable[Mapping[str, Any]]) -> None:
        for position, piece in enumerate(calls):
            index = piece.get("index", position)
            call_count = len(self._calls)
            call = self._calls.setdefault(index, ToolCall([], []))
            self._calls_length += _CALL_LENGTH * (len(self._calls) - call_count)
            function = piece.get("function") or {}
            for pieces, text in (
                (call.name, function.get("name") or ""),
                (call.arguments, function.get("arguments") or ""),
            ):
                if text:
                    pieces.append(text)
                    self._calls_length += len(text)
            if self._calls_length > CALLS_LENGTH:
                raise UpstreamError(
                    f"The tool calls of the engine's answer are over {CALLS_LENGTH:,} characters.",
                    hint="Ask for fewer, or use /v1, which has no bound.",
                )

    def _tool_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "function": {
                    "name": "".join(call.name),
                    "arguments": _arguments("".join(call.arguments)),
                }
            }
            for _, call in sorted(self._calls.items())
        ]


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; any other text becomes its only field."""
    try:
        arguments = json.loads(text or "{}", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return {"arguments": text}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _finite(text: str) -> float:
    """The number of a text such as 1e5 or NaN. Raises ValueError if JSON cannot write the float."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def embeddings(event: Mapping[str, Any], model: str, times: AnswerTimes) -> dict[str, Any]:
    """The answer of /api/embed."""
    return {
        "model": model,
        "embeddings": [row.get("embedding") for row in event.get("data") or ()],
        "total_duration": _nanoseconds(times.end_s - times.start_s),
        "load_duration": 0,
        "prompt_eval_count": (event.get("usage") or {}).get("prompt_tokens") or 0,
    }


def models(
    model_list: Mapping[str, Any],
    facts: Mapping[str, ModelCard],
    now: float,
    *,
    shows_loaded_only: bool,
) -> dict[str, Any]:
    """The answer of /api/tags, or of /api/ps.

    facts: the cards of models, by name.
    now: Unix seconds.
    """
    rows = []
    for card in model_list.get("data") or ():
        served_card = facts.get(card["id"], ModelCard())
        if not shows_loaded_only:
            rows.append(_model_fields(card, served_card) | {"size": served_card.weights_bytes or 0})
        elif card.get("state") in LOADED_STATES:
            rows.append(_model_fields(card, served_card) | _stay_fields(served_card, now))
    return {"models": rows}


def _model_fields(card: Mapping[str, Any], facts: ModelCard) -> dict[str, Any]:
    # Digests of weights are not shown to users of the API. Ollama's program shows twelve digits of
    # a digest and ends without them (cmd/cmd.go), so the digest is one of the name.
    return {
        "name": card["id"],
        "model": card["id"],
        "modified_at": time_text(card.get("created") or 0),
        "digest": hashlib.sha256(card["id"].encode("utf-8", "surrogatepass")).hexdigest(),
        "details": _details(facts),
        "context_length": card.get("max_model_len") or 0,
    }


def _stay_fields(facts: ModelCard, now: float) -> dict[str, Any]:
    """The fields of a loaded model. Ollama's program shows its processor by the two sizes, and a
    time in the past as `Stopping...` (ListRunningHandler in cmd/cmd.go)."""
    memory = facts.memory_bytes or 0
    stays_s = facts.keep_alive_s if facts.keep_alive_s >= 0 else _CENTURY_S
    return {
        "size": memory,
        "size_vram": memory if facts.is_on_gpu else 0,
        # The time is an estimate: the next request keeps the model for as long again.
        "expires_at": time_text(now + min(stays_s, _CENTURY_S)),
    }


def _details(facts: ModelCard) -> dict[str, Any]:
    """Unknown facts are empty texts, as in Ollama."""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _count_text(facts.parameters) if facts.parameters else "",
        "quantization_level": facts.quantization,
    }


def _count_text(count: int) -> str:
    """A number of parameters: `8.2B`, `494.0M`, as HumanNumber of Ollama's format/format.go."""
    for letter, size in _COUNT_UNITS.items():
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def model_card(card: Mapping[str, Any], facts: ModelCard) -> dict[str, Any]:
    """The answer of /api/show. A capability that is not proven is left out."""
    inputs = (card.get("modalities") or {}).get("input") or ()
    abilities = {
        "embedding": card.get("task") == "embed",
        "completion": card.get("task") in (None, "generate"),
        "tools": card.get("tools") == "proven",
        "vision": "image" in inputs,
        "thinking": card.get("reasoning") == "proven",
    }
    # Clients read the context at the key that begins with the architecture.
    family = facts.family or "fitserve"
    context = card.get("max_model_len")
    parameters = facts.parameters
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(facts),
        "model_info": {
            "general.architecture": family,
            **({"general.parameter_count": parameters} if parameters else {}),
            **({f"{family}.context_length": context} if context else {}),
        },
        "capabilities": [name for name, has_ability in abilities.items() if has_ability],
        "modified_at": time_text(card.get("created") or 0),
    }


def pull_lines() -> list[dict[str, Any]]:
    """The lines of /api/pull for a model that is here."""
    return [{"status": "pulling manifest"}, {"status": "success"}]


def error_text(answer: Any) -> str:
    """The message of an error of /v1."""
    error = answer.get("error") if isinstance(answer, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message or "The engine's answer could not be read.")


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    """Nanoseconds."""
    return max(0, round(seconds * _NANOSECONDS))
