"""Memory and processor time of a gateway that runs batches of several sizes.

    python -m benchmarks.batches [--lines 1000 100000] [--workers 1]

An engine without delay runs as a process of its own. Printed for each batch: the bytes of
its input, the most memory of the gateway's process over that at rest, the processor time of a line
in microseconds (all processes of the gateway), and lines with no result or with two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from tests.support.batch_calls import CHAT, ENDS, batch_line
from tests.support.served import Served, serve_models, worker_pids
from tests.support.upstream import Call, Upstream

ANSWER = json.dumps(
    {
        "id": "c",
        "choices": [{"message": {"role": "assistant", "content": "word " * 100}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 100, "total_tokens": 200},
    }
).encode()
MODELS = b'{"object":"list","data":[{"id":"m"}]}'
PROMPT = "word " * 100


def engine(pipe: Connection) -> None:
    """The engine's process, which says its address."""

    async def script(call: Call) -> None:
        is_list = call.requests[-1].startswith(b"GET")
        call.requests.clear()
        await call.reply(MODELS if is_list else ANSWER)

    async def run() -> None:
        async with Upstream(script) as upstream:
            pipe.send(upstream.url)
            await asyncio.Event().wait()

    asyncio.run(run())


def peak_mib(pid: int) -> float:
    """The most memory of a process since `reset_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_batch(served: Served, folder: Path, lines: int) -> dict[str, Any]:
    path = folder / "input.jsonl"
    with path.open("wb") as file:
        for number in range(lines):
            file.write(batch_line(f"line-{number}", model="m", user=PROMPT))
    pids = [served.process.pid, *worker_pids(folder / "data")]
    resting_mib, began_s = served.resident_mib, time.monotonic()
    for pid in pids:
        reset_peak(pid)
    used_s = cpu_s(pids)
    with httpx.Client(base_url=served.url, trust_env=False, timeout=600) as client:
        with path.open("rb") as file:
            answer = client.post(
                "/v1/files", files={"purpose": (None, "batch"), "file": ("input.jsonl", file)}
            )
        input_id = answer.raise_for_status().json()["id"]
        body = {"input_file_id": input_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=body).raise_for_status().json()
        while batch["status"] not in ENDS:
            time.sleep(0.2)
            batch = client.get(f"/v1/batches/{batch['id']}").json()
        counts: Counter[str] = Counter()
        for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            with client.stream("GET", f"/v1/files/{file_id}/content") as content:
                counts.update(json.loads(line)["custom_id"] for line in content.iter_lines())
    return {
        "lines": lines,
        "status": batch["status"],
        "failed": batch["request_counts"]["failed"],
        "input MiB": round(path.stat().st_size / 2**20, 1),
        "at rest MiB": round(resting_mib, 1),
        "most MiB over rest": round(peak_mib(served.process.pid) - resting_mib, 1),
        "most MiB of workers": [round(peak_mib(pid), 1) for pid in pids[1:]],
        "us of a line": round((cpu_s(pids) - used_s) / lines * 1e6),
        "seconds": round(time.monotonic() - began_s, 1),
        "lost": lines - len(counts),
        "twice": sum(count > 1 for count in counts.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--workers", default="1")
    args = parser.parse_args()
    pipe, engine_pipe = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=engine, args=(engine_pipe,))
    process.start()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            serve_models(
                Path(folder), {"m": [f"{pipe.recv()}/v1"]}, FITSERVE_WORKERS=args.workers
            ) as served,
        ):
            for lines in args.lines:
                print(json.dumps(run_batch(served, Path(folder), lines)), flush=True)
    finally:
        process.kill()


if __name__ == "__main__":
    main()
