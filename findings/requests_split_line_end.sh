#!/usr/bin/env bash
# requests 2.34.2: `iter_lines` makes two line ends of one CR LF whose characters arrive in two
# pieces. In an event stream the empty line between them ends the event, so a consumer of lines
# sees an event without data and data without a name. It depends on where the network cuts the
# stream. httpx 0.28.1 reads the same pieces as one.
# Seen on 2026-11-29: requests ['event: delta', '', 'data: one', ''], httpx ['event: delta',
# 'data: one', '']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'requests==2.34.2' 'urllib3==2.8.0' 'httpx==0.28.1'
output=$("$folder/venv/bin/python" - <<'PY'
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import requests

pieces = b"event: delta\r", b"\ndata: one\r\n\r\n"


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for piece in (*pieces, b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"
with requests.get(url, stream=True) as answer:
    print("requests", list(answer.iter_lines(chunk_size=None, decode_unicode=True)), end=", ")
with httpx.stream("GET", url) as answer:
    print("httpx", list(answer.iter_lines()))
PY
)
echo "$output"
expected="requests ['event: delta', '', 'data: one', ''], httpx ['event: delta', 'data: one', '']"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
