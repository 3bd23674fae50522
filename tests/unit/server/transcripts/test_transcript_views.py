"""Views of transcripts: fields, excerpts and locked ones."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.server.transcripts.redaction import Redactor
from gateway.server.transcripts.transcript import build_transcript
from gateway.server.transcripts.transcript_views import transcript_view
from tests.support.transcripts import exchange_copy


def test_a_view_has_every_stored_field() -> None:
    fields = build_transcript(exchange_copy(), Redactor(""))
    view = transcript_view("id", 1.0, fields)
    shown_fields = view.model_dump()
    assert {name: shown_fields[name] for name in fields if name != "notes"} == {
        name: value for name, value in fields.items() if name != "notes"
    }
    assert not view.is_locked
    assert view.excerpt == "hi"


def test_a_field_of_a_later_version_is_left_out() -> None:
    fields = build_transcript(exchange_copy(), Redactor(""))
    assert transcript_view("id", 1.0, {**fields, "later": 1}).answer == "Hello"


def test_a_locked_transcript_has_the_time_of_its_file() -> None:
    view = transcript_view("id", 5.0, None)
    assert (view.is_locked, view.at, view.request, view.answer) == (True, 5.0, None, "")


@pytest.mark.parametrize(
    ("request_body", "excerpt"),
    [
        ({"prompt": "a b"}, "a b"),
        ({"messages": [{"content": [{"type": "text", "text": "seen"}]}]}, "seen"),
        ({"input": ["one", "two"]}, "two"),
        ({"messages": 7}, ""),
        (None, ""),
        ({"prompt": "x" * 500}, "x" * 160),
    ],
)
def test_an_excerpt_is_the_begin_of_the_last_message(request_body: Any, excerpt: str) -> None:
    assert transcript_view("id", 1.0, {"request": request_body, "at": 2.0}).excerpt == excerpt
