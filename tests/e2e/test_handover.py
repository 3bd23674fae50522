"""`fitserve` is replaced under load by a new process of itself: no connection is refused, no answer
breaks off, engines are adopted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.errors import SettingsError
from gateway.server.handover import request_takeover
from gateway.store.data_folder import lock
from tests.contract.process_harness import free_port
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, starts, stream, workers
from tests.support.paths import ROOT
from tests.support.patience import hang_s
from tests.support.running import model_folder

pytestmark = pytest.mark.anyio

STREAMS = 10
TOKENS = 50
CLIENTS = 6
ASK = {"model": "m", "prompt": "hi", "max_tokens": 2}


class Load:
    """Clients that ask again and again: half with a new connection each time, half with kept
    ones."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.answered = 0
        self.failed: list[str] = []
        self.streamed: list[tuple[int, bool]] = []  # lines, and whether the last one came
        self.is_stopping = False

    async def client(self, *, keeps: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=1 if keeps else 0)
        async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=hang_s()) as client:
            while not self.is_stopping:
                try:
                    answer = await client.post(f"{self.gateway.url}/v1/completions", json=ASK)
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                else:
                    self.answered += 1
                    if answer.status_code != 200:
                        self.failed.append(answer.text)
                await asyncio.sleep(0)

    async def streamer(self, client: httpx.AsyncClient) -> None:
        """One stream after the other, so that some are under way whenever something happens."""
        while not self.is_stopping:
            text = await stream(client, self.gateway, asyncio.Semaphore(0), TOKENS)
            self.streamed.append((text.count("data: {"), "[DONE]" in text))

    async def more(self, count: int) -> None:
        """Returns when so many more were answered."""
        goal = self.answered + count
        async with asyncio.timeout(hang_s()):
            while self.answered < goal:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def under_load(gateway: Gateway) -> AsyncIterator[Load]:
    load = Load(gateway)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=4 * hang_s()) as client:
        clients = [
            asyncio.create_task(load.client(keeps=bool(number % 2))) for number in range(CLIENTS)
        ]
        clients += [asyncio.create_task(load.streamer(client)) for _ in range(STREAMS)]
        try:
            await load.more(20)
            yield load
        finally:
            load.is_stopping = True
            await asyncio.gather(*clients)


@contextlib.contextmanager
def start_gateway(folder: Path, processes: int) -> Iterator[Gateway]:
    """A gateway with the model m, whose engine takes its time."""
    slow = ["--tokens-per-second", "50"]
    with contextlib.closing(
        scripted_gateway(folder, slow, FITSERVE_WORKERS=str(processes))
    ) as gateway:
        gateway.forks = False
        # An idle connection would be kept for a while.
        gateway.client.headers["connection"] = "close"
        gateway.start()
        source = str(model_folder(folder / "model"))
        gateway.client.post(
            "/admin/models", json={"name": "m", "source": source, "engines": [ENGINE]}
        )
        gateway.until("m", "ready")
        yield gateway


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
async def test_nothing_is_refused_and_no_stream_breaks_while_the_gateway_is_replaced(
    tmp_path: Path, before: int, after: int
) -> None:
    with start_gateway(tmp_path, before) as gateway:
        ran, old_process, old_workers = engines(gateway), gateway.process, workers(gateway)
        assert old_process is not None
        async with under_load(gateway) as load:
            gateway.command = ["-m", "gateway.__main__", "serve", "--take-over"]
            gateway.environment["FITSERVE_WORKERS"] = str(after)
            gateway.launch()
            assert await asyncio.to_thread(old_process.wait, hang_s()) == 0, (
                gateway.log.read_text()[-3000:]
            )
            await load.more(20)
        assert load.failed == [], gateway.log.read_text()[-2000:]
        assert {*load.streamed} == {(TOKENS + 1, True)}
        assert len(load.streamed) >= 2 * STREAMS
        assert engines(gateway) == ran
        assert starts(gateway) == 1
        assert not {*workers(gateway)} & {*old_workers}
        # The new one has the loop.
        assert gateway.client.delete("/admin/models/m").status_code == 202
        wait_for("no engine", lambda: not engines(gateway))


async def test_a_running_gateway_starts_the_one_that_replaces_it(tmp_path: Path) -> None:
    with start_gateway(tmp_path, 1) as gateway:
        ran, old_process = engines(gateway), gateway.process
        assert old_process is not None
        async with under_load(gateway) as load:
            old_process.send_signal(signal.SIGUSR2)
            assert await asyncio.to_thread(old_process.wait, hang_s()) == 0, (
                gateway.log.read_text()[-3000:]
            )
            await load.more(20)
        assert load.failed == []
        assert engines(gateway) == ran
        # It is nobody's child any more.
        os.kill(int((gateway.data / "gateway.lock").read_text()), signal.SIGTERM)
        wait_for("the end", lambda: not gateway.answers())
        gateway.process = None


def test_a_gateway_that_dies_before_serving_leaves_its_engines(
    tmp_path: Path,
) -> None:
    with start_gateway(tmp_path, 1) as gateway:
        ran, old_process = engines(gateway), gateway.process
        assert old_process is not None
        takeover = request_takeover(gateway.data)
        # It has not said that it goes on: nothing has changed.
        assert gateway.show("m")["state"] == "ready"
        with pytest.raises(SettingsError, match="Another gateway"):
            lock(gateway.data)
        takeover.wait_for_release()
        assert takeover.ready == ("m",)
        assert gateway.client.post("/v1/completions", json=ASK).status_code == 200
        assert gateway.client.get("/admin/models").status_code == 503
        takeover._end.close()
        assert old_process.wait(hang_s()) == 1
        assert "no process has the control loop" in gateway.log.read_text()
        for listener in takeover.listeners:
            listener.close()
        os.close(takeover.lock)
        assert engines(gateway) == ran


def take_over(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A gateway that takes over the one of its environment, until it ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "gateway.__main__", "serve", "--take-over"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )


def test_another_address_or_a_missing_gateway_refuses_the_takeover_and_ends_nothing(
    tmp_path: Path,
) -> None:
    with start_gateway(tmp_path, 1) as gateway:
        other_environment = {**gateway.environment, "FITSERVE_PORT": str(free_port())}
        result = take_over(other_environment)
        assert result.returncode == 2, result.stderr
        assert "another address needs a restart" in result.stderr
        nobody = {**gateway.environment, "FITSERVE_DATA_DIR": str(tmp_path / "nobody")}
        result = take_over(nobody)
        assert result.returncode == 2, result.stderr
        assert "omit --take-over" in result.stderr
        assert gateway.show("m")["state"] == "ready"
