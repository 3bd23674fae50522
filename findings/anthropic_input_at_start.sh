#!/usr/bin/env bash
# @anthropic-ai/sdk 1.14.0 (npm) beside anthropic 2.14.0: a tool call whose input stands whole in
# `content_block_start` loses it in npm, if an `input_json_delta` with an empty text follows.
# Anthropic's own streams begin with such an empty piece, so a gateway that has the whole call and
# fills the form in gives each tool the input {}, without an error: 0 of 1 argument. Python keeps
# it, and so does npm without the piece. Only the whole input as one delta is right in both.
# Seen on 2026-11-30: at the start: Python {"x":1}, npm {"x":1}; with an empty piece: Python
# {"x":1}, npm {}; in a piece: Python {"x":1}, npm {"x":1}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'anthropic==2.14.0'
npm install --silent --no-fund --no-audit --prefix "$folder" '@anthropic-ai/sdk@1.14.0' \
    >/dev/null
cat >"$folder/ask.mjs" <<'JS'
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "key", maxRetries: 0 });
const messages = [{ role: "user", content: "x" }];
const stream = client.messages.stream({ model: "m", max_tokens: 1, messages });
console.log(JSON.stringify((await stream.finalMessage()).content[0].input));
JS
output=$("$folder/venv/bin/python" - <<'PY'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic


def event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n"


def answer(value, pieces):
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
    message |= {"stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
    block = {"type": "tool_use", "id": "t", "name": "f", "input": value}
    deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    return "".join(
        [
            event("message_start", message=message),
            event("content_block_start", index=0, content_block=block),
            *(event("content_block_delta", index=0, delta=delta) for delta in deltas),
            event("content_block_stop", index=0),
            event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 5}),
            event("message_stop"),
        ]
    )


streams = {
    "at the start": answer({"x": 1}, []),
    "with an empty piece": answer({"x": 1}, [""]),
    "in a piece": answer({}, ["", '{"x": 1}']),
}
stream = {}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(streams[stream["name"]].encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
question = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
words = []
for stream["name"] in streams:
    with client.messages.stream(**question) as events:
        (block,) = events.get_final_message().content
    command = ["node", f"{sys.prefix}/../ask.mjs", url]
    node = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    python = json.dumps(block.input, separators=(",", ":"))
    words.append(f"{stream['name']}: Python {python}, npm {node}")
print("; ".join(words))
PY
)
echo "$output"
expected="at the start: Python {\"x\":1}, npm {\"x\":1}; with an empty piece: Python"
expected+=" {\"x\":1}, npm {}; in a piece: Python {\"x\":1}, npm {\"x\":1}"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
