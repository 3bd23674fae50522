"""`python -m tests.support.alone PORT PROGRAM...`: a gateway in a network that has nothing but
loopback. Prints the state of its model `m` once that is ready or has no way to be, and its answer.
Prints the error for a repository that is not here. The gateway and its engines end with it.
"""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

import httpx

from tests.support.patience import hang_s

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def ask_alone(client: httpx.Client) -> dict[str, Any]:
    deadline = time.monotonic() + hang_s()
    view: dict[str, Any] = {}
    while (
        view.get("state") not in ("ready", "no_plan", "quarantined") and time.monotonic() < deadline
    ):
        time.sleep(0.1)
        try:
            view = client.get("/admin/models/m").json()
        except httpx.HTTPError:
            continue
    answer = client.post(
        "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
    ).json()
    add_answer = client.post("/admin/models", json={"name": "other", "source": "org/other"}).json()
    client.delete("/admin/models/m")
    while client.get("/admin/models").json()["data"] and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"view": {**view, "decision": None}, "answer": answer, "add": add_answer}


def main() -> None:
    port, *program = sys.argv[1:]
    loopback_up()
    gateway = subprocess.Popen([sys.executable, *program])
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=hang_s()
        ) as client:
            sys.stdout.write(json.dumps(ask_alone(client)))
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(hang_s())


if __name__ == "__main__":
    main()
