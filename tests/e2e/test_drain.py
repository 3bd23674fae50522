"""SIGTERM under load: nothing new begins, what can finish in time does, the rest is told; the engines go on running."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.running import model_folder

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

STREAMS = 200


async def test_streams_finish_or_are_told_when_the_gateway_is_stopped(tmp_path: Path) -> None:
    gateway = scripted_gateway(tmp_path, ["--tokens-per-second", "10"], FITSERVE_STOP_GRACE_S="6")
    gateway.start()
    source = str(model_folder(tmp_path / "model"))
    gateway.client.post("/admin/models", json={"name": "m", "source": source, "engines": [ENGINE]})
    gateway.until("m", "ready", 30)
    before = engines(gateway)
    begun = asyncio.Semaphore(0)

    async def stream(client: httpx.AsyncClient, tokens: int) -> str:
        body = {"model": "m", "prompt": "hi", "max_tokens": tokens, "stream": True}
        text = ""
        async with client.stream("POST", f"{gateway.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for chunk in response.aiter_text():
                if not text:
                    begun.release()
                text += chunk
        return text

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=60) as client:
        short = [asyncio.create_task(stream(client, 25)) for _ in range(STREAMS // 2)]
        long = [asyncio.create_task(stream(client, 2000)) for _ in range(STREAMS // 2)]
        for _ in range(STREAMS):
            await asyncio.wait_for(begun.acquire(), 30)
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{gateway.url}/healthz")
        finished = await asyncio.gather(*short)
        told = await asyncio.gather(*long)
    assert await asyncio.to_thread(gateway.process.wait, 20) == 0
    assert all(text.endswith("data: [DONE]\n\n") for text in finished)
    assert not any("[DONE]" in text for text in told)
    assert all('"error"' in text.rstrip().rpartition("\n\n")[2] for text in told)
    assert engines(gateway) == before
    gateway.process = None
    gateway.close()
