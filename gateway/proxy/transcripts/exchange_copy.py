"""The copy of one request with its answer, as the data plane sends it to the keeper."""

from __future__ import annotations

import msgspec

# Bytes of a request's body, and of an answer, that are copied.
MAX_REQUEST_BYTES = 8 * 1024 * 1024
MAX_ANSWER_BYTES = 2 * 1024 * 1024
LENGTH_BYTES = 4
MAX_FRAME_BYTES = MAX_REQUEST_BYTES + MAX_ANSWER_BYTES + 64 * 1024


class ExchangeCopy(msgspec.Struct, frozen=True, array_like=True):
    """A request and its answer, without headers.

    id: the value of `x-request-id`.
    key: name of the key.
    endpoint: the endpoint's short name.
    started_at: Unix time.
    queued_s: how long it waited for a replica.
    routed_s, first_byte_s, duration_s: seconds since its start; None: not reached.
    status: status of the answer; 0: the client left before it.
    outcome: a value of `Outcome` in exchange.py.
    error: code of the gateway's own error, or "".
    request: its body; empty where it is larger than `MAX_REQUEST_BYTES`, or a form.
    request_bytes: size of its body.
    answer: bytes of HTTP for the client, from the head on where `has_head`.
    is_chunked: the framing of an answer whose head is absent.
    answer_bytes: size of the answer's body.
    is_cut: whether the answer has more bytes than were copied.
    """

    id: str
    key: str
    model: str
    replica: str
    endpoint: str
    path: str
    started_at: float
    queued_s: float
    routed_s: float | None
    first_byte_s: float | None
    duration_s: float
    status: int
    outcome: str
    error: str
    is_stream: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    request: bytes
    request_bytes: int
    answer: bytes
    has_head: bool
    is_chunked: bool
    answer_bytes: int
    is_cut: bool


_ENCODER = msgspec.msgpack.Encoder()
DECODER: msgspec.msgpack.Decoder[ExchangeCopy] = msgspec.msgpack.Decoder(ExchangeCopy)


def frame_copy(copy: ExchangeCopy) -> bytes:
    """The message of a copy, with its length first."""
    data = _ENCODER.encode(copy)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data
