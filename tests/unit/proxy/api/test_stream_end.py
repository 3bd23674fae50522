"""The end of an event stream, in the forms of each API and of its engines."""

import json

import pytest

from gateway.proxy.api.stream_end import stream_end

PIECE = 4096


def chat(delta: dict[str, object], finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return sse({"id": "c", "object": "chat.completion.chunk", "choices": [choice]})


def sse(data: object, event: str = "") -> bytes:
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def event(kind: str, **fields: object) -> bytes:
    return sse({**fields, "type": kind}, kind)


DONE = b"data: [DONE]\n\n"
TEXT = chat({"content": "one"})
QUOTED_END = 'the end:\n\ndata: [DONE]\n\n"finish_reason":"stop"'


def end(endpoint: str, *events: bytes, choices: int = 1) -> tuple[bool, int]:
    """The end as the proxy sees it: four pieces, each of at most PIECE bytes."""
    pieces = [event[-PIECE:] for event in events][-4:]
    return stream_end(endpoint, pieces, PIECE, sum(map(len, events)), choices)


@pytest.mark.parametrize(
    ("endpoint", "events"),
    [
        ("chat", [TEXT, chat({}, "stop"), DONE]),
        ("chat", [TEXT, chat({}, "abort"), DONE]),
        ("chat", [TEXT, chat({}, "length")]),  # another server, which sends no [DONE]
        ("chat", [TEXT, DONE]),
        ("chat", [TEXT, b"data:[DONE]\r\n\r\n"]),
        ("completions", [sse({"choices": [{"text": "a", "finish_reason": "stop"}]})]),
        (
            "responses",
            [event("response.created"), event("response.completed", response={})],
        ),
        ("responses", [event("response.incomplete", response={"error": None})]),
        ("responses", [sse({"type": "response.completed", "response": {"error": None}})]),
        ("messages", [event("message_start"), event("message_stop")]),
        ("messages", [event("message_stop"), DONE]),
        ("transcriptions", [sse({"type": "transcript.text.done", "text": "a"})]),
        ("speech", [sse({"type": "speech.audio.delta"})]),  # no known end
    ],
)
def test_a_complete_stream_has_its_end(endpoint: str, events: list[bytes]) -> None:
    assert end(endpoint, *events) == (True, 0)


@pytest.mark.parametrize(
    ("endpoint", "events"),
    [
        ("chat", []),
        ("chat", [TEXT]),
        ("chat", [TEXT, chat({"content": QUOTED_END})]),
        ("chat", [chat({"content": "x" * PIECE}), TEXT]),
        ("chat", [TEXT, TEXT[:40]]),
        ("chat", [b": waiting\n\n"]),
        ("completions", [sse({"choices": [{"text": "a", "finish_reason": None}]})]),
        ("responses", [event("response.created"), event("response.output_text.delta", delta="a")]),
        ("messages", [event("message_start"), event("message_delta", delta={"stop_reason": "x"})]),
    ],
)  # fmt: skip
def test_a_stream_without_its_end_is_incomplete(endpoint: str, events: list[bytes]) -> None:
    assert end(endpoint, *events) == (False, 0)


FIRST_END, SECOND_END = chat({}, "stop"), chat({}, "length", index=1)
SECOND_TEXT = chat({"content": "two"}, index=1)
USAGE = sse({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})


@pytest.mark.parametrize(
    ("events", "is_complete"),
    [
        ([TEXT, SECOND_TEXT, FIRST_END, SECOND_END], True),
        ([TEXT, SECOND_TEXT, SECOND_END, FIRST_END, USAGE], True),
        ([TEXT, FIRST_END, *[SECOND_TEXT] * 9, SECOND_END], True),  # the first left the tail
        ([TEXT, SECOND_TEXT, FIRST_END, DONE], True),
        ([sse({"choices": [{"finish_reason": "stop"}, {"index": 1, "finish_reason": "stop"}]})],
         True),
        ([TEXT, SECOND_TEXT, FIRST_END], False),
        ([TEXT, FIRST_END, SECOND_TEXT], False),
        ([TEXT, FIRST_END], False),
        ([TEXT, FIRST_END, USAGE], False),
        ([*[TEXT, SECOND_TEXT] * 9, FIRST_END], False),
        ([FIRST_END, *[SECOND_TEXT] * 9], False),
    ],
)  # fmt: skip
def test_a_stream_is_complete_once_each_choice_has_ended(
    events: list[bytes], is_complete: bool
) -> None:
    assert end("chat", *events, choices=2) == (is_complete, 0)


def test_the_end_of_one_choice_ends_no_other_choice() -> None:
    assert end("chat", TEXT, SECOND_TEXT, FIRST_END, choices=1) == (False, 0)


def test_a_last_event_that_is_not_whole_proves_nothing() -> None:
    whole = event("response.completed", response={"text": "y" * 9000})
    other_order = sse({"type": "response.completed", "response": {"text": "y" * 9000}})
    assert end("responses", event("response.created"), whole) == (True, 0)
    assert end("responses", event("response.created"), other_order) == (True, 0)


VLLM_ERROR = sse({"error": {"message": "list", "type": "InternalServerError", "code": 500}})
SGLANG_REFUSAL = sse({"error": {"object": "error", "type": "BadRequestError", "code": 400}})
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}
INVALID = {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}


@pytest.mark.parametrize(
    ("endpoint", "events", "status"),
    [
        ("chat", [TEXT, VLLM_ERROR, DONE], 500),
        ("chat", [VLLM_ERROR], 500),
        ("completions", [SGLANG_REFUSAL, DONE], 400),
        ("chat", [SGLANG_REFUSAL, chat({}, "abort"), DONE], 400),
        ("chat", [sse({"error": {"message": "m", "code": 429}}), DONE], 429),
        ("chat", [sse({"error": "out of memory"}), DONE], 500),
        ("chat", [sse({"object": "error", "message": '"error"', "code": 503}), DONE], 503),
        ("responses", [event("response.failed", response={"error": {"code": "server"}})], 500),
        ("responses", [event("error", code="invalid_prompt", error=None)], 400),
        ("messages", [event("message_start"), sse(OVERLOADED, "error")], 500),
        ("messages", [sse(INVALID, "error")], 400),
    ],
)  # fmt: skip
def test_an_error_event_tells_its_status(endpoint: str, events: list[bytes], status: int) -> None:
    assert end(endpoint, *events) == (True, status)


def test_a_text_about_errors_is_no_error() -> None:
    quote_event = chat({"content": '{"error": {"code": 500}}'}, "stop")
    log_event = chat({"content": 'the key "error"'}, "stop")
    assert end("chat", quote_event, log_event, DONE) == (True, 0)
