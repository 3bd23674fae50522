#!/usr/bin/env bash
# uvicorn 0.54.0 with httptools 0.9.0: a client of HTTP/1.0 that sends an expectation of
# 100-continue gets an interim answer. RFC 9110 (10.1.1 and 15.2) forbids it, because HTTP/1.0 has
# no status 1xx: such a client takes "100 Continue" for the answer. The same server with h11 sends
# only the answer.
# Seen on 2026-11-29: h11: 200, httptools: 100 200
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'uvicorn==0.54.0' 'h11==0.16.0' 'httptools==0.9.0'
cat >"$folder/application.py" <<'PY'
async def application(scope, receive, send):
    if scope["type"] == "http":
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"read"})
PY
read -r first second < <(python3 - <<'PY'
import socket

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(free.getsockname()[1] for free in sockets))
PY
)
cd "$folder"
venv/bin/uvicorn --http h11 --port "$first" --log-level critical application:application &
venv/bin/uvicorn --http httptools --port "$second" --log-level critical application:application &
output=$("$folder/venv/bin/python" - "$first" "$second" <<'PY'
import re
import socket
import sys
import time


def statuses(port):
    for _ in range(300):
        try:
            client = socket.create_connection(("127.0.0.1", int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    head = b"POST / HTTP/1.0\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    client.sendall(head + b"ab")
    received = b""
    while part := client.recv(4096):
        received += part
    return " ".join(re.findall(r"HTTP/1.1 (\d{3})", received.decode()))


print(f"h11: {statuses(sys.argv[1])}, httptools: {statuses(sys.argv[2])}")
PY
)
echo "$output"
[ "$output" = "h11: 200, httptools: 100 200" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
