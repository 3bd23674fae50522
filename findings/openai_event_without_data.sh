#!/usr/bin/env bash
# openai 3.57.0 beside httpx-sse 0.4.3: an event without data (a `retry`, an `id`, an `event` line
# and an empty line) breaks a chat stream with a JSONDecodeError. The format of event streams gives
# no event to the user if the data are empty. A proxy that sets the time of reconnection by `retry`
# makes the stream unreadable to this client. anthropic 2.14.0 reads such streams.
# Seen on 2026-11-29: httpx-sse: 1 event, openai: retry JSONDecodeError, id JSONDecodeError,
# event JSONDecodeError, comment ok
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai==3.57.0' 'httpx==0.28.1' 'httpx-sse==0.4.3'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import httpx_sse
import openai

chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
chunk["choices"] = [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]
first = ""


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"{first}\n\ndata: {json.dumps(chunk)}\n\n".encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)


def outcome(line):
    global first
    first = line
    messages = [{"role": "user", "content": "x"}]
    try:
        (part,) = client.chat.completions.create(model="m", messages=messages, stream=True)
    except json.JSONDecodeError:
        return "JSONDecodeError"
    return "ok" if part.choices[0].delta.content == "a" else "other text"


first = "retry: 3000"
with httpx.Client() as plain, httpx_sse.connect_sse(plain, "POST", url, content="{}") as source:
    print(f"httpx-sse: {len([e for e in source.iter_sse() if e.data])} event", end=", ")
lines = {"retry": "retry: 3000", "id": "id: 7", "event": "event: ping", "comment": ": ping"}
print("openai:", ", ".join(f"{name} {outcome(line)}" for name, line in lines.items()))
PY
)
echo "$output"
expected="httpx-sse: 1 event, openai: retry JSONDecodeError, id JSONDecodeError,"
expected+=" event JSONDecodeError, comment ok"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
