#!/usr/bin/env bash
# langchain-anthropic 1.7.10 beside anthropic 2.14.0: the tokens of the prompt are counted only from
# the last event of a stream. Messages streams state them in `message_start`, and there the last
# event (`message_delta`) may have `output_tokens` alone. The prompt then costs nothing in the
# usage. A gateway that serves this format has to state the prompt's tokens at both ends.
# Seen on 2026-11-30: at the start: anthropic 10 5, langchain-anthropic 0 5; at both ends:
# anthropic 10 5, langchain-anthropic 10 5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'langchain-anthropic==1.7.10' 'langchain-core==1.8.3' \
    'anthropic==2.14.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic
from langchain_anthropic import ChatAnthropic

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
url = f"http://127.0.0.1:{server.server_port}"
client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0)
model = ChatAnthropic(model="m", base_url=url, api_key="key", max_retries=0, max_tokens=9)
message = {
    "id": "msg",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {"input_tokens": 10, "output_tokens": 1},
}
end = {"stop_reason": "end_turn", "stop_sequence": None}


def counts(usage):
    global stream
    delta = {"type": "text_delta", "text": "ab"}
    events = (
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": usage},
        {"type": "message_stop"},
    )
    stream = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
    with client.messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]
    ) as parts:
        one = parts.get_final_message().usage
    answer, *rest = model.stream("x")
    for part in rest:
        answer += part
    two = answer.usage_metadata
    return (
        f"anthropic {one.input_tokens} {one.output_tokens}, "
        f"langchain-anthropic {two['input_tokens']} {two['output_tokens']}"
    )


print("at the start:", counts({"output_tokens": 5}), end="; ")
print("at both ends:", counts({"input_tokens": 10, "output_tokens": 5}))
PY
)
echo "$output"
expected="at the start: anthropic 10 5, langchain-anthropic 0 5"
expected+="; at both ends: anthropic 10 5, langchain-anthropic 10 5"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
