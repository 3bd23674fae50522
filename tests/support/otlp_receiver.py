"""A receiver of OTLP over real HTTP and gRPC sockets, with the messages of opentelemetry-proto, and
a request as the data plane records it.

with HttpReceiver() as receiver: receiver.url, receiver.spans()
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gateway.proxy.tracing.request_span import RequestSpan

_SPAN = RequestSpan(
    trace_id=bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736"),
    span_id=bytes.fromhex("00f067aa0ba902b7"),
    parent_id=b"",
    trace_state="",
    request_id="r1",
    key="ann",
    operation="chat",
    method="POST",
    route="/v1/chat/completions",
    model="m",
    started_ns=1_000_000_000,
    first_byte_ns=1_250_000_000,
    ended_ns=2_000_000_000,
    queued_ns=100_000_000,
    attempts=((1_125_000_000, "m-0", "vllm==0.33.0"),),
    status=200,
    outcome="answered",
    error="",
    is_stream=True,
    prompt_tokens=7,
    completion_tokens=9,
    cached_tokens=4,
)


def request_span(**fields: Any) -> RequestSpan:
    """A request that an engine answered."""
    return _SPAN._replace(**fields)


class Receiver:
    """The requests for traces and metrics so far, and the headers of each."""

    def __init__(self) -> None:
        self.trace_requests: list[Any] = []
        self.metric_requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def resource_spans(self) -> Iterator[Any]:
        for request in self.trace_requests:
            yield from request.resource_spans

    def spans(self) -> list[Any]:
        return [
            span
            for resource in self.resource_spans()
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def metrics(self) -> dict[str, Any]:
        """The metrics by name, of the last request."""
        return {
            metric.name: metric
            for resource in self.metric_requests[-1].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a message by name."""
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in message.attributes
    }


class HttpReceiver(Receiver):
    """OTLP over HTTP. status: the answer to each request."""

    def __init__(self, status: int = 200) -> None:
        super().__init__()
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        receiver = self
        tables: dict[str, tuple[Any, list[Any]]] = {
            "/v1/traces": (ExportTraceServiceRequest, self.trace_requests),
            "/v1/metrics": (ExportMetricsServiceRequest, self.metric_requests),
        }

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                kind, requests = tables[self.path]
                if status == 200:
                    receiver.headers.append(
                        {name.lower(): value for name, value in self.headers.items()}
                    )
                    requests.append(kind.FromString(body))
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HttpReceiver:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class GrpcReceiver(Receiver):
    """OTLP over gRPC, with the generated services."""

    def __enter__(self) -> GrpcReceiver:
        import grpc
        from opentelemetry.proto.collector.metrics.v1 import (
            metrics_service_pb2,
            metrics_service_pb2_grpc,
        )
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        receiver = self

        def record(context: Any, request: Any, requests: list[Any]) -> None:
            receiver.headers.append(dict(context.invocation_metadata()))
            requests.append(request)

        class Traces(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                record(context, request, receiver.trace_requests)
                return trace_service_pb2.ExportTraceServiceResponse()

        class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                record(context, request, receiver.metric_requests)
                return metrics_service_pb2.ExportMetricsServiceResponse()

        self._server = grpc.server(ThreadPoolExecutor(2))
        # Generated code has no types.
        traces: Any = trace_service_pb2_grpc
        traces.add_TraceServiceServicer_to_server(Traces(), self._server)
        metrics: Any = metrics_service_pb2_grpc
        metrics.add_MetricsServiceServicer_to_server(Metrics(), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
