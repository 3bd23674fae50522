#!/usr/bin/env bash
# aiohttp 3.14.5: a line of an answer beyond 512 KiB ends the loop over lines in LineTooLong,
# which says 400 as if the server refused the request. The format of event streams has no such
# limit, and one event with a picture, with sound or with the logarithms of all tokens is longer.
# Clients that read events by lines lose the rest of the answer. httpx-sse 0.4.3 reads it.
# Seen on 2026-11-29: 500 KiB: aiohttp read, httpx-sse read; 600 KiB: aiohttp LineTooLong 400,
# httpx-sse read
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'aiohttp==3.14.5' 'httpx==0.28.1' 'httpx-sse==0.4.3'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import httpx
import httpx_sse


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: " + b"x" * int(self.path[1:]) + b"\n\n")

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()


async def of_aiohttp(size):
    url = f"http://127.0.0.1:{server.server_port}/{size}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        try:
            lines = [line async for line in answer.content]
        except aiohttp.http_exceptions.LineTooLong as error:
            return f"LineTooLong {error.code}"
    return "read" if len(lines[0]) == size + 7 else "other text"


def of_httpx(size):
    url = f"http://127.0.0.1:{server.server_port}/{size}"
    with httpx.Client() as client, httpx_sse.connect_sse(client, "GET", url) as source:
        (event,) = source.iter_sse()
    return "read" if len(event.data) == size else "other text"


def outcome(size):
    return f"aiohttp {asyncio.run(of_aiohttp(size))}, httpx-sse {of_httpx(size)}"


print(f"500 KiB: {outcome(500 * 1024)}; 600 KiB: {outcome(600 * 1024)}")
PY
)
echo "$output"
expected="500 KiB: aiohttp read, httpx-sse read; 600 KiB: aiohttp LineTooLong 400, httpx-sse read"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
