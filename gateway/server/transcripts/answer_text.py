"""The text of an answer: its whole body, or the joined pieces of a stream. Pure.

Each API has its own names for the parts of an answer. A part that none of them has stays JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import httptools
import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.proxy.transcripts.exchange_copy import ExchangeCopy
from gateway.server.transcripts.media_sizes import drop_media

_CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_DATA = b"data:"
_LAST_EVENT = b"[DONE]"
_TEXT = "text"
# Names of parts with text that the model writes before its answer.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
Piece = tuple[str, str]
"""The kind of a piece, `text` or another, and its text."""


class _Body:
    """The body of an answer, read by a parser of HTTP."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        self.pieces.append(data)


def answer_body(copy: ExchangeCopy) -> bytes:
    """The bytes of the answer's body, as far as they were copied."""
    if not copy.has_head and not copy.is_chunked:
        return copy.answer
    body = _Body()
    try:
        parser = httptools.HttpResponseParser(body)
        parser.feed_data(copy.answer if copy.has_head else _CHUNKED_HEAD + copy.answer)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        pass  # an answer that was cut off: its first part counts
    return b"".join(body.pieces)


def answer_text(body: bytes, *, is_stream: bool) -> str:
    """The text that the model wrote; the JSON of an answer without any."""
    if is_stream:
        events = list(_events(body))
        return _join(piece for event in events for piece in _stream_pieces(event)) or _dump(events)
    try:
        value = msgspec.json.decode(body)
    except DECODE_ERRORS:
        return body.decode(errors="replace")
    return _join(_whole_pieces(value)) or _dump(value)


def _dump(value: Any) -> str:
    return msgspec.json.encode(drop_media(value)).decode() if value else ""


def _events(body: bytes) -> Iterator[Any]:
    """The values of an event stream; an event that was cut off is left out."""
    for line in body.splitlines():
        data = line.removeprefix(_DATA).strip()
        if line.startswith(_DATA) and data != _LAST_EVENT:
            try:
                yield msgspec.json.decode(data)
            except DECODE_ERRORS:
                continue


def _join(pieces: Iterable[Piece]) -> str:
    """The pieces of each kind together, in the order of their first; kinds but text by name."""
    texts: dict[str, list[str]] = {}
    for kind, text in pieces:
        texts.setdefault(kind, []).append(text)
    return "\n".join(
        "".join(parts) if kind == _TEXT else f"[{kind}] {''.join(parts)}"
        for kind, parts in texts.items()
    )


def _stream_pieces(event: Any) -> Iterator[Piece]:
    """The pieces that one event has."""
    if not isinstance(event, dict):
        return
    yield from _error_pieces(event)
    for choice in _dicts(event.get("choices")):
        index = choice.get("index") or 0
        message = choice.get("delta") if isinstance(choice.get("delta"), dict) else choice
        for kind, text in _message_pieces(message):
            yield f"choice {index}: {kind}" if index else kind, text
    delta = event.get("delta")
    type_ = str(event.get("type"))
    if isinstance(delta, str):  # the Responses API
        kind = type_.removeprefix("response.").removesuffix(".delta")
        yield _TEXT if kind == "output_text" else kind.replace("_", " "), delta
    elif isinstance(delta, dict):  # Anthropic's API
        yield from _message_pieces(delta)
    block = event.get("content_block")
    if isinstance(block, dict) and block.get("type") == "tool_use":
        yield f"tool {block.get('name')}", ""


def _whole_pieces(value: Any) -> Iterator[Piece]:
    """The pieces of an answer without a stream."""
    if not isinstance(value, dict):
        return
    yield from _error_pieces(value)
    for choice in _dicts(value.get("choices")):
        index = choice.get("index") or 0
        message = choice.get("message") if isinstance(choice.get("message"), dict) else choice
        for kind, text in _message_pieces(message):
            yield f"choice {index}: {kind}" if index else kind, text
    for item in _dicts(value.get("output")):
        if item.get("type") == "function_call":
            yield f"tool {item.get('name')}", str(item.get("arguments", ""))
        for part in _dicts(item.get("content")):
            yield from _message_pieces(part)
    for part in _dicts(value.get("content")):
        if part.get("type") == "tool_use":
            yield f"tool {part.get('name')}", msgspec.json.encode(part.get("input")).decode()
        yield from _message_pieces(part)
    if isinstance(value.get("text"), str):  # transcriptions
        yield _TEXT, value["text"]


def _message_pieces(message: Any) -> Iterator[Piece]:
    """The pieces of a message, or of a part of it."""
    for name in _THOUGHTS:
        if isinstance(message.get(name), str) and message[name]:
            yield "thoughts", message[name]
            break
    for name in ("content", "text", "refusal"):
        if isinstance(message.get(name), str):
            yield _TEXT, message[name]
    if isinstance(message.get("partial_json"), str):
        yield "tool input", message["partial_json"]
    for number, call in enumerate(_dicts(message.get("tool_calls"))):
        function = call.get("function")
        if isinstance(function, dict):
            kind = f"tool call {call.get('index', number)}"
            if function.get("name"):
                yield kind, f"{function['name']} "
            yield kind, str(function.get("arguments") or "")


def _error_pieces(value: dict[str, Any]) -> Iterator[Piece]:
    error = value.get("error")
    if isinstance(error, dict):
        yield "error", str(error.get("message", error))


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))
