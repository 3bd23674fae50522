"""Spans between the data plane, which never waits, and their exporter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gateway.proxy.tracing.request_span import RequestSpan

# Spans of some hundred bytes: at most about two megabytes.
MAX_SPANS = 4096


class SpanBuffer:
    """A bounded queue. A full one drops the newest spans and counts them.

    One thread adds, one thread drains.
    """

    def __init__(self, capacity: int = MAX_SPANS) -> None:
        self.dropped_count = 0
        self._capacity = capacity
        self._spans: deque[RequestSpan] = deque()

    def add(self, span: RequestSpan) -> None:
        if len(self._spans) < self._capacity:
            self._spans.append(span)
        else:
            self.dropped_count += 1

    def extend(self, spans: Iterable[tuple[object, ...]]) -> None:
        """Add spans of a worker, which arrive as plain tuples."""
        for span in spans:
            self.add(RequestSpan._make(span))

    def drain(self, count: int = MAX_SPANS) -> tuple[RequestSpan, ...]:
        """The oldest spans, at most `count`."""
        return tuple(self._spans.popleft() for _ in range(min(count, len(self._spans))))
