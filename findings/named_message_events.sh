#!/usr/bin/env bash
# groq 1.7.0 and together 3.1.1: a chat stream whose events have the name `message` is not read. The
# format of event streams gives this name to each event without one, so a proxy that writes it
# changes nothing. together gives an empty answer that ends in order, 0 of 2 tokens and no error,
# and groq gives a dictionary in place of a chunk. openai 3.57.0 and mistralai 3.7.0 read both
# streams.
# Seen on 2026-11-30: no name: openai ab, mistralai ab, groq ab, together ab; message: openai ab,
# mistralai ab, groq dictionary, together nothing
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'groq==1.7.0' 'together==3.1.1' 'openai==3.57.0' \
    'mistralai==3.7.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import groq
import openai
import together
from mistralai.client import Mistral


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"{name['line']}data: {json.dumps(head | {'choices': [choice]})}\n\n"


name = {"line": ""}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        deltas = {"role": "assistant", "content": "a"}, {"content": "b"}
        stream = "".join(map(chunk, deltas)) + chunk({"content": ""}, "stop")
        self.wfile.write(f"{stream}data: [DONE]\n\n".encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
options = {"base_url": url, "api_key": "key"}
question = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
mistral = Mistral(server_url=url, api_key="key")
clients = {
    "openai": openai.OpenAI(**options).chat.completions.create,
    "mistralai": lambda stream, **words: mistral.chat.stream(**words),
    "groq": groq.Groq(**options).chat.completions.create,
    "together": together.Together(**options).chat.completions.create,
}


def answer(ask):
    chunks = [getattr(event, "data", event) for event in ask(stream=True, **question)]
    if any(isinstance(chunk, dict) for chunk in chunks):
        return "dictionary"
    return "".join(chunk.choices[0].delta.content for chunk in chunks) or "nothing"


lines = []
for title, name["line"] in (("no name", ""), ("message", "event: message\n")):
    words = ", ".join(f"{client} {answer(ask)}" for client, ask in clients.items())
    lines.append(f"{title}: {words}")
print("; ".join(lines))
PY
)
echo "$output"
expected="no name: openai ab, mistralai ab, groq ab, together ab; message: openai ab, "
expected+="mistralai ab, groq dictionary, together nothing"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
