"""The cost of many keys and many models.

    python -m benchmarks.many [--keys 5000 --models 500]

All models are endpoints of one engine. Printed: the times of the start, of listings and of
requests, and the share of a core that an idle gateway uses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.local.controller.fleet.test_fleet import ADMIN, fill
from tests.support.served import Served, served
from tests.support.upstream import Call, Upstream

IDLE_S = 10
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(gateway: Served) -> float:
    fields = Path(f"/proc/{gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def best_ms(ask: Callable[[], Awaitable[Any]]) -> float:
    took = []
    for _ in range(200):
        began = time.perf_counter()
        await ask()
        took.append(time.perf_counter() - began)
    return min(took) * 1000


async def measure(keys: int, models: int) -> None:
    names = json.dumps(
        {"object": "list", "data": [{"id": f"m{number}"} for number in range(models)]}
    ).encode()

    async def engine(call: Call) -> None:
        await call.reply(names if call.head[0].startswith(b"GET") else b'{"choices":[]}')

    with tempfile.TemporaryDirectory() as folder:
        async with Upstream(engine) as upstream:
            fill(Path(folder) / "data", upstream.url, keys, models)
            began = time.monotonic()
            running = served(Path(folder), {}, ADMIN)
            gateway = await asyncio.to_thread(running.__enter__)
            started_s = time.monotonic() - began
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=60
            ) as client:
                client.headers["authorization"] = f"Bearer {ADMIN}"
                while {  # noqa: ASYNC110
                    one["state"] for one in (await client.get("/admin/models")).json()["data"]
                } - {"ready"}:
                    await asyncio.sleep(0.1)
                ready_s, spent = time.monotonic() - began, cpu_s(gateway)
                await asyncio.sleep(IDLE_S)
                idle = (cpu_s(gateway) - spent) / IDLE_S
                last = {"authorization": f"Bearer key-{keys - 1}"}
                body = {"model": f"m{models - 1}", "messages": []}
                request = await best_ms(
                    lambda: client.post("/v1/chat/completions", json=body, headers=last)
                )
                lists = [
                    await best_ms(partial(client.get, path))
                    for path in ("/v1/models", "/admin/models", "/admin/keys")
                ]
            print(
                f"{keys:>5} keys {models:>4} models   start {started_s:5.1f} s   all ready"
                f" {ready_s:5.1f} s   idle {idle:6.1%} of a core   {gateway.resident_mib:4.0f} MiB "
                f"  request {request:5.2f} ms   /v1/models {lists[0]:5.1f} ms   /admin/models"
                f" {lists[1]:5.1f} ms   /admin/keys {lists[2]:5.1f} ms",
                flush=True,
            )
            await asyncio.to_thread(running.__exit__, None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=5000)
    parser.add_argument("--models", type=int, default=500)
    options = parser.parse_args()
    for keys, models in ((1, 1), (options.keys, 1), (1, options.models)):
        asyncio.run(measure(keys, models))


if __name__ == "__main__":
    main()
