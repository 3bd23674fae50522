#!/usr/bin/env bash
# langchain-openai 1.7.4: a stream with n=2 is read as one answer. The client takes the first
# choice of each chunk without its index, so the pieces of two answers alternate in one text, and
# the reason of the end is a word that no server sends. The openai client's stream helper keeps
# them apart.
# Seen on 2026-11-29: openai 'Hello' 'Bonjour', langchain-openai 'HelBonlojour' stopstop
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'langchain-openai==1.7.4' 'langchain-core==1.8.3' \
    'openai==3.57.0'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
from langchain_openai import ChatOpenAI


def chunk(index, delta, finish_reason=None):
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"


pieces = ((0, "Hel"), (1, "Bon"), (0, "lo"), (1, "jour"))
stream = "".join(chunk(i, {"role": "assistant", "content": ""}) for i in (0, 1))
stream += "".join(chunk(index, {"content": text}) for index, text in pieces)
stream += "".join(chunk(i, {}, "stop") for i in (0, 1)) + "data: [DONE]\n\n"


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
    model="m", n=2, messages=[{"role": "user", "content": "x"}]
) as parts:
    one, two = (choice.message.content for choice in parts.get_final_completion().choices)
first, *rest = ChatOpenAI(model="m", base_url=url, api_key="key", max_retries=0, n=2).stream("x")
for part in rest:
    first += part
print(f"openai {one!r} {two!r}", end=", ")
print(f"langchain-openai {first.content!r} {first.response_metadata['finish_reason']}")
PY
)
echo "$output"
expected="openai 'Hello' 'Bonjour', langchain-openai 'HelBonlojour' stopstop"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
