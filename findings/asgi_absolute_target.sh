#!/usr/bin/env bash
# uvicorn 0.54.0 with h11 0.16.0, and hypercorn 0.18.0: a request line with the whole URL, which
# RFC 9112 (3.2.2) obliges servers to accept, gives the application the URL as its path. No route
# is found, and the client, often one behind a proxy, gets a 404 for a page that is there. uvicorn
# with httptools 0.9.0 and granian 2.8.9 give the path.
# Seen on 2026-11-29: uvicorn h11 http://host/v1/models, hypercorn http://host/v1/models, uvicorn
# httptools /v1/models, granian /v1/models
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'uvicorn==0.54.0' 'h11==0.16.0' 'httptools==0.9.0' \
    'hypercorn==0.18.0' 'granian==2.8.9'
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


def path(port):
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(
            b"GET http://host/v1/models HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n"
        )
        data = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    return body.decode()


uvicorn = "uvicorn sample:app --log-level critical --port {port} --http "
commands = {
    "uvicorn h11": uvicorn + "h11",
    "hypercorn": "hypercorn sample:app --log-level critical -b 127.0.0.1:{port}",
    "uvicorn httptools": uvicorn + "httptools",
    "granian": "granian sample:app --interface asgi --log-level critical --port {port}",
}
print(", ".join(f"{name} {answers(command, path)}" for name, command in commands.items()))
PY
)
echo "$output"
expected="uvicorn h11 http://host/v1/models, hypercorn http://host/v1/models, uvicorn httptools"
expected+=" /v1/models, granian /v1/models"
[ "$output" = "$expected" ] || { echo "The behaviour changed: $output" >&2; exit 1; }
