#!/usr/bin/env bash
# requests-sse 0.5.3: the client removes all spaces after `data:` and all line breaks at the end of
# an event. The format of event streams takes away one space and one line break. Tokens that a
# server streams as plain text lose the spaces between words and their empty lines.
# Seen on 2026-11-29: sent 'The', ' answer', ' is', '\n', '42', read 'Theansweris42'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'requests-sse==0.5.3'
output=$("$folder/venv/bin/python" - <<'PY'
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from requests_sse import EventSource

TOKENS = ("The", " answer", " is", "\n", "42")


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for token in TOKENS:
            lines = "".join(f"data: {line}\n" for line in token.split("\n"))
            self.wfile.write(lines.encode() + b"\n")

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
text = ""
with EventSource(f"http://127.0.0.1:{server.server_port}") as source:
    for _ in TOKENS:
        text += next(source).data
print("sent", ", ".join(map(repr, TOKENS)), end=", ")
print("read", repr(text))
PY
)
echo "$output"
[[ $output = *"read 'Theansweris42'" ]] || { echo "The behaviour changed: $output" >&2; exit 1; }
