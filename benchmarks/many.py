"""The cost of many keys and many models.

    python -m benchmarks.many [--keys 5000 --models 2000]

The models are endpoints of one engine, or models that their owner has stopped. Printed: the times
of the start, of listings and of requests, the CPU time of an addition, and the share of a core that
an idle gateway uses.
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

from gateway.domain import Wish
from gateway.store.recovery import open_store
from tests.local.controller.fleet.test_fleet import ADMIN, fill
from tests.support.running import model_folder
from tests.support.served import Served, serve_models
from tests.support.upstream import Call, Upstream

IDLE_S = 10
ADDITIONS = 50
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


def stop_all(data: Path, models: int) -> None:
    """Make stopped models of a folder of the endpoints in the database."""
    source = model_folder(data.parent / "model")
    store = open_store(data / "fitserve.db")
    for number in range(models):
        store.save_wish(Wish(name=f"m{number}", source=str(source)))
        store.set_stopped(f"m{number}", is_stopped=True)
    store.close()


async def addition_ms(client: httpx.AsyncClient, gateway: Served, url: str) -> float:
    """Milliseconds of CPU time for each added endpoint, with all that it causes in a second."""
    spent = cpu_s(gateway)
    for number in range(ADDITIONS):
        body = {"name": f"added{number}", "endpoint": f"{url}/v1"}
        (await client.post("/admin/models", json=body)).raise_for_status()
    await asyncio.sleep(1)
    return (cpu_s(gateway) - spent) / ADDITIONS * 1000


async def measure(keys: int, models: int, state: str) -> None:
    names = json.dumps(
        {"object": "list", "data": [{"id": f"m{number}"} for number in range(models)]}
    ).encode()

    async def engine(call: Call) -> None:
        await call.reply(names if call.head[0].startswith(b"GET") else b'{"choices":[]}')

    with tempfile.TemporaryDirectory() as folder:
        async with Upstream(engine) as upstream:
            fill(Path(folder) / "data", upstream.url, keys, models)
            if state == "stopped":
                stop_all(Path(folder) / "data", models)
            began = time.monotonic()
            running = serve_models(Path(folder), {}, ADMIN)
            gateway = await asyncio.to_thread(running.__enter__)
            started_s = time.monotonic() - began
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=60
            ) as client:
                client.headers["authorization"] = f"Bearer {ADMIN}"
                while {  # noqa: ASYNC110
                    one["state"] for one in (await client.get("/admin/models")).json()["data"]
                } - {state}:
                    await asyncio.sleep(0.1)
                ready_s, spent = time.monotonic() - began, cpu_s(gateway)
                await asyncio.sleep(IDLE_S)
                idle = (cpu_s(gateway) - spent) / IDLE_S
                last = {"authorization": f"Bearer key-{keys - 1}"}
                body = {"model": f"m{models - 1}", "messages": []}
                request = await best_ms(
                    lambda: client.post("/v1/chat/completions", json=body, headers=last)
                )
                added = await addition_ms(client, gateway, upstream.url)
                lists = [
                    await best_ms(partial(client.get, path))
                    for path in ("/v1/models", "/admin/models", "/admin/keys")
                ]
            print(
                f"{keys:>5} keys {models:>4} models {state:>7}   start {started_s:5.1f} s   all"
                f" so {ready_s:5.1f} s   idle {idle:6.1%} of a core   {gateway.resident_mib:4.0f}"
                f" MiB   request {request:5.2f} ms   addition {added:5.1f} ms   /v1/models"
                f" {lists[0]:5.1f} ms   /admin/models {lists[1]:5.1f} ms   /admin/keys"
                f" {lists[2]:5.1f} ms",
                flush=True,
            )
            await asyncio.to_thread(running.__exit__, None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=5000)
    parser.add_argument("--models", type=int, default=2000)
    options = parser.parse_args()
    many = options.keys, options.models
    for keys, models, state in (
        (1, 1, "ready"),
        (options.keys, 1, "ready"),
        (*many, "ready"),
        (*many, "stopped"),
    ):
        asyncio.run(measure(keys, models, state))


if __name__ == "__main__":
    main()
