#!/usr/bin/env bash
# langchain-openai 1.7.4: vectors belong to texts by their place in the answer, not by `index`.
# The field tells the place of the text in the request. Where an answer lists vectors in another
# order, each text gets the vector of another one, without an error.
# Seen on 2026-11-29: index 1 first: text a gets vector 1.0, text b gets vector 0.0
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

from langchain_openai import OpenAIEmbeddings

rows = [{"object": "embedding", "index": i, "embedding": [float(i)]} for i in (1, 0)]
usage = {"prompt_tokens": 2, "total_tokens": 2}
answer = {"object": "list", "model": "m", "data": rows, "usage": usage}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
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
url = f"http://127.0.0.1:{server.server_port}/v1"
model = OpenAIEmbeddings(
    model="m", base_url=url, api_key="key", max_retries=0, check_embedding_ctx_length=False
)
(one,), (two,) = model.embed_documents(["a", "b"])
print(f"index 1 first: text a gets vector {one}, text b gets vector {two}")
PY
)
echo "$output"
expected="index 1 first: text a gets vector 1.0, text b gets vector 0.0"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
