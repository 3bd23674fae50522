#!/usr/bin/env bash
# ollama 0.6.3 with httpx 0.28.1: a streamed answer with U+2028 or U+0085 in a text ends in a
# JSONDecodeError. The client reads JSON lines with httpx's iter_lines, which also splits at the
# line separators of Unicode, and JSON allows these inside a string. A server has to escape them.
# Seen on 2026-11-28: escaped: ok, plain U+2028: JSONDecodeError, plain U+0085: JSONDecodeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'ollama==0.6.3' 'httpx==0.28.1'
output=$("$folder/venv/bin/python" - <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import ollama

line = ""


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        self.wfile.write(line.encode())

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = ollama.Client(host=f"http://127.0.0.1:{server.server_port}")


def outcome(content, escape):
    global line
    answer = {"message": {"role": "assistant", "content": content}, "done": True}
    line = json.dumps(answer, ensure_ascii=escape) + "\n"
    try:
        parts = client.chat("m", [{"role": "user", "content": "x"}], stream=True)
        return "ok" if "".join(p.message.content for p in parts) == content else "other text"
    except json.JSONDecodeError:
        return "JSONDecodeError"


print("escaped:", outcome("a\u2028b", True), end=", ")
print("plain U+2028:", outcome("a\u2028b", False), end=", ")
print("plain U+0085:", outcome("a\x85b", False))
PY
)
echo "$output"
expected="escaped: ok, plain U+2028: JSONDecodeError, plain U+0085: JSONDecodeError"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
