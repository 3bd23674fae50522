"""The export of spans: its thread, its losses, and a whole gateway of one and of two workers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.errors import SettingsError
from gateway.machine.collector_reach import missing_library
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.tracing.request_span import RequestSpan
from gateway.proxy.tracing.span_buffer import SpanBuffer
from gateway.server.telemetry.telemetry import Telemetry, build_telemetry
from gateway.settings import Settings
from tests.support.dataplane import refused_url
from tests.support.otlp_receiver import (
    GrpcReceiver,
    HttpReceiver,
    Receiver,
    attributes,
    request_span,
)
from tests.support.patience import Patience, hang_s
from tests.support.served import serve_models
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

needs_library = pytest.mark.skipif(missing_library() is not None, reason="needs the extra otel")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "canary-of-a-prompt"}]}
KEY = "canary-of-the-admin-key"


class Sink:
    """A receiver that answers as `is_well` says, and not before `go_event` is set."""

    def __init__(self) -> None:
        self.is_well = True
        self.go_event = threading.Event()
        self.go_event.set()
        self.spans: list[RequestSpan] = []
        self.samples: list[list[Sample]] = []
        self.is_closed = False

    def send_spans(self, spans: Sequence[RequestSpan]) -> bool:
        self.go_event.wait(hang_s())
        if self.is_well:
            self.spans += spans
        return self.is_well

    def send_metrics(self, samples: Iterable[Sample]) -> bool:
        self.samples.append(list(samples))
        return self.is_well

    def close(self) -> None:
        self.is_closed = True


async def until(condition: Any) -> None:
    patience = Patience()
    while not condition():
        assert not patience.is_over()
        await asyncio.sleep(0.01)


async def no_samples() -> list[Sample]:
    return [("fitserve_connections", (), 2)]


def export(sink: Sink, spans: SpanBuffer, *, exports_metrics: bool = False) -> Telemetry:
    return Telemetry(sink, refused_url(), spans, exports_metrics=exports_metrics, counts_drops=True)


def counts(running: Telemetry) -> dict[str, float]:
    return {labels[0]: count for _, labels, count in running.samples()}


async def test_all_spans_are_exported_and_the_last_ones_at_the_end() -> None:
    sink, spans = Sink(), SpanBuffer()
    running = export(sink, spans)
    running.start(no_samples)
    for number in range(1200):
        spans.add(request_span(request_id=str(number)))
    await until(lambda: len(sink.spans) == 1200)
    spans.add(request_span(request_id="last"))
    await running.close()
    assert [span.request_id for span in sink.spans] == [*map(str, range(1200)), "last"]
    assert counts(running) == {"exported": 1201, "failed": 0, "dropped": 0}
    assert sink.is_closed


async def test_a_slow_collector_costs_spans_and_never_the_data_plane() -> None:
    sink, spans = Sink(), SpanBuffer(capacity=10)
    sink.go_event.clear()
    running = export(sink, spans)
    running.start(no_samples)
    spans.add(request_span())
    await until(lambda: not spans.drain(0) and not len(spans._spans))  # the send is under way
    for _ in range(25):
        spans.add(request_span())
    assert spans.dropped_count == 15
    sink.go_event.set()
    await running.close()
    assert counts(running) == {"exported": 11, "failed": 0, "dropped": 15}


async def test_failed_spans_are_counted_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink, spans = Sink(), SpanBuffer()
    sink.is_well = False
    running = export(sink, spans)
    with caplog.at_level("INFO", "fitserve.telemetry"):
        running.start(no_samples)
        for total in (1, 2):
            spans.add(request_span())
            await until(lambda total=total: counts(running)["failed"] == total)
        sink.is_well = True
        spans.add(request_span())
        await running.close()
    assert counts(running) == {"exported": 1, "failed": 2, "dropped": 0}
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "the collector does not answer; spans are dropped until it does",
        "the collector takes no spans; they are dropped until it does",
        "the collector takes spans again",
    ]


async def test_an_error_of_the_library_ends_no_export() -> None:
    class Raises(Sink):
        def send_spans(self, spans: Sequence[RequestSpan]) -> bool:
            if spans[0].request_id == "bad":
                raise ValueError
            return super().send_spans(spans)

    sink, spans = Raises(), SpanBuffer()
    running = export(sink, spans)
    running.start(no_samples)
    spans.add(request_span(request_id="bad"))
    await until(lambda: counts(running)["failed"] == 1)
    spans.add(request_span(request_id="good"))
    await running.close()
    assert [span.request_id for span in sink.spans] == ["good"]


async def test_metrics_are_exported_where_asked() -> None:
    sink = Sink()
    running = export(sink, SpanBuffer(), exports_metrics=True)
    running.start(no_samples)
    await until(lambda: sink.samples)
    await running.close()
    assert sink.samples[0] == [("fitserve_connections", (), 2)]


def test_a_start_without_the_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.server.telemetry.collector", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics.export", None)
    with pytest.raises(SettingsError, match="OpenTelemetry is not installed") as error:
        build_telemetry(Settings(otlp_endpoint="http://127.0.0.1:4318"), has_workers=False)
    assert ".[otel]" in (error.value.hint or "")


# The server framework imports the interfaces of OpenTelemetry where they are installed.
@pytest.mark.parametrize(
    ("module", "packages"),
    [
        ("gateway.proxy.workers.worker", ("opentelemetry", "grpc")),
        ("gateway.server.app", ("opentelemetry.sdk", "opentelemetry.exporter", "grpc")),
    ],
)
def test_a_gateway_without_a_collector_imports_nothing_of_traces(
    module: str, packages: tuple[str, ...]
) -> None:
    code = (
        f"import sys, {module}\n"
        "from gateway.proxy.metrics.request_metrics import request_metrics\n"
        "request_metrics(has_access_log=True, trace_ratio=None)\n"
        f"print([name for name in sys.modules if name.startswith({packages})"
        " or 'gateway.proxy.tracing' in name or 'server.telemetry' in name])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


# --- the whole gateway ---


class Engine:
    """An engine that lists the model m and answers with usage.

    parents: the contexts of its requests.
    """

    def __init__(self) -> None:
        self.parents: list[str] = []

    async def __call__(self, call: Call) -> None:
        if call.head[0].startswith(b"GET"):
            await call.reply(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
            return
        self.parents.append(call.headers["traceparent"])
        await call.reply(
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}'
        )


async def served_spans(
    folder: Path, receiver: Receiver, engine: Engine, requests: int, **settings: str
) -> str:
    """Send requests to a gateway as a process, and end it. Returns its metrics."""
    async with Upstream(engine) as upstream:
        running = serve_models(
            folder,
            {"m": [f"{upstream.url}/v1"]},
            KEY,
            FITSERVE_OTLP_ENDPOINT=receiver.url,
            **settings,
        )
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            headers = {
                "authorization": f"Bearer {KEY}",
                "traceparent": f"00-{TRACE}-{PARENT}-01",
                "connection": "close",  # another connection, and mostly another worker
            }
            async with httpx.AsyncClient(
                base_url=gateway.url, timeout=hang_s(), trust_env=False, headers=headers
            ) as client:
                for _ in range(requests):
                    assert (await client.post(CHAT, json=ASK)).status_code == 200
                text = (await client.get("/metrics")).text
                await until(lambda: len(receiver.spans()) == requests)
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
        return text


@needs_library
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_requests_of_all_workers_are_spans_below_their_clients(
    tmp_path: Path, workers: str
) -> None:
    engine = Engine()
    with HttpReceiver() as receiver:
        text = await served_spans(tmp_path, receiver, engine, 12, FITSERVE_WORKERS=workers)
        spans = receiver.spans()
    assert 'fitserve_spans_total{outcome="dropped"} 0' in text
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert {span.parent_span_id.hex() for span in spans} == {PARENT}
    assert {attributes(span)["gen_ai.usage.output_tokens"] for span in spans} == {4}
    assert {attributes(span)["fitserve.key.name"] for span in spans} == {"admin"}
    parents = {f"00-{TRACE}-{span.span_id.hex()}-01" for span in spans}
    assert parents == set(engine.parents)
    assert "canary" not in repr(spans)


@needs_library
async def test_a_gateway_exports_by_grpc_and_metrics_too(tmp_path: Path) -> None:
    with GrpcReceiver() as receiver:
        await served_spans(
            tmp_path,
            receiver,
            Engine(),
            1,
            FITSERVE_OTLP_PROTOCOL="grpc",
            FITSERVE_OTLP_SIGNALS="traces,metrics",
            FITSERVE_ACCESS_LOG="true",
        )
        assert "fitserve_build_info" in receiver.metrics()
    assert '"event":"request"' in (tmp_path / "gateway.log").read_text()


@needs_library
async def test_a_dead_collector_fails_no_request(tmp_path: Path) -> None:
    class Dead(Receiver):
        url = refused_url()

        def spans(self) -> list[Any]:
            return [None]

    dead = Dead()
    dead.url = refused_url()
    await served_spans(tmp_path, dead, Engine(), 1)
    log = (tmp_path / "gateway.log").read_text()
    assert "the collector does not answer" in log
    assert "opentelemetry" not in log
