"""Texts of answers: streams, whole answers and framings of each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.proxy.transcripts.exchange_copy import ExchangeCopy
from gateway.server.transcripts.answer_text import answer_body, answer_text
from tests.support.transcripts import exchange_copy


def events(*values: Any) -> bytes:
    blocks = [f"data: {json.dumps(value)}\n\n" for value in values]
    return "".join([": waiting\n\n", *blocks, "data: [DONE]\n\n"]).encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def copy_of(answer: bytes, **fields: Any) -> ExchangeCopy:
    return exchange_copy(answer=answer, **fields)


def test_pieces_of_a_chat_are_joined_by_their_kind() -> None:
    body = events(
        delta(role="assistant", reasoning_content="so"),
        delta(reasoning_content=" far"),
        delta(content="Hel"),
        delta(content="lo"),
        {"choices": [], "usage": {"prompt_tokens": 1}},
    )
    assert answer_text(body, is_stream=True) == "[thoughts] so far\nHello"


def test_pieces_of_a_tool_call_are_joined() -> None:
    call = {"index": 0, "function": {"name": "look", "arguments": ""}}
    body = events(
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
    )
    assert answer_text(body, is_stream=True) == '[tool call 0] look {"a":1}'


@pytest.mark.parametrize(
    "values",
    [
        [{"choices": [{"index": 0, "text": "Hel"}]}, {"choices": [{"index": 0, "text": "lo"}]}],
        [
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hel"}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "lo"}},
        ],
        [
            {"type": "response.output_text.delta", "delta": "Hel"},
            {"type": "response.output_text.delta", "delta": "lo"},
        ],
    ],
)
def test_streams_of_each_api_have_their_text(values: list[Any]) -> None:
    assert answer_text(events(*values), is_stream=True) == "Hello"


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [{"index": 0, "message": {"content": "Hello"}}]},
        {"choices": [{"index": 0, "text": "Hello"}]},
        {"content": [{"type": "text", "text": "Hello"}]},
        {"output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}]},
        {"text": "Hello"},
    ],
)
def test_whole_answers_of_each_api_have_their_text(value: Any) -> None:
    assert answer_text(json.dumps(value).encode(), is_stream=False) == "Hello"


def test_an_answer_without_text_stays_json_without_vectors() -> None:
    body = json.dumps({"data": [{"embedding": [0.1] * 500}]}).encode()
    assert answer_text(body, is_stream=False) == '{"data":[{"embedding":"[500 numbers]"}]}'


def test_a_stream_that_was_cut_off_keeps_its_first_part() -> None:
    body = events(delta(content="Hello"))[:-14] + b'data: {"choices": [{"ind'
    assert answer_text(body, is_stream=True) == "Hello"


def test_an_error_is_the_text_of_its_answer() -> None:
    body = b'{"error": {"message": "too long", "code": "x"}}'
    assert answer_text(body, is_stream=False) == "[error] too long"


def test_bytes_that_are_no_json_are_text() -> None:
    assert answer_text(b"plain \xff", is_stream=False) == "plain \N{REPLACEMENT CHARACTER}"


def test_the_body_of_each_framing_is_read() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
    assert answer_body(copy_of(head + b"Hello", has_head=True)) == b"Hello"
    chunks = b"3\r\nHel\r\n2\r\nlo\r\n"
    chunked_head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert answer_body(copy_of(chunked_head + chunks, has_head=True)) == b"Hello"
    assert answer_body(copy_of(chunks, has_head=False, is_chunked=True)) == b"Hello"
    assert answer_body(copy_of(b"Hello", has_head=False)) == b"Hello"
    assert answer_body(copy_of(chunked_head + chunks + b"zz", has_head=True)) == b"Hello"
