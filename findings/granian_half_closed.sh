#!/usr/bin/env bash
# granian 2.8.9: a client that closes its sending side after the request gets no answer, only the
# end of the connection. TCP allows that, and plain clients do it (printf ... | nc -N, health
# checks, scripts with shutdown). uvicorn 0.54.0 with both of its parsers and hypercorn 0.18.0
# answer. Without the half close, granian answers as well.
# Seen on 2026-11-29: granian open 200, granian half closed nothing, uvicorn h11 200, uvicorn
# httptools 200, hypercorn 200
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'granian==2.8.9' 'uvicorn==0.54.0' 'h11==0.16.0' \
    'httptools==0.9.0' 'hypercorn==0.18.0'
output=$("$folder/venv/bin/python" - <<'PY'
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

folder = tempfile.mkdtemp(dir=pathlib.Path(sys.prefix).parent)
pathlib.Path(folder, "sample.py").write_text(
    """async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": kind + ".complete"})
            if kind == "lifespan.shutdown":
                return
    body = scope["path"].encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
"""
)


def answers(command, ask):
    """`ask(port)` against a server that is started for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(port=port) for word in command.split()]
    environment = os.environ | {"PYTHONPATH": folder}
    server = subprocess.Popen(
        [sys.executable, "-m", *words], env=environment, stdout=-3, stderr=-3, cwd=folder
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                return ask(port)
            except ConnectionRefusedError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        server.terminate()
        server.wait()


def status(half_closed):
    def ask(port):
        with socket.create_connection(("127.0.0.1", port), 60) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n")
            if half_closed:
                client.shutdown(socket.SHUT_WR)
            data = b"".join(iter(lambda: client.recv(65536), b""))
        return data.split()[1].decode() if data else "nothing"

    return ask


granian = "granian sample:app --interface asgi --log-level critical --port {port}"
uvicorn = "uvicorn sample:app --log-level critical --port {port} --http "
hypercorn = "hypercorn sample:app --log-level critical -b 127.0.0.1:{port}"
print("granian open", answers(granian, status(half_closed=False)), end=", ")
print("granian half closed", answers(granian, status(half_closed=True)), end=", ")
print("uvicorn h11", answers(uvicorn + "h11", status(half_closed=True)), end=", ")
print("uvicorn httptools", answers(uvicorn + "httptools", status(half_closed=True)), end=", ")
print("hypercorn", answers(hypercorn, status(half_closed=True)))
PY
)
echo "$output"
expected="granian open 200, granian half closed nothing, uvicorn h11 200, uvicorn httptools 200,"
expected+=" hypercorn 200"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
