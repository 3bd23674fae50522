"""Transcripts as the admin API shows them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gateway.domain import Value

_EXCERPT_CHARACTERS = 160


class TranscriptRow(Value):
    """A request without its texts. A locked one has only its id and the time of its file."""

    id: str
    at: float = Field(description="when the request began, in Unix seconds")
    is_locked: bool = Field(False, description="whether no key of the file can decrypt it")
    request_id: str = ""
    key: str = Field("", description="name of the key; empty: no key")
    model: str = ""
    replica: str = ""
    path: str = ""
    status: int = Field(0, description="status of the answer; 0: the client left before it")
    outcome: str = Field(
        "", description="answered, left (by the client), broken, cancelled, refused, unreachable"
    )
    error: str = Field("", description="code of the gateway's own error")
    is_stream: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    queued_s: float = Field(0.0, description="how long it waited for a replica")
    routed_s: float | None = Field(None, description="seconds until it went to an engine")
    first_byte_s: float | None = Field(None, description="seconds until the first token")
    duration_s: float = Field(0.0, description="seconds until its end")
    excerpt: str = Field("", description="the begin of the last message")


class TranscriptView(TranscriptRow):
    """A request with its texts, as they were written: redacted, and without media."""

    request_bytes: int = 0
    answer_bytes: int = 0
    request: Any = Field(None, description="the body; None: `notes` says why it is absent")
    answer: str = ""
    notes: tuple[str, ...] = ()


class TranscriptList(Value):
    data: tuple[TranscriptRow, ...]
    last_id: str | None = Field(
        description="value of `last_id` for older ones; None: no more exist"
    )


def transcript_view(id_: str, at: float, fields: dict[str, Any] | None) -> TranscriptView:
    """The view of stored fields; None: they are locked. at: the time of their file."""
    if fields is None:
        return TranscriptView(id=id_, at=at, is_locked=True)
    known_fields = {
        name: value for name, value in fields.items() if name in TranscriptView.model_fields
    }
    return TranscriptView.model_validate(
        {**known_fields, "id": id_, "excerpt": _excerpt(fields.get("request"))}
    )


def transcript_row(view: TranscriptView) -> TranscriptRow:
    return TranscriptRow.model_validate(
        {name: getattr(view, name) for name in TranscriptRow.model_fields}
    )


def _excerpt(request: Any) -> str:
    """The begin of the last message, prompt or input."""
    if not isinstance(request, dict):
        return ""
    content = request.get("messages") or request.get("input") or request.get("prompt") or ""
    while not isinstance(content, str):
        if isinstance(content, list) and content:
            content = content[-1]
        elif isinstance(content, dict):
            content = content.get("content") or content.get("text") or ""
        else:
            return ""
    return content[:_EXCERPT_CHARACTERS]
