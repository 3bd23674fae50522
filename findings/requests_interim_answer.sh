#!/usr/bin/env bash
# requests 2.34.2 (urllib3 2.8.0, Python 3.11): an interim answer other than 100 is the answer. The
# client returns the status 102 or 103 with an empty body, and the real answer is never read.
# RFC 9110 (15.2) obliges clients to read any number of 1xx answers before the final one. A gateway
# cannot send 102 to show that a model still loads. httpx 0.28.1 and aiohttp 3.14.5 read the answer.
# Seen on 2026-11-30: 100: requests 200, httpx 200, aiohttp 200; 102: requests 102, httpx 200,
# aiohttp 200; 103: requests 103, httpx 200, aiohttp 200
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'requests==2.34.2' 'urllib3==2.8.0' 'httpx==0.28.1' \
    'aiohttp==3.14.5'
output=$("$folder/venv/bin/python" - <<'PY'
import asyncio
import socket
import threading

import aiohttp
import httpx
import requests

interim = ""
server = socket.create_server(("127.0.0.1", 0))
final = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab"


def serve():
    while True:
        client, _ = server.accept()
        with client:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(4096)
            client.sendall(f"HTTP/1.1 {interim}\r\n\r\n{final}".encode())


threading.Thread(target=serve, daemon=True).start()
url = f"http://127.0.0.1:{server.getsockname()[1]}/"


async def aiohttp_status():
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status


def statuses(line):
    global interim
    interim = line
    one, two = requests.get(url, timeout=30), httpx.get(url, timeout=30)
    names = {"requests": one.status_code, "httpx": two.status_code}
    names["aiohttp"] = asyncio.run(aiohttp_status())
    return ", ".join(f"{name} {status}" for name, status in names.items())


print("100:", statuses("100 Continue"), end="; ")
print("102:", statuses("102 Processing"), end="; ")
print("103:", statuses("103 Early Hints"))
PY
)
echo "$output"
expected="100: requests 200, httpx 200, aiohttp 200; 102: requests 102, httpx 200, aiohttp 200"
expected+="; 103: requests 103, httpx 200, aiohttp 200"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
