#!/usr/bin/env bash
# openai 3.57.0: `responses.stream()` has no final response for an answer that the token limit cuts.
# Such a stream ends with the event `response.incomplete`, and `get_final_response` waits for
# `response.completed` alone, so a RuntimeError takes the place of the text, of its usage and of the
# reason. A failed response hides its error the same way. Without streaming, both are returned.
# Seen on 2026-11-30: completed: 'ab', incomplete: RuntimeError, failed: RuntimeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'openai==3.57.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai

stream = ""


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(stream.encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
text = {"type": "output_text", "text": "", "annotations": []}
item = {"type": "message", "id": "i", "role": "assistant", "status": "in_progress", "content": []}
place = {"item_id": "i", "output_index": 0, "content_index": 0}


def response(status, **members):
    head = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": []}
    settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return head | settings | {"status": status} | members


def outcome(status, **members):
    global stream
    done = item | {"status": status, "content": [text | {"text": "ab"}]}
    events = (
        {"type": "response.created", "response": response("in_progress")},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", "part": text} | place,
        {"type": "response.output_text.delta", "delta": "ab", "logprobs": []} | place,
        {"type": f"response.{status}", "response": response(status, output=[done], **members)},
    )
    numbered = ({"sequence_number": number} | event for number, event in enumerate(events))
    stream = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in numbered)
    with client.responses.stream(model="m", input="x") as parts:
        try:
            return repr(parts.get_final_response().output_text)
        except RuntimeError as error:
            return type(error).__name__


cut = {"incomplete_details": {"reason": "max_output_tokens"}}
fault = {"error": {"code": "server_error", "message": "no memory"}}
print("completed:", outcome("completed"), end=", ")
print("incomplete:", outcome("incomplete", **cut), end=", ")
print("failed:", outcome("failed", **fault))
PY
)
echo "$output"
expected="completed: 'ab', incomplete: RuntimeError, failed: RuntimeError"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
