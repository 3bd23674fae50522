"""SIGTERM under load: nothing new begins, short answers finish, the rest is told; the engines go on
running."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, stream, workers
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("processes", [1, 2])]

STREAMS = 200


@contextlib.asynccontextmanager
async def stopped_under_streams(
    folder: Path, processes: int, grace_s: float
) -> AsyncIterator[asyncio.Future[list[str]]]:
    """The ends of answers to clients that had begun, and go no further until the file `hold` is
    gone, when the gateway was told to stop. Checks afterwards that it did, and let the engine
    run."""
    hold = folder / "hold"
    settings = {"FITSERVE_STOP_GRACE_S": str(grace_s), "FITSERVE_WORKERS": str(processes)}
    with contextlib.closing(scripted_gateway(folder, ["--hold", str(hold)], **settings)) as gateway:
        gateway.start()
        source = str(model_folder(folder / "model"))
        gateway.client.post(
            "/admin/models", json={"name": "m", "source": source, "engines": [ENGINE]}
        )
        gateway.until("m", "ready")
        engines_before = engines(gateway)
        hold.touch()
        semaphore = asyncio.Semaphore(0)
        async with httpx.AsyncClient(
            trust_env=False, limits=httpx.Limits(max_connections=None), timeout=4 * hang_s()
        ) as client:
            results = asyncio.gather(*(stream(client, gateway, semaphore) for _ in range(STREAMS)))
            for _ in range(STREAMS):
                await asyncio.wait_for(semaphore.acquire(), hang_s())
            assert gateway.process is not None
            gateway.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_for, "nothing new begins", lambda: refuses(gateway))
            yield results
        assert await asyncio.to_thread(gateway.process.wait, hang_s()) == 0
        assert not workers(gateway)
        assert engines(gateway) == engines_before


def refuses(gateway: Gateway) -> bool:
    """Whether no connection is taken any more."""
    try:
        httpx.get(f"{gateway.url}/healthz", trust_env=False, timeout=hang_s())
    except httpx.ConnectError:
        return True
    return False


async def test_a_stream_that_ends_within_the_grace_time_ends_whole(
    tmp_path: Path, processes: int
) -> None:
    async with stopped_under_streams(tmp_path, processes, grace_s=4 * HANG_S) as texts:
        # A gateway that does not wait would have cut them off by then.
        await asyncio.sleep(2)
        assert not texts.done()
        (tmp_path / "hold").unlink()
        assert all(text.endswith("data: [DONE]\n\n") for text in await texts)


async def test_a_stream_beyond_the_grace_time_ends_with_an_error(
    tmp_path: Path, processes: int
) -> None:
    async with stopped_under_streams(tmp_path, processes, grace_s=1) as texts:
        for text in await texts:
            assert "[DONE]" not in text
            assert '"error"' in text.rstrip().rpartition("\n\n")[2], text[-300:]
