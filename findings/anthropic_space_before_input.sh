#!/usr/bin/env bash
# anthropic 2.14.0: `messages.stream()` raises a ValueError if the first piece of a tool's input is
# white space alone. JSON may begin with it, and models that write a line break before the brace
# have it as a token of its own. A gateway that turns each token into an `input_json_delta` breaks
# the whole answer. With the brace in the same piece, the space is read.
# Seen on 2026-11-30: in one piece: {'x': 1}, space in front: ValueError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'anthropic==2.14.0' 'jiter==0.19.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

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
client = anthropic.Anthropic(
    base_url=f"http://127.0.0.1:{server.server_port}", api_key="key", max_retries=0
)
message = {
    "id": "msg",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
block = {"type": "tool_use", "id": "call", "name": "f", "input": {}}
end = {"stop_reason": "tool_use", "stop_sequence": None}


def outcome(*pieces):
    global stream
    deltas = ({"type": "input_json_delta", "partial_json": piece} for piece in pieces)
    events = (
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    )
    stream = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
    with client.messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]
    ) as parts:
        try:
            return parts.get_final_message().content[0].input
        except ValueError as error:
            return type(error).__name__


print("in one piece:", outcome('\n{"x": ', "1}"), end=", ")
print("space in front:", outcome("\n", '{"x": ', "1}"))
PY
)
echo "$output"
expected="in one piece: {'x': 1}, space in front: ValueError"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
