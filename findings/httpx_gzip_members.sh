#!/usr/bin/env bash
# httpx 0.28.1 and httpx2 2.16.2: an answer whose gzip coding has several members ends for the
# client after the first one. The rest is dropped without an error. RFC 1952 (2.2) lets a gzip file
# be a series of members, and a server that compresses each event on its own sends one. requests
# 2.34.2 and aiohttp 3.14.5 read them all.
# Seen on 2026-11-29: httpx 'one', httpx2 'one', requests 'one two', aiohttp 'one two'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'httpx==0.28.1' 'httpx2==2.16.2' 'requests==2.34.2' \
    'urllib3==2.8.0' 'aiohttp==3.14.5'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import httpx
import httpx2
import requests

body = gzip.compress(b"one") + gzip.compress(b" two")
assert gzip.decompress(body) == b"one two"


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"


async def read():
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return await answer.text()


print(f"httpx {httpx.get(url).text!r}, httpx2 {httpx2.get(url).text!r}", end=", ")
print(f"requests {requests.get(url).text!r}, aiohttp {asyncio.run(read())!r}")
PY
)
echo "$output"
expected="httpx 'one', httpx2 'one', requests 'one two', aiohttp 'one two'"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
