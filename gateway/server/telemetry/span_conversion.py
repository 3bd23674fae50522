"""Spans of OpenTelemetry from records of requests.

Names of attributes follow the semantic conventions for HTTP (1.40) and for generative AI. Others
begin with `fitserve.`; docs/tracing.md lists all.
"""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from gateway.proxy.tracing.request_span import RequestSpan
from gateway.version import __version__

Attributes = dict[str, str | int | float | bool]

SCOPE = InstrumentationScope("fitserve", __version__)
# Names that the conventions have for an operation; others keep the endpoint's.
_OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
_NS = 1e9
_CLIENT_ERROR = 400
_SERVER_ERROR = 500
_FAILURES = frozenset({"broken", "unreachable"})


def readable_span(span: RequestSpan, resource: Resource) -> ReadableSpan:
    """The span of a request."""
    trace_id = int.from_bytes(span.trace_id, "big")
    state = TraceState.from_header([span.trace_state]) if span.trace_state else None

    def context(span_id: bytes, *, is_remote: bool) -> SpanContext:
        number = int.from_bytes(span_id, "big")
        return SpanContext(trace_id, number, is_remote, TraceFlags(TraceFlags.SAMPLED), state)

    operation = _OPERATIONS.get(span.operation, span.operation)
    return ReadableSpan(
        name=f"{operation} {span.model}".rstrip(),
        context=context(span.span_id, is_remote=False),
        parent=context(span.parent_id, is_remote=True) if span.parent_id else None,
        resource=resource,
        attributes=_attributes(span, operation),
        events=_events(span),
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR if _has_failed(span) else StatusCode.UNSET),
        start_time=span.started_ns,
        end_time=span.ended_ns,
        instrumentation_scope=SCOPE,
    )


def _has_failed(span: RequestSpan) -> bool:
    """Whether the server is at fault, as the conventions for servers count it."""
    return span.status >= _SERVER_ERROR or span.outcome in _FAILURES


def _attributes(span: RequestSpan, operation: str) -> Attributes:
    replica, engine = span.attempts[-1][1:] if span.attempts else ("", "")
    first_token_ns = span.first_byte_ns - span.started_ns if span.first_byte_ns else None
    values: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": engine.partition("==")[0] or None,
        "gen_ai.request.model": span.model or None,
        "gen_ai.usage.input_tokens": span.prompt_tokens,
        "gen_ai.usage.output_tokens": span.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": span.cached_tokens,
        "http.request.method": span.method,
        "http.route": span.route,
        "http.response.status_code": span.status or None,
        "error.type": _error_type(span),
        "fitserve.request.id": span.request_id,
        "fitserve.key.name": span.key,
        "fitserve.outcome": span.outcome,
        "fitserve.stream": span.is_stream,
        "fitserve.replica": replica or None,
        "fitserve.engine": engine or None,
        "fitserve.queue.duration": span.queued_ns / _NS,
        "fitserve.first_token.duration": first_token_ns / _NS if first_token_ns else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _error_type(span: RequestSpan) -> str | None:
    """The gateway's own code, or the status of the engine's error, or the kind of the end."""
    if span.error:
        return span.error
    if span.status >= _CLIENT_ERROR:
        return str(span.status)
    return span.outcome if span.outcome != "answered" else None


def _events(span: RequestSpan) -> list[Event]:
    """Each send to an engine, and the first token."""
    events = [
        Event("fitserve.sent", {"fitserve.replica": replica, "fitserve.engine": engine}, time_ns)
        for time_ns, replica, engine in span.attempts
    ]
    if span.first_byte_ns:
        events.append(Event("fitserve.first_token", None, span.first_byte_ns))
    return events
