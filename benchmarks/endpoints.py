"""Many endpoints, half of them unreachable.

    python -m benchmarks.endpoints [--endpoints 1000] [--seconds 60]

Prints the gateway's cost of watching them as a share of a core, and the time of /healthz: from the
moment they are added, and once their states are known. Half of the unreachable endpoints refuse
connections, half accept them and stay silent.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PER_MODEL = 20
TICKS = os.sysconf("SC_CLK_TCK")
EVERY_S = 0.02
SETTLES_S = 60.0


def answer_all(listener: socket.socket) -> None:
    """A process that is all engines that answer."""
    body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        await server.serve_forever()

    asyncio.run(main())


def call(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(
            method,
            path,
            json.dumps(body) if body else None,
            {"content-type": "application/json"} if body else {},
        )
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def watch(port: int, pid: int, seconds: float) -> tuple[float, list[float]]:
    """The share of a core, and the milliseconds that each /healthz took."""
    took: list[float] = []
    began, before = time.monotonic(), cpu_s(pid)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while time.monotonic() - began < seconds:
        start_s = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        took.append((time.perf_counter() - start_s) * 1000)
        time.sleep(EVERY_S)
    connection.close()
    return (cpu_s(pid) - before) / (time.monotonic() - began), took


def tell(what: str, share: float, took: list[float], asking: float) -> None:
    p99 = statistics.quantiles(took, n=100)[98]
    print(
        f"{what:24} {share - asking:7.2%} of a core   /healthz p50 {statistics.median(took):5.1f}"
        f"  p99 {p99:5.1f}  most {max(took):5.1f} ms",
        flush=True,
    )


def measure(port: int, pid: int, urls: list[str], seconds: float) -> None:
    # The cost of the /healthz requests is not a cost of watching.
    asking, took = watch(port, pid, 5)
    tell("without endpoints", asking, took, 0)
    for first in range(0, len(urls), PER_MODEL):
        status, answer = call(
            port,
            "POST",
            "/admin/models",
            {"name": f"m{first}", "endpoints": urls[first : first + PER_MODEL]},
        )
        if status >= 300:
            raise SystemExit(f"a model could not be added: {answer.decode()}")
    tell("in the first minute", *watch(port, pid, SETTLES_S), asking)
    tell("after it", *watch(port, pid, seconds), asking)
    _, shown = call(port, "GET", "/admin/models")
    details = [model["detail"] for model in json.loads(shown)["data"]]
    print(
        f"to reach: 5 % of a core, /healthz p99 20 ms. The last of {len(details)} models says:"
        f" {details[-1][:100]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoints", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as data, socket.create_server(("127.0.0.1", 0),
        backlog=4096) as good, socket.create_server(("127.0.0.1", 0)) as silent:  # fmt: skip
        with (
            socket.create_server(("127.0.0.1", 0)) as refused,
            socket.create_server(("127.0.0.1", 0)) as ours,
        ):
            ports = [one.getsockname()[1] for one in (good, refused, good, silent)]
            port = ours.getsockname()[1]
        urls = [f"http://127.0.0.1:{ports[k % 4]}/e{k}/v1" for k in range(options.endpoints)]
        engines = multiprocessing.Process(target=answer_all, args=(good,), daemon=True)
        engines.start()
        environment = {
            **os.environ,
            "FITSERVE_PORT": str(port),
            "FITSERVE_DATA_DIR": data,
            "FITSERVE_HOST_KIND": "process",
        }
        gateway = subprocess.Popen(
            [sys.executable, "-m", "gateway.__main__", "serve"],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        try:
            while True:
                try:
                    call(port, "GET", "/healthz")
                    break
                except OSError:
                    time.sleep(0.05)
            measure(port, gateway.pid, urls, options.seconds)
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait()
            engines.terminate()


if __name__ == "__main__":
    main()
