"""An engine is killed under open streams, again and again. `python -m tests.e2e.engine_deaths --rounds 20` prints the figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.e2e.conftest import Gateway
from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.running import model_folder

STREAMS = 100


async def _stream(client: httpx.AsyncClient, url: str, begun: asyncio.Semaphore) -> tuple[str, float]:
    """What came, and when the connection ended."""
    body = {"model": "m", "prompt": "hi", "max_tokens": 3000, "stream": True}
    text = ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for chunk in response.aiter_text():
            if not text:
                begun.release()
            text += chunk
    return text, time.monotonic()


async def one_death(gateway: Gateway) -> dict[str, float]:
    """Seconds until every client was told, and until a new one was told to come back. Raises AssertionError."""
    begun = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=60) as client:
        tasks = [asyncio.create_task(_stream(client, gateway.url, begun)) for _ in range(STREAMS)]
        for _ in range(STREAMS):
            await asyncio.wait_for(begun.acquire(), 30)
        for pids in engines(gateway).values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        ended = await asyncio.gather(*tasks)
        answer = await client.post(f"{gateway.url}/v1/completions", json={"model": "m", "prompt": "hi"})
        refused = time.monotonic() - killed
        for text, _ in ended:
            assert "[DONE]" not in text
            assert '"error"' in text.rstrip().rpartition("\n\n")[2], text[-300:]
        # The engine's end may not be known yet to the route table; the client is told to come back either way.
        assert answer.status_code in (502, 503), answer.text
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) > 0
    return {"told": max(at for _, at in ended) - killed, "refused": refused}


async def deaths(folder: Path, rounds: int) -> list[dict[str, float]]:
    gateway = scripted_gateway(folder, ["--tokens-per-second", "20"])
    gateway.start()
    source = str(model_folder(folder / "model"))
    body = {"name": "m", "source": source, "engines": [ENGINE], "policy": {"max_attempts": 20}}
    gateway.client.post("/admin/models", json=body)
    figures = []
    for _ in range(rounds):
        await asyncio.to_thread(gateway.until, "m", "ready", 60)
        figures.append(await one_death(gateway))
        gateway.client.post("/admin/models/m/retry")
    gateway.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(deaths(Path(folder), args.rounds))
    slowest = {name: round(max(one[name] for one in figures), 3) for name in figures[0]}
    sys.stdout.write(json.dumps({"rounds": args.rounds, "streams": STREAMS, "slowest s": slowest}) + "\n")


if __name__ == "__main__":
    main()
