#!/usr/bin/env bash
# huggingface_hub 2.4.0: the InferenceClient reads only streams with a space after "data:" and with
# each event's data in one line. The format of event streams makes the space optional, and joins the
# data of several lines. Servers and proxies that write "data:{...}", as many do, end each answer in
# a JSONDecodeError at its first token. openai 3.57.0, groq 1.7.0 and together 3.1.1 read both.
# Seen on 2026-11-30: space: huggingface_hub ab, openai ab, groq ab, together ab; no space:
# huggingface_hub JSONDecodeError, openai ab, groq ab, together ab; two lines: huggingface_hub
# JSONDecodeError, openai ab, groq ab, together ab
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'huggingface_hub==2.4.0' 'openai==3.57.0' 'groq==1.7.0' \
    'together==3.1.1'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import groq
import openai
import together
from huggingface_hub import InferenceClient


def chunk(delta, finish_reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


plain = chunk({"role": "assistant", "content": "a"}) + chunk({"content": "b"}) + chunk({}, "stop")
end = "data: [DONE]\n\n"
streams = {
    "space": plain + end,
    "no space": (plain + end).replace("data: ", "data:"),
    "two lines": plain.replace('"choices"', '\ndata: "choices"') + end,
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
options = {"base_url": f"http://127.0.0.1:{server.server_port}", "api_key": "key"}
hub = InferenceClient(**options)
clients = {
    "huggingface_hub": hub.chat_completion,
    "openai": openai.OpenAI(**options).chat.completions.create,
    "groq": groq.Groq(**options).chat.completions.create,
    "together": together.Together(**options).chat.completions.create,
}


def answer(ask):
    try:
        chunks = list(ask(model="m", messages=[{"role": "user", "content": "x"}], stream=True))
    except json.JSONDecodeError as error:
        return type(error).__name__
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


lines = []
for stream["name"] in streams:
    words = ", ".join(f"{name} {answer(ask)}" for name, ask in clients.items())
    lines.append(f"{stream['name']}: {words}")
print("; ".join(lines))
PY
)
echo "$output"
expected="space: huggingface_hub ab, openai ab, groq ab, together ab; no space: "
expected+="huggingface_hub JSONDecodeError, openai ab, groq ab, together ab; two lines: "
expected+="huggingface_hub JSONDecodeError, openai ab, groq ab, together ab"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
