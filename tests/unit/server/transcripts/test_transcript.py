"""Transcripts of copies: texts, figures, bounds and notes."""

from __future__ import annotations

import json
from typing import Any

from gateway.proxy.transcripts.exchange_copy import ExchangeCopy
from gateway.server.transcripts.redaction import MARK, Redactor
from gateway.server.transcripts.transcript import build_transcript
from tests.support.transcripts import exchange_copy

NO_RULES = Redactor("")


def transcript_of(copy: ExchangeCopy, rules: str = "") -> dict[str, Any]:
    return build_transcript(copy, Redactor(rules))


def test_a_transcript_has_request_answer_and_figures() -> None:
    fields = build_transcript(exchange_copy(), NO_RULES)
    assert fields["request"]["messages"][0]["content"] == "hi"
    assert fields["answer"] == "Hello"
    assert fields["notes"] == []
    figures = ("prompt_tokens", "completion_tokens", "first_byte_s", "duration_s", "status")
    assert [fields[name] for name in figures] == [3, 2, 0.3, 0.5, 200]


def test_no_match_of_a_rule_is_left_in_the_stored_bytes() -> None:
    fields = transcript_of(exchange_copy(), "Hel+o|^hi$")
    stored_text = json.dumps(fields)
    assert "Hello" not in stored_text
    assert fields["request"]["messages"][0]["content"] == fields["answer"] == MARK


def test_a_text_that_no_rule_clears_in_time_is_left_out() -> None:
    body = json.dumps({"model": "m", "prompt": "a" * 64 + "b"}).encode()
    fields = transcript_of(exchange_copy(request=body), "(a+)+$")
    assert (fields["request"], fields["answer"]) == (None, "")
    assert "redaction took over" in fields["notes"][0]
    assert fields["status"] == 200


def test_media_leave_a_note() -> None:
    body = json.dumps({"model": "m", "input": "A" * 4096}).encode()
    fields = transcript_of(exchange_copy(request=body))
    assert fields["request"]["input"] == "[base64: 3,072 bytes]"
    assert fields["notes"] == ["media of the request are replaced by their sizes"]


def test_an_absent_request_says_why() -> None:
    form = transcript_of(exchange_copy(request=b"", request_bytes=70_000))
    assert form["request"] is None
    assert "a form with a file" in form["notes"][0]
    large = transcript_of(exchange_copy(request=b"", request_bytes=9 * 1024 * 1024))
    assert "over 8,388,608 bytes" in large["notes"][0]


def test_a_request_that_is_no_json_is_kept_as_redacted_text() -> None:
    fields = transcript_of(exchange_copy(request=b'{"model": secret'), "secret")
    assert fields["request"] == f'{{"model": {MARK}'


def test_texts_beyond_the_bound_are_cut_with_a_note() -> None:
    fields = transcript_of(exchange_copy(answer=b"word " * 300_000))
    assert len(fields["answer"]) == 1024 * 1024
    assert "1,500,000 characters" in fields["notes"][0]
    body = json.dumps({"prompt": "word " * 300_000}).encode()
    assert transcript_of(exchange_copy(request=body))["request"] is None


def test_a_value_nested_too_deeply_is_kept_as_text() -> None:
    body = b"[" * 100_000
    fields = transcript_of(exchange_copy(request=body))
    assert fields["request"] == body.decode()
