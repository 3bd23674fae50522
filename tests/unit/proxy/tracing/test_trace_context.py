"""The trace context of a request: a valid parent is followed, anything else begins a trace."""

from __future__ import annotations

import pytest

from gateway.proxy.tracing.trace_context import TraceContext, trace_context

RANDOM = bytes(range(1, 25))
TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = b"00f067aa0ba902b7"


def context(parent: bytes | None, state: bytes | None = None, ratio: float = 1.0) -> TraceContext:
    headers = {b"traceparent": parent, b"tracestate": state}
    return trace_context(
        {name: value for name, value in headers.items() if value is not None}, RANDOM, ratio
    )


@pytest.mark.parametrize("suffix", [b"00-%b-%b-01", b"cc-%b-%b-01", b"cc-%b-%b-01-more"])
def test_a_valid_parent_is_followed(suffix: bytes) -> None:
    followed = context(suffix % (TRACE, PARENT), b"vendor=1,other=2", ratio=0)
    assert followed.trace_id.hex().encode() == TRACE
    assert followed.parent_id.hex().encode() == PARENT
    assert followed.span_id == RANDOM[16:]
    assert followed.is_sampled
    assert followed.lines() == (
        b"traceparent: 00-%b-%b-01\r\ntracestate: vendor=1,other=2\r\n"
        % (TRACE, RANDOM[16:].hex().encode())
    )


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        b"00-%b-%b" % (TRACE, PARENT),
        b"00-%b-%b-01-more" % (TRACE, PARENT),
        b"00-%b-%b-1" % (TRACE, PARENT),
        b"ff-%b-%b-01" % (TRACE, PARENT),
        b"00-%b-%b-01" % (b"0" * 32, PARENT),
        b"00-%b-%b-01" % (TRACE, b"0" * 16),
        b"00-%b-%b-01" % (TRACE.upper(), PARENT),
        b"00-%b-%b-01, 00-%b-%b-01" % (TRACE, PARENT, TRACE, PARENT),
        b"00-%b-%b-01\r\nx: y" % (TRACE, PARENT),
        b"\xff" * 600,
    ],
    ids=repr,
)
def test_any_other_parent_begins_a_trace_without_its_state(parent: bytes) -> None:
    root = context(parent, b"vendor=1")
    assert root == TraceContext(RANDOM[:16], RANDOM[16:], b"", b"", True)
    assert b"tracestate" not in root.lines()


@pytest.mark.parametrize(("flags", "sampled"), [(b"00", False), (b"01", True), (b"03", True)])
def test_the_parent_decides_whether_its_child_is_sampled(flags: bytes, sampled: bool) -> None:
    followed = context(b"00-%b-%b-%b" % (TRACE, PARENT, flags), ratio=1.0)
    assert followed.is_sampled is sampled
    assert followed.lines().startswith(b"traceparent: 00-%b-" % TRACE)
    assert followed.lines().endswith(b"-01\r\n" if sampled else b"-00\r\n")


@pytest.mark.parametrize("state", [b"x" * 513, b"a=\x01", b"a=\xe9"])
def test_a_state_that_no_header_should_hold_is_dropped(state: bytes) -> None:
    assert context(b"00-%b-%b-01" % (TRACE, PARENT), state).state == b""


@pytest.mark.parametrize(
    ("last_bytes", "ratio", "sampled"),
    [
        (b"\x00" * 8, 0.0, False),
        (b"\xff" * 8, 1.0, True),
        (b"\x7f" + b"\xff" * 7, 0.5, True),
        (b"\x80" + b"\x00" * 7, 0.5, False),
    ],
)
def test_the_ratio_decides_by_the_last_bytes_of_a_trace(
    last_bytes: bytes, ratio: float, sampled: bool
) -> None:
    root = trace_context({}, b"\x01" * 8 + last_bytes + b"\x02" * 8, ratio)
    assert root.is_sampled is sampled
