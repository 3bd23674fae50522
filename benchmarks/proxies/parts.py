"""The measurements of one started target: figures by name, of its whole process tree."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
from targets import KEY

LOAD = str(Path(__file__).with_name("load.py"))
SETTLE_S = 1.0

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Size:
    """How much a run does. Seconds are wall time of one measurement."""

    rounds: int
    request_s: float
    latency_s: float
    streams: int
    many: int
    many_s: float
    idle: int
    bodies: int


FULL = Size(
    rounds=5, request_s=3, latency_s=2, streams=200, many=1000, many_s=30, idle=5000, bodies=30
)
QUICK = Size(
    rounds=3, request_s=1, latency_s=1, streams=100, many=300, many_s=6, idle=1000, bodies=10
)

# Parts that cost a hundred times as much per chunk get fewer streams, or one round would take
# minutes.
FEWER_STREAMS = {"litellm": 20}


@dataclass
class Subject:
    """A started target and the fake engine behind it. `error` is the first thing that went wrong in
    any part."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    engine: int
    error: str | None = None

    def load(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, LOAD, self.url, *arguments],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "FITSERVE_BENCH_KEY": KEY},
        )
        figures: dict[str, Any] = json.loads(done.stdout)
        self.error = self.error or figures["error"]
        return figures

    def cpu_s(self) -> float:
        return processes.cpu_s(self.process.pid)

    def pace(self, chunks: int, interval_ms: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.engine, timeout=5)
        connection.request("GET", f"/pace?chunks={chunks}&interval_ms={interval_ms}")
        connection.getresponse().read()
        connection.close()


def request(subject: Subject, size: Size) -> Figures:
    """32 connections, one request after the other on each."""
    before = subject.cpu_s()
    document = subject.load("plain", "--connections", "32", "--seconds", str(size.request_s))
    used = subject.cpu_s() - before
    return {
        "request_us": used / document["good"] * 1e6 if document["good"] else None,
        "requests_per_s": document["good"] / document["wall_s"],
        "request_errors": document["errors"],
    }


def latency(subject: Subject, size: Size) -> Figures:
    """A connection."""
    document = subject.load("plain", "--connections", "1", "--seconds", str(size.latency_s))
    return {
        "latency_p50_ms": document["p50_ms"],
        "latency_p99_ms": document["p99_ms"],
        "latency_errors": document["errors"],
    }


def chunk(subject: Subject, size: Size) -> Figures:
    """Streams side by side, 100 chunks each, 20 ms apart. The cost of opening a stream is in it,
    shared by its 102 events."""
    subject.pace(100, 20)
    streams = min(size.streams, FEWER_STREAMS.get(subject.name, size.streams))
    before = subject.cpu_s()
    document = subject.load("stream", "--streams", str(streams), "--chunks", "100")
    used = subject.cpu_s() - before
    return {
        "chunk_us": used / document["chunks"] * 1e6 if document["chunks"] else None,
        "chunk_first_p50_ms": document["first_p50_ms"],
        "chunk_errors": document["errors"],
    }


def streams(subject: Subject, size: Size) -> Figures:
    """Many streams at 20 chunks a second each. They get twice the time they need; what is not done
    then is an error."""
    chunks = round(size.many_s * 20)
    subject.pace(chunks, 50)
    before = subject.cpu_s()
    with processes.Peak(subject.process.pid) as peak:
        deadline = size.many_s * 2 + 5
        document = subject.load(
            "stream",
            "--streams",
            str(size.many),
            "--chunks",
            str(chunks),
            "--deadline",
            str(deadline),
        )
    return {
        "streams_errors": document["errors"],
        "streams_rss_mib": peak.mib,
        "streams_cores": (subject.cpu_s() - before) / document["wall_s"],
        "streams_p99_s": document["p99_ms"] / 1000 if document["p99_ms"] else None,
    }


def idle(subject: Subject, size: Size) -> Figures:
    """Streams that had one chunk and wait for the next. As many as are open after 40 s."""
    subject.load("plain", "--count", "200", "--seconds", "10", "--connections", "8")
    subject.pace(2, 3_600_000)
    time.sleep(SETTLE_S)
    before = processes.resident_mib(subject.process.pid)
    room = (processes.raise_file_limit() - 200) // 2
    wanted = min(size.idle, room)
    client = subprocess.Popen(
        [sys.executable, LOAD, subject.url, "idle", "--streams", str(wanted), "--deadline", "40"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "FITSERVE_BENCH_KEY": KEY},
    )
    assert client.stdout is not None
    document = json.loads(client.stdout.readline())
    subject.error = subject.error or document["error"]
    time.sleep(SETTLE_S)
    used = processes.resident_mib(subject.process.pid) - before
    client.communicate()
    return {
        "idle_open": document["open"],
        "idle_wanted": size.idle,
        "idle_kib": used * 1024 / document["open"] if document["open"] else None,
    }


def body(subject: Subject, size: Size) -> Figures:
    """10 MiB requests, one after the other, at most 20 s of them."""
    subject.load("plain", "--count", "200", "--seconds", "10", "--connections", "8")
    before = processes.resident_mib(subject.process.pid)
    with processes.Peak(subject.process.pid) as peak:
        document = subject.load(
            "plain", "--count", str(size.bodies), "--seconds", "20", "--body-bytes", str(10 * 2**20)
        )
    return {
        "body_p50_ms": document["p50_ms"],
        "body_growth_mib": peak.mib - before,
        "body_errors": document["errors"],
    }


IN_TURN = {"request": request, "chunk": chunk, "latency": latency}
"""Measured round by round, every target in turn, so that a noisy minute meets them all."""

ALONE = {"streams": streams, "idle": idle, "body": body}
"""Measured once, each on a freshly started target with nothing else running, because they look at
memory."""
