"""The end of an event stream, judged by its last bytes.

    endpoint                                      the end of a complete stream
    chat, completions, transcriptions, ...        [DONE], or a finish_reason of each choice
    responses                                     response.completed, .incomplete, .cancelled
    messages                                      message_stop

Engines send an error event and then end the stream as a complete one: vLLM 0.33.0
(`_convert_generation_error_to_streaming_response` in entrypoints/generate/base/serving.py), SGLang
0.5.23 (`create_streaming_error_response` in entrypoints/openai/serving_base.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.decoding import DECODE_ERRORS

# Text of models cannot match: JSON escapes its quotes and line ends.
_REASON = rb'"finish_reason"\s*:\s*"'
_END_EVENT = rb"(?:^|[\r\n])data:\s*\[DONE\]"
_TYPES = rb'(?:(?:^|[\r\n])event:\s*|"type"\s*:\s*")(?:%b)\b'
_CHOICE_END = re.compile(_REASON)
_DONE_EVENT = re.compile(_END_EVENT)
# Endpoints with several choices, whose events are read where the marker is missing.
_CHOICE_ENDPOINTS = frozenset({"chat", "completions"})
_ENDS = {
    "chat": _DONE_EVENT,
    "completions": _DONE_EVENT,
    "transcriptions": re.compile(
        _REASON + rb'|"type"\s*:\s*"transcript\.text\.done"|' + _END_EVENT
    ),
    "translations": re.compile(_REASON + b"|" + _END_EVENT),
    "responses": re.compile(
        _TYPES % rb"response\.(?:completed|incomplete|cancelled|failed)" + b"|" + _END_EVENT
    ),
    "messages": re.compile(_TYPES % b"message_stop"),
}
_EVENT_END = re.compile(rb"\r?\n\r?\n|\r\r")
_DATA = re.compile(rb"^data: ?(.*)$", re.MULTILINE)
_REFUSAL = re.compile(r"invalid_|BadRequest|not_found", re.IGNORECASE)
_SERVER_ERROR = 500
_BAD_REQUEST = 400


class StreamEnd(NamedTuple):
    """How a stream ended. `error`: the status in its error event; 0 without one."""

    is_complete: bool
    error: int = 0


_COMPLETE = StreamEnd(is_complete=True)


def stream_end(
    endpoint: str, pieces: Sequence[bytes], piece_bytes: int, sent_bytes: int, choices: int = 1
) -> StreamEnd:
    """The end of a stream of `sent_bytes` bytes.

    `pieces`: its last pieces in order; of a piece with `piece_bytes` the beginning may be missing.
    `choices`: the number that the client asked for. A stream whose last event is not whole in
    there counts as complete.
    """
    pattern = _ENDS.get(endpoint)
    if pattern is None:
        return _COMPLETE
    tail = b"".join(pieces)
    if b'"error"' in tail and (error := _error(tail)):
        return StreamEnd(is_complete=True, error=error)
    if (
        tail.endswith(b"data: [DONE]\n\n")
        or pattern.search(tail)
        or (endpoint in _CHOICE_ENDPOINTS and _is_complete(tail, sent_bytes, choices))
        or not _is_last_event_whole(pieces, piece_bytes, sent_bytes)
    ):
        return _COMPLETE
    return StreamEnd(is_complete=False)


def _is_last_event_whole(pieces: Sequence[bytes], piece_bytes: int, sent_bytes: int) -> bool:
    joined_pieces = b""
    for piece in reversed(pieces):
        joined_pieces = piece + joined_pieces
        if len(piece) >= piece_bytes:
            break
    return (
        len(joined_pieces) >= sent_bytes
        or _EVENT_END.search(joined_pieces.rstrip(b"\r\n")) is not None
    )


def _is_complete(tail: bytes, sent_bytes: int, choices: int) -> bool:
    """Whether each choice with an event in the tail has a finish_reason. A choice without one
    ended before the tail, unless the tail is the whole stream."""
    ends: dict[int, bool] = {}
    for event in _EVENT_END.split(tail):
        data = _data(event)
        entries = data.get("choices") if isinstance(data, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                index = entry.get("index", 0)
                index = index if isinstance(index, int) else 0
                reason = entry.get("finish_reason")
                ends[index] = ends.get(index, False) or (isinstance(reason, str) and reason != "")
    if not ends:
        return bool(_CHOICE_END.search(tail))  # of an event whose beginning is missing
    return all(ends.values()) and (len(tail) < sent_bytes or len(ends) >= choices)


def _data(event: bytes) -> object:
    """The JSON of an event; None where it is not whole."""
    try:
        data: object = msgspec.json.decode(b"\n".join(_DATA.findall(event)))
    except DECODE_ERRORS:
        return None
    return data


def _error(text: bytes) -> int:
    """The status of the last error event; 0 without one."""
    for event in reversed(_EVENT_END.split(text)):
        if b'"error"' not in event:
            continue
        data = _data(event)
        if isinstance(data, dict) and (error := _error_of(data)):
            return _status(error)
    return 0


def _error_of(event: dict[str, Any]) -> object:
    """The error of an event: vLLM's and SGLang's `error`, OpenAI's and Anthropic's types."""
    if event.get("type") == "response.failed":
        response = event.get("response")
        return (response.get("error") if isinstance(response, dict) else None) or True
    error = event.get("error")
    if error or event.get("type") == "error" or event.get("object") == "error":
        return error if isinstance(error, dict) else event
    return None


def _status(error: object) -> int:
    """400 to 499 where the error is a refusal of the request, else 500."""
    if not isinstance(error, dict):
        return _SERVER_ERROR
    code = error.get("code")
    if isinstance(code, int):
        return code if _BAD_REQUEST <= code < 600 else _SERVER_ERROR
    text = f"{code} {error.get('type')}"
    return _BAD_REQUEST if _REFUSAL.search(text) else _SERVER_ERROR
