#!/usr/bin/env bash
# huggingface_hub 2.4.0: a stream of the InferenceClient ends in StreamClosed before its first token
# if no variable holds the client. The stream does not refer to its client, which closes all streams
# when it is collected. A function that makes a client and returns its stream, or a loop over
# InferenceClient(...).chat_completion(stream=True), gets none of 2 tokens, while the server has
# computed the answer. openai 3.57.0 gives them all.
# Seen on 2026-11-30: kept client: ab, no variable: StreamClosed, openai: ab
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'huggingface_hub==2.4.0' 'openai==3.57.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from huggingface_hub import InferenceClient


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


stream = chunk({"role": "assistant", "content": "a"}) + chunk({"content": "b"}, "stop")


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"{stream}data: [DONE]\n\n".encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {"base_url": f"http://127.0.0.1:{server.server_port}", "api_key": "key"}
question = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}


def answer(chunks):
    try:
        return "".join(chunk.choices[0].delta.content for chunk in chunks)
    except Exception as error:
        return type(error).__name__


client = InferenceClient(**options)
print("kept client:", answer(client.chat_completion(**question)), end=", ")
print("no variable:", answer(InferenceClient(**options).chat_completion(**question)), end=", ")
print("openai:", answer(openai.OpenAI(**options).chat.completions.create(**question)))
PY
)
echo "$output"
expected="kept client: ab, no variable: StreamClosed, openai: ab"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
