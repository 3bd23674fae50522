"""Spans of OpenTelemetry: names, attributes and status of each end."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

from gateway.server.telemetry.span_conversion import readable_span
from tests.support.otlp_receiver import request_span

RESOURCE = Resource({"service.name": "fitserve"})


def span_of(**fields: Any) -> ReadableSpan:
    return readable_span(request_span(**fields), RESOURCE)


def test_a_span_has_the_names_of_the_conventions() -> None:
    span = span_of()
    assert (span.name, span.kind) == ("chat m", SpanKind.SERVER)
    assert (span.start_time, span.end_time) == (1_000_000_000, 2_000_000_000)
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "fitserve.request.id": "r1",
        "fitserve.key.name": "ann",
        "fitserve.outcome": "answered",
        "fitserve.stream": True,
        "fitserve.replica": "m-0",
        "fitserve.engine": "vllm==0.33.0",
        "fitserve.queue.duration": 0.1,
        "fitserve.first_token.duration": 0.25,
    }
    assert [(event.name, event.timestamp) for event in span.events] == [
        ("fitserve.sent", 1_125_000_000),
        ("fitserve.first_token", 1_250_000_000),
    ]


def test_a_span_of_a_client_has_a_remote_parent_with_its_state() -> None:
    span = span_of(parent_id=b"\0" * 7 + b"\5", trace_state="vendor=1")
    assert span.parent is not None
    assert span.context is not None
    assert (span.parent.span_id, span.parent.is_remote) == (5, True)
    assert span.context.trace_state.to_header() == "vendor=1"
    assert span_of().parent is None


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("messages", "chat m"),
        ("responses", "chat m"),
        ("completions", "text_completion m"),
        ("embeddings", "embeddings m"),
        ("rerank", "rerank m"),
    ],
)
def test_operations_have_the_names_of_the_conventions(operation: str, name: str) -> None:
    assert span_of(operation=operation).name == name


@pytest.mark.parametrize(
    ("fields", "error", "status"),
    [
        ({"status": 200, "outcome": "answered"}, None, StatusCode.UNSET),
        ({"status": 200, "outcome": "broken"}, "broken", StatusCode.ERROR),
        ({"status": 200, "outcome": "left"}, "left", StatusCode.UNSET),
        ({"status": 0, "outcome": "left"}, "left", StatusCode.UNSET),
        ({"status": 200, "outcome": "cancelled"}, "cancelled", StatusCode.UNSET),
        ({"status": 404, "outcome": "refused", "error": "nope"}, "nope", StatusCode.UNSET),
        ({"status": 503, "outcome": "refused", "error": "busy"}, "busy", StatusCode.ERROR),
        ({"status": 400, "outcome": "answered"}, "400", StatusCode.UNSET),
        ({"status": 500, "outcome": "answered"}, "500", StatusCode.ERROR),
    ],
)
def test_the_status_of_a_span_is_an_error_where_the_server_is_at_fault(
    fields: dict[str, Any], error: str | None, status: StatusCode
) -> None:
    span = span_of(**fields)
    assert span.status.status_code is status
    assert (span.attributes or {}).get("error.type") == error


def test_facts_that_are_missing_have_no_attribute() -> None:
    span = span_of(
        model="", attempts=(), first_byte_ns=0, status=0, prompt_tokens=None,
        completion_tokens=None, cached_tokens=None,
    )  # fmt: skip
    assert span.name == "chat"
    assert not {
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.usage.input_tokens",
        "http.response.status_code",
        "fitserve.replica",
        "fitserve.first_token.duration",
    } & {*(span.attributes or {})}
    assert span.events == ()
