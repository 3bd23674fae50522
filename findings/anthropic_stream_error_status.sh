#!/usr/bin/env bash
# anthropic 2.14.0: an error event in a stream is an exception whose status code is 200. The class
# is the plain APIStatusError for each type of error, so neither a handler for OverloadedError nor
# one that repeats the request for codes of 500 and more sees it, and the client itself repeats
# nothing. The same error as an answer has its class and the code 529, and is tried 3 times. A
# server that becomes overloaded after it has sent its head, as each streaming gateway may, gets no
# second try from its users: 0 of 2 here.
# Seen on 2026-11-30: answer: OverloadedError 529, 3 requests; event: APIStatusError 200, 1 requests
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'anthropic==2.14.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

time.sleep = lambda seconds: None
error = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
message |= {"stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
begin = {"type": "message_start", "message": message}
stream = f"event: message_start\ndata: {json.dumps(begin)}\n\n"
stream += f"event: error\ndata: {json.dumps(error)}\n\n"
answers = {
    "answer": (529, "application/json", json.dumps(error)),
    "event": (200, "text/event-stream", stream),
}
counts = dict.fromkeys(answers, 0)
chosen = {}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        counts[chosen["name"]] += 1
        status, kind, body = answers[chosen["name"]]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="key")
question = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
words = []
for chosen["name"] in answers:
    try:
        with client.messages.stream(**question) as events:
            events.get_final_message()
    except anthropic.APIStatusError as raised:
        name, code = type(raised).__name__, raised.status_code
        words.append(f"{chosen['name']}: {name} {code}, {counts[chosen['name']]} requests")
print("; ".join(words))
PY
)
echo "$output"
expected="answer: OverloadedError 529, 3 requests; event: APIStatusError 200, 1 requests"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
