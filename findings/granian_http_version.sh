#!/usr/bin/env bash
# granian 2.8.9: a request of HTTP/1.0 reaches an ASGI application with the version "1". The ASGI
# specification names "1.0", "1.1" and "2". An application that compares with "1.0", for example to
# send no chunked answer, takes the client for a newer one. uvicorn says "1.0".
# Seen on 2026-11-29: HTTP/1.0 request: granian 1, uvicorn 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'granian==2.8.9' 'uvicorn==0.54.0' 'h11==0.16.0'
cat >"$folder/application.py" <<'PY'
async def application(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["http_version"].encode()})
PY
read -r first second < <(python3 - <<'PY'
import socket

sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(free.getsockname()[1] for free in sockets))
PY
)
cd "$folder"
venv/bin/granian --interface asgi --port "$first" --no-log application:application >log 2>&1 &
venv/bin/uvicorn --http h11 --port "$second" --log-level critical application:application &
output=$("$folder/venv/bin/python" - "$first" "$second" <<'PY'
import socket
import sys
import time


def version(port):
    for _ in range(300):
        try:
            client = socket.create_connection(("127.0.0.1", int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
    received = b""
    while part := client.recv(4096):
        received += part
    return received.partition(b"\r\n\r\n")[2].decode()


print("HTTP/1.0 request: granian", version(sys.argv[1]), end=", ")
print("uvicorn", version(sys.argv[2]))
PY
)
echo "$output"
[ "$output" = "HTTP/1.0 request: granian 1, uvicorn 1.0" ] || {
    echo "The behaviour changed: $output" >&2
    exit 1
}
