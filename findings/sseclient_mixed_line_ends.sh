#!/usr/bin/env bash
# sseclient-py 1.9.0: two events are one if the line of the first ends with LF and its empty line
# with CR LF. The format of event streams allows each line its own end, and a proxy that adds lines
# of its own mixes them. httpx-sse 0.4.3 reads two events.
# Seen on 2026-11-29: sseclient-py ['one\ntwo'], httpx-sse ['one', 'two']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'sseclient-py==1.9.0' 'httpx-sse==0.4.3' 'httpx==0.28.1'
output=$("$folder/venv/bin/python" - <<'PY'
import httpx
import httpx_sse
import sseclient

STREAM = b"data: one\n\r\ndata: two\n\n"


class Source:
    def __iter__(self):
        yield STREAM

    def close(self):
        pass


response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=STREAM)
print("sseclient-py", [event.data for event in sseclient.SSEClient(Source()).events()], end=", ")
print("httpx-sse", [event.data for event in httpx_sse.EventSource(response).iter_sse()])
PY
)
echo "$output"
[ "$output" = "sseclient-py ['one\ntwo'], httpx-sse ['one', 'two']" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
