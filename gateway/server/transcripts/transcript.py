"""The transcript of a request as it is stored: without media, redacted, and bounded."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.proxy.transcripts.exchange_copy import MAX_REQUEST_BYTES, ExchangeCopy
from gateway.server.transcripts.answer_text import answer_body, answer_text
from gateway.server.transcripts.media_sizes import drop_media
from gateway.server.transcripts.redaction import LIMIT_S, RedactionTimeoutError, Redactor

# Bytes of a request and characters of an answer that are stored.
_MAX_STORED_BYTES = 1024 * 1024


def build_transcript(copy: ExchangeCopy, redactor: Redactor) -> dict[str, Any]:
    """The fields of the transcript. A text that the rules cannot clear in time is left out."""
    notes: list[str] = []
    contents = {
        "request": _request(copy, notes),
        "answer": answer_text(answer_body(copy), is_stream=copy.is_stream),
    }
    if copy.is_cut:
        notes.append("the end of the answer is absent: it was too long")
    try:
        contents = redactor.redact(contents)
    except (RedactionTimeoutError, RecursionError):
        contents = {"request": None, "answer": ""}
        notes.append(f"request and answer are absent: redaction took over {LIMIT_S:g} s")
    return {
        "request_id": copy.id,
        "at": copy.started_at,
        "key": copy.key,
        "model": copy.model,
        "replica": copy.replica,
        "path": copy.path,
        "status": copy.status,
        "outcome": copy.outcome,
        "error": copy.error,
        "is_stream": copy.is_stream,
        "prompt_tokens": copy.prompt_tokens,
        "completion_tokens": copy.completion_tokens,
        "cached_tokens": copy.cached_tokens,
        "queued_s": copy.queued_s,
        "routed_s": copy.routed_s,
        "first_byte_s": copy.first_byte_s,
        "duration_s": copy.duration_s,
        "request_bytes": copy.request_bytes,
        "answer_bytes": copy.answer_bytes,
        "request": _bounded_request(contents["request"], notes),
        "answer": _bounded_answer(contents["answer"], notes),
        "notes": notes,
    }


def _request(copy: ExchangeCopy, notes: list[str]) -> Any:
    """The request as a value of JSON, or as text; None: it was not copied."""
    if not copy.request:
        if copy.request_bytes > MAX_REQUEST_BYTES:
            notes.append(f"the request is absent: it has over {MAX_REQUEST_BYTES:,} bytes")
        elif copy.request_bytes:
            notes.append("the request is absent: it is a form with a file")
        return None
    try:
        value = msgspec.json.decode(copy.request)
        short_value = drop_media(value)
    except DECODE_ERRORS:
        return copy.request.decode(errors="replace")
    if short_value != value:
        notes.append("media of the request are replaced by their sizes")
    return short_value


def _bounded_request(request: Any, notes: list[str]) -> Any:
    size = len(msgspec.json.encode(request))
    if size <= _MAX_STORED_BYTES:
        return request
    notes.append(f"the request is absent: {size:,} bytes are too many to keep")
    return None


def _bounded_answer(answer: str, notes: list[str]) -> str:
    if len(answer) > _MAX_STORED_BYTES:
        notes.append(f"the answer is cut: it has {len(answer):,} characters")
    return answer[:_MAX_STORED_BYTES]
