"""`fitserve serve` with several workers: what is shared, what is lost when one of its processes dies, and what is left afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.serve.sockets import short
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.running import model_folder

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

STREAMS = 100
ADMIN = "an-admin-key-of-the-settings-that-nobody-guesses"


def workers(gateway: Gateway) -> list[int]:
    """Pids, in no order; those of a gateway that is gone among them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if arguments[1:4] == [b"-m", b"gateway.serve.worker", os.fsencode(gateway.data)]:
                found.append(int(entry.name))
    return found


def connections(gateway: Gateway) -> Counter[int]:
    """Connections of clients by the pid of the worker that has them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if int(row[1].rpartition(":")[2], 16) == gateway.port and row[3] == "01"}
    found: Counter[int] = Counter()
    for pid in workers(gateway):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found[pid] += str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]") in inodes
    return found


@contextlib.contextmanager
def one_client_each(gateway: Gateway) -> Iterator[list[http.client.HTTPConnection]]:
    """A kept connection to every worker."""
    clients: list[http.client.HTTPConnection] = []
    try:
        while len(+connections(gateway)) < 2 or not clients:
            clients.append(http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10))
            clients[-1].connect()
            time.sleep(0.02)
        yield clients
    finally:
        for client in clients:
            client.close()


def complete(client: http.client.HTTPConnection, model: str, key: str = "") -> int:
    """The status of a short answer."""
    body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 1})
    client.request("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"} if key else {})
    response = client.getresponse()
    response.read()
    return response.status


@contextlib.contextmanager
def started(folder: Path, *flags: str, **settings: str) -> Iterator[Gateway]:
    """A gateway with two workers and the model m."""
    gateway = scripted_gateway(folder, flags, **{"FITSERVE_WORKERS": "2", "FITSERVE_STOP_GRACE_S": "6", **settings})
    if key := settings.get("FITSERVE_ADMIN_KEY"):
        gateway.client.headers["authorization"] = f"Bearer {key}"
    gateway.start()
    try:
        added = gateway.client.post(
            "/admin/models", json={"name": "m", "source": str(model_folder(folder / "model")), "engines": [ENGINE]}
        )
        assert added.status_code == 202, added.text
        gateway.until("m", "ready", 30)
        wait_for("two workers", lambda: len(workers(gateway)) == 2 and gateway.client.get("/v1/models/m").is_success, 5)
        yield gateway
    finally:
        gateway.close()
        wait_for("no worker is left", lambda: not workers(gateway), 10)
        assert not engines(gateway)


def metric(gateway: Gateway, name: str) -> float:
    lines = gateway.client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None), timeout=60)


async def stream(client: httpx.AsyncClient, gateway: Gateway, tokens: int, begun: asyncio.Semaphore) -> str:
    """What came, whether or not it broke off."""
    body = {"model": "m", "prompt": "hi", "max_tokens": tokens, "stream": True}
    text = ""
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        async with client.stream("POST", f"{gateway.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for chunk in response.aiter_text():
                if not text:
                    begun.release()
                text += chunk
    return text


async def test_a_killed_worker_loses_only_its_streams(tmp_path: Path) -> None:
    begun = asyncio.Semaphore(0)
    with started(tmp_path, "--tokens-per-second", "10") as gateway:
        async with client() as many:
            running = [asyncio.create_task(stream(many, gateway, 40, begun)) for _ in range(STREAMS)]
            for _ in range(STREAMS):
                await asyncio.wait_for(begun.acquire(), 30)
            # The kernel spreads them by a hash of their ports.
            held = connections(gateway)
            victim, other = workers(gateway)
            assert held[victim] + held[other] >= STREAMS
            assert min(held.values()) > STREAMS / 4
            counted = metric(gateway, "fitserve_requests_total")
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            wait_for("another worker", lambda: len(workers(gateway)) == 2 and victim not in workers(gateway), 2, 0.02)
            with one_client_each(gateway) as clients:
                assert {complete(one, "m") for one in clients} == {200}
            # Half of it where nothing else runs; one that starts needs a third of a second of CPU.
            assert time.monotonic() - killed < 4
            ended = await asyncio.gather(*running)
        done = sum(text.endswith("data: [DONE]\n\n") for text in ended)
        broken = sum("[DONE]" not in text for text in ended)
        assert done + broken == STREAMS
        # `connections` counts those of the client that asks for metrics and health too.
        assert held[victim] - 2 <= broken <= held[victim]
        assert min(done, broken) > STREAMS / 4
        wait_for("the rest counted", lambda: metric(gateway, "fitserve_requests_total") >= counted + done, 5)
        assert metric(gateway, "fitserve_requests_in_flight") == 0


def test_tables_reach_every_worker_at_once(tmp_path: Path) -> None:
    with started(tmp_path, FITSERVE_ADMIN_KEY=ADMIN) as gateway, one_client_each(gateway) as clients:

        def spread_s(model: str, key: str, status: int) -> float:
            """Between the first and the last worker that answers for `model` with `status`."""
            seen: dict[http.client.HTTPConnection, float] = {}
            until = time.monotonic() + 10
            while len(seen) < len(clients) and time.monotonic() < until:
                for one in clients:
                    if one not in seen and complete(one, model, key) == status:
                        seen[one] = time.monotonic()
            assert len(seen) == len(clients)
            return max(seen.values()) - min(seen.values())

        gateway.client.post("/admin/models", json={"name": "n", "endpoints": ["http://127.0.0.1:9/v1"]})
        assert spread_s("n", ADMIN, 503) < 0.2
        gateway.client.delete("/admin/models/n")
        assert spread_s("n", ADMIN, 404) < 0.2
        made = gateway.client.post("/admin/keys", json={"name": "k"}).json()["key"]
        assert spread_s("m", made, 200) < 0.2
        gateway.client.delete("/admin/keys/k")
        assert spread_s("m", made, 401) < 0.2


def test_limits_of_a_key_hold_over_all_workers(tmp_path: Path) -> None:
    with started(tmp_path, FITSERVE_ADMIN_KEY=ADMIN) as gateway, one_client_each(gateway) as clients:
        grant = {"name": "k", "requests_per_minute": 20}
        key = gateway.client.post("/admin/keys", json=grant).json()["key"]
        answers: Counter[int] = Counter()
        for turn in range(60):
            answers[complete(clients[turn % len(clients)], "m", key)] += 1
            time.sleep(0.03)
        assert set(answers) == {200, 429}
        # A third of a token of the bucket comes back each second; and what is admitted before the other has heard.
        assert 18 <= answers[200] <= 26


async def test_sigterm_drains_all_workers(tmp_path: Path) -> None:
    begun = asyncio.Semaphore(0)
    with started(tmp_path, "--tokens-per-second", "10") as gateway:
        before = engines(gateway)
        async with client() as many:
            short_ones = [asyncio.create_task(stream(many, gateway, 25, begun)) for _ in range(30)]
            long_ones = [asyncio.create_task(stream(many, gateway, 2000, begun)) for _ in range(30)]
            for _ in range(60):
                await asyncio.wait_for(begun.acquire(), 30)
            assert gateway.process is not None
            gateway.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            with pytest.raises(httpx.HTTPError):
                await many.get(f"{gateway.url}/healthz")
            finished = await asyncio.gather(*short_ones)
            told = await asyncio.gather(*long_ones)
        assert await asyncio.to_thread(gateway.process.wait, 20) == 0
        gateway.process = None
        assert not workers(gateway)
        assert all(text.endswith("data: [DONE]\n\n") for text in finished)
        assert not any("[DONE]" in text for text in told)
        assert all('"error"' in text.rstrip().rpartition("\n\n")[2] for text in told)
        assert engines(gateway) == before


def test_a_log_is_followed_through_a_worker(tmp_path: Path) -> None:
    with (
        started(tmp_path, "--print", "one\n") as gateway,
        gateway.client.stream("GET", "/admin/models/m/logs", params={"follow": "true"}) as log,
    ):
        pieces = log.iter_text()
        first = next(pieces)
        began = time.monotonic()
        with httpx.Client(base_url=gateway.url, trust_env=False) as another:
            another.delete("/admin/models/m")
        rest = "".join(pieces)
        assert first
        assert time.monotonic() - began > 0.05  # it was still being followed
        assert "one" in first + rest


def test_a_follower_that_leaves_ends_the_request_in_the_control_process(tmp_path: Path) -> None:
    with started(tmp_path) as gateway:
        assert gateway.process is not None
        descriptors = Path(f"/proc/{gateway.process.pid}/fd")
        before = len(list(descriptors.iterdir()))
        with gateway.client.stream("GET", "/admin/models/m/logs", params={"follow": "true"}) as log:
            next(log.iter_text())
            assert len(list(descriptors.iterdir())) > before
        wait_for("nothing is left open", lambda: len(list(descriptors.iterdir())) <= before, 5)


async def test_workers_outlive_the_control_process_and_end_with_the_next_one(tmp_path: Path) -> None:
    begun = asyncio.Semaphore(0)
    with started(tmp_path, "--tokens-per-second", "10") as gateway:
        serving, old = engines(gateway), set(workers(gateway))
        async with client() as many:
            running = [asyncio.create_task(stream(many, gateway, 50, begun)) for _ in range(20)]
            for _ in running:
                await asyncio.wait_for(begun.acquire(), 30)
            gateway.kill()
            await asyncio.sleep(0.5)
            later = [asyncio.create_task(stream(many, gateway, 20, begun)) for _ in range(10)]
            health = await many.get(f"{gateway.url}/healthz")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "model_not_ready")
            for _ in later:
                await asyncio.wait_for(begun.acquire(), 30)
            assert set(workers(gateway)) == old
            await asyncio.to_thread(gateway.start)
            ended = await asyncio.gather(*running, *later)
        assert all(text.endswith("data: [DONE]\n\n") for text in ended)
        wait_for("the old workers end", lambda: not old & set(workers(gateway)), 8)
        assert len(workers(gateway)) == 2
        gateway.until("m", "ready", 10)
        assert engines(gateway) == serving
        # One process alone takes over from workers too.
        gateway.kill()
        gateway.environment["FITSERVE_WORKERS"] = "1"
        gateway.start()
        wait_for("no worker", lambda: not workers(gateway), 8)
        assert engines(gateway) == serving


def test_health_is_bad_without_any_worker(tmp_path: Path) -> None:
    with (
        started(tmp_path) as gateway,
        httpx.Client(
            base_url="http://localhost", transport=httpx.HTTPTransport(uds=short(gateway.data / "run" / "control.sock"))
        ) as control,
    ):
        assert (gateway.data / "run" / "control.sock").stat().st_mode & 0o777 == 0o600
        assert control.get("/healthz").json() == {"status": "ok"}
        for pid in workers(gateway):
            os.kill(pid, signal.SIGKILL)
        wait_for("no worker", lambda: control.get("/healthz").json() == {"status": "no worker"}, 1, 0.005)
        wait_for("workers", lambda: control.get("/healthz").json() == {"status": "ok"}, 2)


def test_the_port_and_the_data_folder_are_held_as_by_one_process(tmp_path: Path) -> None:
    with started(tmp_path / "one") as gateway:
        again = gateway.cli("serve", "--workers", "3")
        assert (again.returncode, "Another gateway" in again.stderr) == (3, True)
        other = scripted_gateway(tmp_path / "two", FITSERVE_WORKERS="2")
        other.environment["FITSERVE_PORT"] = str(gateway.port)
        taken = other.cli("serve")
        assert (taken.returncode, "Address already in use" in taken.stderr) == (2, True)
