#!/usr/bin/env bash
# opentelemetry-exporter-otlp-proto-http 1.45.2: OTEL_EXPORTER_OTLP_TIMEOUT counts seconds. The
# specification of OpenTelemetry counts such variables in milliseconds. The usual 10000 lets an
# export to a dead collector wait for nearly three hours instead of ten seconds. Engines such as
# vLLM export with this package.
# Seen on 2026-11-29: timeout 500, answer after 2 s: exported in one request
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'opentelemetry-exporter-otlp-proto-http==1.45.2' \
    'opentelemetry-sdk==1.45.2'
output=$("$folder/venv/bin/python" - <<'PY'
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

requests = 0


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        global requests
        requests += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(2)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
os.environ["OTEL_EXPORTER_OTLP_TIMEOUT"] = "500"

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

span = TracerProvider().get_tracer("server").start_span("request")
span.end()
result = OTLPSpanExporter().export([span])
words = "exported" if result is SpanExportResult.SUCCESS else "not exported"
count = "one request" if requests == 1 else f"{requests} requests"
print(f"timeout 500, answer after 2 s: {words} in {count}")
PY
)
echo "$output"
expected="timeout 500, answer after 2 s: exported in one request"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
