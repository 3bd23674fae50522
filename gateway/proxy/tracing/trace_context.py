"""W3C trace context: the parent that a client names, and the head lines for the engine. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.proxy.heads import PLAIN_VALUE

PARENT = b"traceparent"
STATE = b"tracestate"
# Source: W3C Trace Context, version 00, section 3.2.2. A later version may append fields.
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FIRST_VERSION = b"00"
_FORBIDDEN_VERSION = b"ff"
_SAMPLE_FLAG = 1
_TRACE_BYTES = 16
_RATIO_BYTES = 8


class TraceContext(NamedTuple):
    """The place of a request in a trace.

    trace_id: 16 bytes.
    span_id: 8 bytes of the span that belongs to this gateway.
    parent_id: 8 bytes of the client's span; empty: the trace begins here.
    state: the client's `tracestate`, which passes unchanged.
    is_sampled: the span is exported.
    """

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    state: bytes
    is_sampled: bool

    def lines(self) -> bytes:
        """The head lines for the engine, whose spans become children of this one."""
        parent = b"traceparent: 00-%b-%b-%02x\r\n" % (
            self.trace_id.hex().encode(), self.span_id.hex().encode(), self.is_sampled,
        )  # fmt: skip
        return parent + (b"tracestate: %b\r\n" % self.state if self.state else b"")


def trace_context(headers: dict[bytes, bytes], random: bytes, ratio: float) -> TraceContext:
    """The context of a request with these headers.

    random: 24 random bytes, for a trace and a span.
    ratio: the part of requests without a parent that is sampled. A parent decides for its
        children.
    """
    span_id = random[_TRACE_BYTES:]
    match = _PARENT.fullmatch(headers.get(PARENT, b"")[:_MAX_PARENT_BYTES])
    if match is None or not _is_valid(match):
        trace_id = random[:_TRACE_BYTES]
        # The same decision as that of TraceIdRatioBased, so parts of a trace agree.
        number = int.from_bytes(trace_id[_RATIO_BYTES:], "big")
        return TraceContext(trace_id, span_id, b"", b"", number < ratio * 2**64)
    state = headers.get(STATE, b"")
    return TraceContext(
        bytes.fromhex(match[2].decode()),
        span_id,
        bytes.fromhex(match[3].decode()),
        state if PLAIN_VALUE(state) else b"",
        bool(int(match[4], 16) & _SAMPLE_FLAG),
    )


# Bytes of a parent that are read. Version 00 has 55.
_MAX_PARENT_BYTES = 512


def _is_valid(match: re.Match[bytes]) -> bool:
    version, trace_id, parent_id, _, suffix = match.groups()
    return (
        version != _FORBIDDEN_VERSION
        and (suffix is None or version != _FIRST_VERSION)
        and trace_id.strip(b"0") != b""
        and parent_id.strip(b"0") != b""
    )
