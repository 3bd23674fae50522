"""The record of one request for its span."""

from __future__ import annotations

from typing import NamedTuple


class RequestSpan(NamedTuple):
    """A request as its span shows it: no content, no address and no key.

    A worker sends it as a plain tuple. Times are nanoseconds of Unix time; 0: not reached.

    trace_id, span_id, parent_id: bytes of the trace context; `parent_id` is empty without a parent.
    trace_state: the client's `tracestate`.
    request_id: the value of `x-request-id`.
    key: name of the key.
    operation: the endpoint's short name.
    route: the endpoint's path.
    model: name of a known model, or "".
    started_ns, first_byte_ns, ended_ns: times of the request.
    queued_ns: how long it waited for a replica.
    attempts: time, replica and engine of each send to an engine.
    status: status of the answer; 0: the client left before it.
    outcome: a value of `Outcome` in exchange.py.
    error: code of the gateway's own error, or "".
    prompt_tokens, completion_tokens, cached_tokens: counts of the engine's report, or None.
    """

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    trace_state: str
    request_id: str
    key: str
    operation: str
    method: str
    route: str
    model: str
    started_ns: int
    first_byte_ns: int
    ended_ns: int
    queued_ns: int
    attempts: tuple[tuple[int, str, str], ...]
    status: int
    outcome: str
    error: str
    is_stream: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
