#!/usr/bin/env bash
# ollama 0.6.3: the client drops the identifier of a tool call where it reads an answer, and where
# it sends messages: `id` of a call and `tool_call_id` of a result are not fields of its types. A
# server that gives each call an identifier cannot match two results of one tool by it, so a
# gateway that answers this API must not rely on identifiers that come back.
# Seen on 2026-11-29: answer: id call_1 -> absent; request: id call_1 -> absent, tool_call_id
# call_1 -> absent, tool_name f -> f
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'ollama==0.6.3' 'httpx==0.28.1' 'pydantic==2.14.4'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import ollama

call = {"id": "call_1", "function": {"name": "f", "arguments": {"a": 1}}}
answer = {"message": {"role": "assistant", "content": "", "tool_calls": [call]}, "done": True}
requests = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = ollama.Client(host=f"http://127.0.0.1:{server.server_port}")
result = {"role": "tool", "content": "7", "tool_call_id": "call_1", "tool_name": "f"}
messages = [{"role": "user", "content": "x"}, answer["message"], result]
(read,) = client.chat("m", messages).message.tool_calls
_, sent, sent_result = requests[0]["messages"]
assert read.function.arguments == {"a": 1} and sent["tool_calls"][0]["function"]["name"] == "f"


def shown(fields, name):
    return f"{name} {(call | result)[name]} -> {fields.get(name, 'absent')}"


print("answer:", shown(read.model_dump(exclude_none=True), "id"), end="; ")
print("request:", shown(sent["tool_calls"][0], "id"), end=", ")
print(shown(sent_result, "tool_call_id"), shown(sent_result, "tool_name"), sep=", ")
PY
)
echo "$output"
expected="answer: id call_1 -> absent; request: id call_1 -> absent, tool_call_id call_1 ->"
expected+=" absent, tool_name f -> f"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
