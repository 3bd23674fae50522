"""An engine is killed under open streams, again and again. `python -m tests.e2e.engine_deaths
--rounds 20` prints the figures."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder

STREAMS = 100
TOKENS, TOKENS_PER_S = 8000, 20
assert TOKENS / TOKENS_PER_S > 2 * HANG_S


async def _stream(
    client: httpx.AsyncClient, url: str, starts: asyncio.Semaphore
) -> tuple[str, float]:
    """The bytes that came, and the end of the connection."""
    body = {"model": "m", "prompt": "hi", "max_tokens": TOKENS, "stream": True}
    text = ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for chunk in response.aiter_text():
            if not text:
                starts.release()
            text += chunk
    return text, time.monotonic()


async def one_death(gateway: Gateway) -> dict[str, float]:
    """Seconds until every client was told, and until a new one was told to come back. Raises
    AssertionError.

    No engine is started meanwhile, and one that lived would go on for longer than clients wait.
    """
    semaphore = asyncio.Semaphore(0)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=hang_s()) as client:
        tasks = [
            asyncio.create_task(_stream(client, gateway.url, semaphore)) for _ in range(STREAMS)
        ]
        for _ in range(STREAMS):
            await asyncio.wait_for(semaphore.acquire(), hang_s())
        _kill(gateway)
        kill_time = time.monotonic()
        answers = await asyncio.wait_for(asyncio.gather(*tasks), hang_s())
        answer = await client.post(
            f"{gateway.url}/v1/completions", json={"model": "m", "prompt": "hi"}
        )
        refusal_s = time.monotonic() - kill_time
        for text, _ in answers:
            assert "[DONE]" not in text
            assert '"error"' in text.rstrip().rpartition("\n\n")[2], text[-300:]
        # The engine's end may not be known yet to the route table; the client is told to come back
        # either way.
        assert answer.status_code in (502, 503), answer.text
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) > 0
    return {"told": max(at for _, at in answers) - kill_time, "refused": refusal_s}


def _kill(gateway: Gateway) -> None:
    for pids in engines(gateway).values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def _first_death(gateway: Gateway) -> None:
    """After it the next engine is started at once; after the next one it is waited."""
    before = len(gateway.until("m", "ready")["attempts"])
    _kill(gateway)
    wait_for("another engine serves", lambda: len(gateway.until("m", "ready")["attempts"]) > before)


async def deaths(folder: Path, rounds: int) -> list[dict[str, float]]:
    figures = []
    # The next engine is started when it is asked for.
    new_scripted_gateway = scripted_gateway(
        folder,
        ["--tokens-per-second", str(TOKENS_PER_S)],
        FITSERVE_BACKOFF_S="3600",
        FITSERVE_BACKOFF_MAX_S="3600",
    )
    with contextlib.closing(new_scripted_gateway) as gateway:
        gateway.start()
        body = {"name": "m", "source": str(model_folder(folder / "model")), "engines": [ENGINE]}
        gateway.client.post("/admin/models", json=body | {"policy": {"max_attempts": 20}})
        for _ in range(rounds):
            await asyncio.to_thread(_first_death, gateway)
            figures.append(await one_death(gateway))
            await asyncio.to_thread(gateway.until, "m", "backing_off")
            gateway.client.post("/admin/models/m/retry")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(deaths(Path(folder), args.rounds))
    slowest = {name: round(max(figure[name] for figure in figures), 3) for name in figures[0]}
    sys.stdout.write(
        json.dumps({"rounds": args.rounds, "streams": STREAMS, "slowest s": slowest}) + "\n"
    )


if __name__ == "__main__":
    main()
