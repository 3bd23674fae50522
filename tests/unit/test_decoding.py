"""Bytes of engines and clients that are not JSON in one of three ways: every reader takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from gateway.errors import FitserveError
from gateway.proxy.api.endpoints import Endpoint, find
from gateway.proxy.api.engine_errors import engine_error
from gateway.proxy.api.stream_end import stream_end
from gateway.proxy.api.usage_block import structured_usage
from gateway.proxy.bodies.thoughts import rename_for_engine
from gateway.proxy.client_answer import BufferedAnswer
from gateway.proxy.meter import answer_usage
from tests.support.paths import ROOT

_DEPTH = 100_000
_BLOCK = b'"usage":{"prompt_tokens":1,"completion_tokens":2}'
UNREADABLE = {
    "no UTF-8 in a key": b'{"error":1,"reasoning":1,%b,"a\xd3":1}' % _BLOCK,
    "no UTF-8 in a block": b'{"error":1,"usage":{"a\xd3":1,"prompt_tokens":"\\udfff"}}',
    "half a character": b'{"error":1,"reasoning":"\\ud800",%b}' % _BLOCK,
    "deep": b'{"error":%b,%b,"b":%b}' % (b"[" * _DEPTH, _BLOCK, b"[" * _DEPTH),
    "deep objects": b'{"error":1,%b,"b":%b' % (_BLOCK, b'{"a":' * _DEPTH),
    "a number without end": b'{"error":%b,%b}' % (b"9" * 5000, _BLOCK),
    "cut": b'{"error":1,"usage":',
    "nothing": b"",
}


CHAT, MESSAGES = (find(path, b"", "POST") for path in ("/v1/chat/completions", "/v1/messages"))


def _event_reader(endpoint: Endpoint) -> Callable[[bytes], object]:
    def read(data: bytes) -> bytes:
        answer = BufferedAnswer()
        answer.write(data)
        return answer.event(endpoint, 500)

    return read


READERS: dict[str, Callable[[bytes], object]] = {
    "usage": lambda data: answer_usage((data,)),
    "usage of events": lambda data: answer_usage((b"data: ", data, b"\n\ndata: [DONE]\n\n")),
    "structured usage": structured_usage,
    "end of a stream": lambda data: stream_end("chat", [b"data: %b\n\n" % data], 4096, len(data)),
    "error": lambda data: engine_error(500, data, CHAT),
    "error for Anthropic's API": lambda data: engine_error(500, data, MESSAGES),
    "error as an event": _event_reader(CHAT),
    "error as an event of Anthropic's": _event_reader(MESSAGES),
    "thoughts": lambda data: rename_for_engine(b'{"messages":[{"reasoning_content":%b}]}' % data),
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_each_reader_raises_only_fitserve_errors(
    read: Callable[[bytes], object], data: bytes
) -> None:
    with contextlib.suppress(FitserveError):
        read(data)


def test_errors_of_reading_json_are_named_in_one_place() -> None:
    """A list of them by hand forgets one: an answer that was not UTF-8 had no end."""
    paths = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "gateway").rglob("*.py"))
        if any(name in path.read_text() for name in ("msgspec.DecodeError", "msgspec.MsgspecError"))
    ]
    assert paths == ["gateway/decoding.py"]
