#!/usr/bin/env bash
# openai 3.57.0: `chat.completions.stream()` joins each text and adds each number of the deltas. A
# server that repeats the role, or the id and name of a tool call, in every chunk gives a final
# message whose role is no role, whose tool does not exist, and whose own number, such as the id
# of the last token, is a sum. `content` is right.
# Seen on 2026-11-29: content 'ab', role 'assistantassistant', tool 'callcall' 'ff', token_id 12
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


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


def call(arguments):
    function = {"name": "f", "arguments": arguments}
    return [{"index": 0, "id": "call", "type": "function", "function": function}]


deltas = (
    {"role": "assistant", "content": "a", "token_id": 5, "tool_calls": call("{")},
    {"role": "assistant", "content": "b", "token_id": 7, "tool_calls": call("}")},
)
stream = "".join(map(chunk, deltas)) + chunk({}, "tool_calls") + "data: [DONE]\n\n"


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
with client.chat.completions.stream(
    model="m", messages=[{"role": "user", "content": "x"}]
) as parts:
    message = parts.get_final_completion().choices[0].message
(tool,) = message.tool_calls
assert tool.function.arguments == "{}"
print(f"content {message.content!r}, role {message.role!r}", end=", ")
print(f"tool {tool.id!r} {tool.function.name!r}, token_id {message.token_id}")
PY
)
echo "$output"
expected="content 'ab', role 'assistantassistant', tool 'callcall' 'ff', token_id 12"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
