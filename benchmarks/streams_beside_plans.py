"""The effect of planning on streams.

    python -m benchmarks.streams_beside_plans [--streams 100] [--seconds 10]

A gateway of one process stands before an engine that sends a chunk every 50 ms. Printed: the gaps
between chunks at the client, p99 and longest, alone and while folders are planned without pause,
and the time of /healthz. Target: 60 ms at p99. Load generator, engine and gateway are processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from tests.contract.process_harness import free_port
from tests.support.model_files import CONFIG, model, safetensors, write
from tests.support.served import Served, serve_models

KEY = "a-key-of-the-streams-that-nobody-guesses"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
REQUEST = (
    f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
).encode() + BODY
INTERVAL_MS = 50
PROXIES = Path(__file__).parent / "proxies"


def config_of_16_mb(folder: Path) -> None:
    start = json.dumps(CONFIG)[:-1] + ', "x": ['
    write(
        folder,
        {"config.json": (start + "[]," * ((16 * 2**20 - len(start) - 10) // 3) + "1]}").encode()},
    )


def index_of_100_mb(folder: Path) -> None:
    entry = (
        f'"model.layers.{number:09d}.mlp.weight": "model.safetensors", '
        for number in range(1_720_000)
    )
    index = '{"weight_map": {' + "".join(entry) + '"x": "model.safetensors"}}'
    write(folder, {**model(), "model.safetensors.index.json": index.encode()})


def headers_of_many_tensors(folder: Path) -> None:
    """1.3 million tensors in 13 files."""
    files = {
        f"model-{shard:05d}-of-00013.safetensors": {
            f"layers.{shard}.{n}.w": (1,) for n in range(100_000)
        }
        for shard in range(13)
    }
    write(
        folder,
        {
            "config.json": model()["config.json"],
            **{name: safetensors(shapes) for name, shapes in files.items()},
        },
    )


def a_model(folder: Path) -> None:
    write(folder, model())


FOLDERS: dict[str, Callable[[Path], None]] = {
    "a small model": a_model,
    "a config.json of 16 MB": config_of_16_mb,
    "an index of 100 MB": index_of_100_mb,
    "headers of 1.3 million tensors": headers_of_many_tensors,
}


def stream(port: int, streams: int, pipe: Connection) -> None:
    """A process of its own. Sends the gaps that it saw since it was asked the last time, whenever
    it is asked."""
    gaps: list[float] = []

    async def open_stream() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        last = None
        while piece := await reader.read(65536):
            if b"data:" in piece:
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
        writer.close()

    async def run() -> None:
        tasks = [asyncio.create_task(open_stream()) for _ in range(streams)]
        while await asyncio.to_thread(pipe.recv):
            pipe.send(list(gaps))
            gaps.clear()
        for task in tasks:
            task.cancel()

    asyncio.run(run())


class Clients:
    def __init__(self, port: int, streams: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(
            target=stream, args=(port, streams, theirs), daemon=True
        )
        self._process.start()

    def gaps(self) -> list[float]:
        self._pipe.send(True)
        gaps: list[float] = self._pipe.recv()
        return gaps

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join(5)
        self._process.kill()


def print_gaps(what: str, gaps: list[float], health: list[float], plans: str) -> None:
    ordered, healthy = sorted(gaps), sorted(health)
    p50, p99 = (ordered[int(share * len(ordered))] * 1000 for share in (0.5, 0.99))
    print(
        f"{what:34} p50 {p50:5.1f} ms, p99 {p99:5.1f} ms, longest {ordered[-1] * 1000:6.1f} ms of"
        f" {len(ordered):6} gaps; /healthz p50 {statistics.median(healthy) * 1000:4.1f} ms, longest"
        f" {healthy[-1] * 1000:6.1f} ms; {plans}",
        flush=True,
    )


async def measure_beside_plans(
    gateway: Served, clients: Clients, source: Path | None, seconds: float
) -> None:
    health: list[float] = []
    answers: list[str] = []
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=headers, trust_env=False, timeout=300
    ) as client:

        async def ping() -> None:
            while True:
                began = time.monotonic()
                (await client.get("/healthz")).raise_for_status()
                health.append(time.monotonic() - began)
                await asyncio.sleep(0.02)

        pings = asyncio.create_task(ping())
        clients.gaps()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if source is None:
                await asyncio.sleep(seconds)
                continue
            began = time.monotonic()
            answer = await client.post(
                "/admin/plan", json={"source": str(source), "hardware": "2x3090"}
            )
            said = "ok" if answer.status_code == 200 else answer.json()["error"]["message"]
            answers.append(f"{answer.status_code} in {time.monotonic() - began:.1f} s: {said[:90]}")
        gaps = clients.gaps()
        pings.cancel()
    print_gaps(
        source.name if source else "alone",
        gaps,
        health,
        f"{len(answers)} plans, the last {answers[-1]}" if answers else "",
    )


async def run(streams: int, seconds: float, folder: Path) -> None:
    port = free_port()
    engine = await asyncio.create_subprocess_exec(
        sys.executable, str(PROXIES / "fake_engine.py"), str(port)
    )
    try:
        chunks = int(seconds * 100 * 1000 / INTERVAL_MS)
        async with httpx.AsyncClient(
            trust_env=False, transport=httpx.AsyncHTTPTransport(retries=10)
        ) as client:
            (
                await client.get(
                    f"http://127.0.0.1:{port}/pace?chunks={chunks}&interval_ms={INTERVAL_MS}"
                )
            ).raise_for_status()
        with serve_models(folder, {"m": [f"http://127.0.0.1:{port}/v1"]}, KEY) as gateway:
            clients = Clients(gateway.port, streams)
            await asyncio.sleep(2)
            await measure_beside_plans(gateway, clients, None, seconds)
            for name, make in FOLDERS.items():
                make(folder / name)
                await measure_beside_plans(gateway, clients, folder / name, seconds)
            await measure_beside_plans(gateway, clients, None, seconds)
            print(f"the gateway takes {gateway.resident_mib:.0f} MiB", flush=True)
            clients.close()
    finally:
        engine.kill()
        await engine.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    print(
        f"{options.streams} streams of a chunk each {INTERVAL_MS} ms; load of this machine"
        f" {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(options.streams, options.seconds, Path(folder)))


if __name__ == "__main__":
    main()
