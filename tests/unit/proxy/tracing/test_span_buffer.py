"""The queue of spans: bounded, and its losses are counted."""

from __future__ import annotations

import msgspec

from gateway.proxy.tracing.span_buffer import SpanBuffer
from tests.support.otlp_receiver import request_span


def test_a_full_queue_drops_the_newest_spans_and_counts_them() -> None:
    spans = SpanBuffer(capacity=2)
    for number in range(5):
        spans.add(request_span(request_id=str(number)))
    assert spans.dropped_count == 3
    assert [span.request_id for span in spans.drain()] == ["0", "1"]
    assert spans.drain() == ()
    spans.add(request_span(request_id="5"))
    assert [span.request_id for span in spans.drain()] == ["5"]
    assert spans.dropped_count == 3


def test_a_drain_takes_the_oldest_spans_first() -> None:
    spans = SpanBuffer()
    for number in range(3):
        spans.add(request_span(request_id=str(number)))
    assert [span.request_id for span in spans.drain(2)] == ["0", "1"]
    assert [span.request_id for span in spans.drain(2)] == ["2"]


def test_a_span_of_a_worker_arrives_unchanged() -> None:
    span = request_span(attempts=((5, "m-0", "vllm==0.33.0"),))
    message = msgspec.msgpack.encode([span])
    plain = msgspec.msgpack.decode(message, type=tuple[tuple[object, ...], ...])
    spans = SpanBuffer()
    spans.extend(plain)
    [arrived] = spans.drain()
    assert arrived._replace(attempts=()) == span._replace(attempts=())
    assert [tuple(attempt) for attempt in arrived.attempts] == [(5, "m-0", "vllm==0.33.0")]
