#!/usr/bin/env bash
# openai 3.57.0: a chat stream that ends in the middle, without finish_reason and without [DONE],
# is a complete stream to the client. No error is raised, the final completion has finish_reason
# None, and an event that was cut within its line is dropped. A gateway has to send an error event
# where an engine dies, or the user takes half an answer for a whole one.
# Seen on 2026-11-28: text 'Hel', error None, finish_reason None
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


def event(text):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n"


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write((event("Hel") + event("lo")[:-10]).encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
client = openai.OpenAI(base_url=url, api_key="key", max_retries=0)
messages = [{"role": "user", "content": "x"}]
error, text = None, ""
try:
    for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
        text += chunk.choices[0].delta.content
except openai.OpenAIError as raised:
    error = raised
with client.chat.completions.stream(model="m", messages=messages) as stream:
    reason = stream.get_final_completion().choices[0].finish_reason
print(f"text {text!r}, error {error}, finish_reason {reason}")
PY
)
echo "$output"
[ "$output" = "text 'Hel', error None, finish_reason None" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
