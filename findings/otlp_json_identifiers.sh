#!/usr/bin/env bash
# opentelemetry-proto 1.45.2 with protobuf 7.36.2: OTLP in JSON writes identifiers of traces and
# spans in hexadecimal, and the JSON of protobuf reads bytes as base64. 32 hexadecimal digits are
# valid base64, so a span of the specification's form is read without an error, with identifiers of
# 24 and 12 bytes in place of 16 and 8. No trace of such a receiver joins another program's spans.
# The way back writes base64, which collectors refuse or misread. Names and times are right, so a
# test that looks at these passes.
# Seen on 2026-11-30: sent: 16 and 8 bytes, read: 24 and 12 bytes, written: W47/95gDgQPSabYzgT/GDA==
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'opentelemetry-proto==1.45.2' 'protobuf==7.36.2'
output=$("$folder/venv/bin/python" - <<'PY'
import json

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

trace, span = "5b8efff798038103d269b633813fc60c", "eee19b7ec3c1b174"
fields = {"traceId": trace, "spanId": span, "name": "chat", "startTimeUnixNano": "1"}
text = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [fields]}]}]})
request = json_format.Parse(text, ExportTraceServiceRequest())
(read,) = request.resource_spans[0].scope_spans[0].spans
assert (read.name, read.start_time_unix_nano) == ("chat", 1)
print(f"sent: 16 and 8 bytes, read: {len(read.trace_id)} and {len(read.span_id)} bytes", end=", ")
read.trace_id, read.span_id = bytes.fromhex(trace), bytes.fromhex(span)
written = json_format.MessageToDict(request)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
print("written:", written["traceId"])
PY
)
echo "$output"
expected="sent: 16 and 8 bytes, read: 24 and 12 bytes, written: W47/95gDgQPSabYzgT/GDA=="
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
