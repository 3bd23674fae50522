"""Metrics that also record a span of each request.

The data plane calls its meter anyway, so a gateway without traces pays nothing for them: it has
another meter. Spans leave through a `SpanBuffer`.

A request that is refused before it becomes an `Exchange`, as with a wrong key, has no span.
`fitserve_refusals_total` counts it. The list of models has none either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway.errors import FitserveError
from gateway.proxy.heads import RequestHead, request_lines
from gateway.proxy.meter import UNTOLD
from gateway.proxy.metrics.access_log import AccessLog
from gateway.proxy.metrics.counters import Metrics, Sample
from gateway.proxy.tracing.request_span import RequestSpan
from gateway.proxy.tracing.span_buffer import SpanBuffer
from gateway.proxy.tracing.trace_context import PARENT, STATE, TraceContext, trace_context

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

_NS = 1_000_000_000
_RANDOM_BYTES = 24
_OK = 2


class RequestTrace:
    """The trace of one request while it runs.

    attempts: time of the loop, replica and engine of each send to an engine.
    queued_s: how long the request waited for a replica.
    """

    __slots__ = ("attempts", "context", "queued_s")

    def __init__(self, context: TraceContext) -> None:
        self.context = context
        self.attempts: list[tuple[float, str, str]] = []
        self.queued_s = 0.0


class TracedMetrics(Metrics):
    """Metrics and spans. `ratio`: the part of requests without a parent that is traced."""

    def __init__(self, ratio: float, spans: SpanBuffer) -> None:
        super().__init__()
        self.spans = spans
        self._ratio = ratio

    def count_start(self, exchange: Exchange) -> None:
        super().count_start(exchange)
        is_retry = getattr(exchange, "trace", None) is not None
        trace = self._trace_of(exchange)
        if not is_retry:
            _pass_context(exchange, trace.context)
        now = exchange.plane.loop.time()
        trace.queued_s += _present_wait_s(exchange, now)
        replica = exchange.replica
        if replica is not None:
            trace.attempts.append((now, replica.id, replica.engine))

    def count_refusal(self, exchange: Exchange, error: FitserveError) -> None:
        super().count_refusal(exchange, error)
        self._record(exchange, error.status, "refused", error.code)

    def count_completion(self, exchange: Exchange) -> None:
        super().count_completion(exchange)
        if exchange.outcome != "refused":
            self._record(exchange, exchange.answer.status, exchange.outcome, "")
        else:
            # `count_refusal` follows, mostly after the end of the wait.
            now = exchange.plane.loop.time()
            self._trace_of(exchange).queued_s += _present_wait_s(exchange, now)

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        yield "fitserve_spans_total", ("dropped",), self.spans.dropped_count

    def drain_spans(self) -> tuple[RequestSpan, ...]:
        return self.spans.drain()

    def _trace_of(self, exchange: Exchange) -> RequestTrace:
        """The trace of a request, which begins with the first call."""
        trace: RequestTrace | None = getattr(exchange, "trace", None)
        if trace is None:
            headers = exchange.request_head.headers
            context = trace_context(headers, os.urandom(_RANDOM_BYTES), self._ratio)
            trace = exchange.trace = RequestTrace(context)
        return trace

    def _record(self, exchange: Exchange, status: int, outcome: str, error: str) -> None:
        trace = self._trace_of(exchange)
        context = trace.context
        if not context.is_sampled:
            return
        now = exchange.plane.loop.time()
        ended_ns = time.time_ns()

        def unix_ns(loop_s: float) -> int:
            return ended_ns - int((now - loop_s) * _NS) if loop_s else 0

        endpoint = exchange.endpoint
        prompt, completion, cached_tokens = exchange.usage if status // 100 == _OK else UNTOLD
        self.spans.add(
            RequestSpan(
                trace_id=context.trace_id,
                span_id=context.span_id,
                parent_id=context.parent_id,
                trace_state=context.state.decode("latin-1"),
                request_id=exchange.id,
                key=exchange.key.name,
                operation=endpoint.name,
                method=endpoint.method,
                route=endpoint.path.replace(endpoint.id, "{id}") if endpoint.id else endpoint.path,
                model=exchange.model,
                started_ns=unix_ns(exchange.started_at) or ended_ns,
                first_byte_ns=unix_ns(exchange.first_byte_at),
                ended_ns=ended_ns,
                queued_ns=int((trace.queued_s + _present_wait_s(exchange, now)) * _NS),
                attempts=tuple(
                    (unix_ns(loop_s), replica, engine) for loop_s, replica, engine in trace.attempts
                ),
                status=status,
                outcome=outcome,
                error=error,
                is_stream=exchange.answer.has_events,
                prompt_tokens=prompt,
                completion_tokens=completion,
                cached_tokens=cached_tokens,
            )
        )


class TracedAccessLog(TracedMetrics, AccessLog):
    """Metrics, spans and the access log."""


def _present_wait_s(exchange: Exchange, now: float) -> float:
    """Seconds that the request waits in the queue; 0 outside of it."""
    queued_at = exchange.queued_at
    return now - queued_at if queued_at is not None else 0.0


def _pass_context(exchange: Exchange, context: TraceContext) -> None:
    """Give the engine this gateway's context in place of the client's.

    The lines go with those of the body, as the head may be kept for the next request.
    """
    exchange.content_type += context.lines()
    head = exchange.request_head
    headers = head.headers
    if PARENT in headers or STATE in headers:
        lines = request_lines(
            {name: value for name, value in headers.items() if name not in (PARENT, STATE)}
        )
        exchange.request_head = RequestHead(
            head.endpoint, headers, head.key, lines, priority=head.priority, address=head.address
        )
