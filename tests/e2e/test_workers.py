"""`fitserve serve` with several workers: shared state, losses when one of its processes dies, and
remains afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.proxy.workers.sockets import short_path
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, stream, workers
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder
from tests.support.served import serve_models, worker_pids
from tests.support.stored_responses import ASKED, Engine, bearer, uses
from tests.support.upstream import Upstream

pytestmark = pytest.mark.anyio

STREAMS = 100
ADMIN = "an-admin-key-of-the-settings-that-nobody-guesses"


def holders(gateway: Gateway) -> dict[int, int]:
    """The worker that has taken a connection of a client, by the client's port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [tuple(int(end.rpartition(":")[2], 16) for end in row[1:3]) for row in rows]
    clients = {
        row[9]: remote_port
        for row, (local_port, remote_port) in zip(rows, ports, strict=True)
        if local_port == gateway.port and row[3] == "01"
    }
    pids_by_port: dict[int, int] = {}
    for pid in workers(gateway):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if port := clients.get(
                    str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
                ):
                    pids_by_port[port] = pid
    return pids_by_port


@contextlib.contextmanager
def one_client_each(gateway: Gateway) -> Iterator[list[http.client.HTTPConnection]]:
    """A kept connection to each of two workers."""
    clients: dict[int, http.client.HTTPConnection] = {}

    def open_connections() -> list[http.client.HTTPConnection]:
        client = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=hang_s())
        client.connect()
        clients[client.sock.getsockname()[1]] = client
        pids_by_port = holders(gateway)
        return list(
            {
                pids_by_port[port]: client
                for port, client in clients.items()
                if port in pids_by_port
            }.values()
        )

    try:
        yield wait_for(
            "a connection to each worker",
            lambda: len(connections := open_connections()) == 2 and connections,
            every_s=0.02,
        )
    finally:
        for client in clients.values():
            client.close()


def complete(client: http.client.HTTPConnection, model: str, key: str = "") -> int:
    """The status of a short answer."""
    body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 1})
    client.request(
        "POST", "/v1/completions", body, {"authorization": f"Bearer {key}"} if key else {}
    )
    response = client.getresponse()
    response.read()
    return response.status


@contextlib.contextmanager
def start_gateway(folder: Path, *flags: str, **settings: str) -> Iterator[Gateway]:
    """A gateway with two workers and the model m."""
    gateway = scripted_gateway(
        folder,
        flags,
        **{"FITSERVE_WORKERS": "2", "FITSERVE_STOP_GRACE_S": str(4 * HANG_S), **settings},
    )
    if key := settings.get("FITSERVE_ADMIN_KEY"):
        gateway.client.headers["authorization"] = f"Bearer {key}"
    gateway.start()
    try:
        response = gateway.client.post(
            "/admin/models",
            json={"name": "m", "source": str(model_folder(folder / "model")), "engines": [ENGINE]},
        )
        assert response.status_code == 202, response.text
        gateway.until("m", "ready")
        wait_for(
            "two workers",
            lambda: (
                len(workers(gateway)) == 2
                and gateway.client.get("/v1/models/m").json().get("state") == "ready"
            ),
        )
        yield gateway
    finally:
        gateway.close()
        wait_for("no worker is left", lambda: not workers(gateway))
        assert not engines(gateway)


def metric(gateway: Gateway, name: str) -> float:
    lines = gateway.client.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith((f"{name} ", f"{name}{{"))
    )


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        trust_env=False, limits=httpx.Limits(max_connections=None), timeout=4 * hang_s()
    )


async def test_a_killed_worker_loses_only_its_streams(tmp_path: Path) -> None:
    starts, hold = asyncio.Semaphore(0), tmp_path / "hold"
    with start_gateway(tmp_path, "--hold", str(hold)) as gateway:
        hold.touch()
        async with client() as follower:
            running = asyncio.gather(*(stream(follower, gateway, starts) for _ in range(STREAMS)))
            for _ in range(STREAMS):
                await asyncio.wait_for(starts.acquire(), hang_s())
            # The kernel spreads them by a hash of their ports.
            counts = Counter(holders(gateway).values())
            victim, survivor = workers(gateway)
            assert counts[victim] + counts[survivor] >= STREAMS
            assert min(counts.values()) > STREAMS / 4
            os.kill(victim, signal.SIGKILL)
            wait_for(
                "another worker",
                lambda: len(workers(gateway)) == 2 and victim not in workers(gateway),
            )
            # All this while the others' answers go on.
            with one_client_each(gateway) as clients:
                assert {complete(client, "m") for client in clients} == {200}
            assert not running.done()
            hold.unlink()
            texts = await running
        whole_count = sum(text.endswith("data: [DONE]\n\n") for text in texts)
        broken_count = sum("[DONE]" not in text for text in texts)
        assert whole_count + broken_count == STREAMS
        # `holders` knows those of the client that asks for health too.
        assert counts[victim] - 2 <= broken_count <= counts[victim]
        assert min(whole_count, broken_count) > STREAMS / 4
        wait_for(
            "the rest counted",
            lambda: metric(gateway, "fitserve_requests_total") == whole_count + len(clients),
        )
        wait_for("nothing in flight", lambda: metric(gateway, "fitserve_requests_in_flight") == 0)


def test_tables_reach_every_worker(tmp_path: Path) -> None:
    with (
        start_gateway(tmp_path, FITSERVE_ADMIN_KEY=ADMIN) as gateway,
        one_client_each(gateway) as clients,
    ):

        def every_worker_says(status: int, model: str, key: str) -> None:
            clients_left = list(clients)

            def is_empty() -> bool:
                clients_left[:] = [
                    client for client in clients_left if complete(client, model, key) != status
                ]
                return not clients_left

            wait_for(f"{status} for {model}", is_empty, every_s=0.02)

        gateway.client.post(
            "/admin/models", json={"name": "n", "endpoints": ["http://127.0.0.1:9/v1"]}
        )
        every_worker_says(503, "n", ADMIN)
        gateway.client.delete("/admin/models/n")
        every_worker_says(404, "n", ADMIN)
        new_key = gateway.client.post("/admin/keys", json={"name": "k"}).json()["key"]
        every_worker_says(200, "m", new_key)
        gateway.client.delete("/admin/keys/k")
        every_worker_says(401, "m", new_key)


def test_limits_of_a_key_hold_over_all_workers(tmp_path: Path) -> None:
    with (
        start_gateway(tmp_path, FITSERVE_ADMIN_KEY=ADMIN) as gateway,
        one_client_each(gateway) as clients,
    ):
        grant = {"name": "k", "requests_per_minute": 20}
        key = gateway.client.post("/admin/keys", json=grant).json()["key"]
        for client in clients:
            wait_for("the key is known", lambda client=client: complete(client, "m", key) == 200)  # type: ignore[misc]

        def count_admitted_requests(client: http.client.HTTPConnection, every_s: float) -> int:
            """Until the first that is refused."""
            answers: list[int] = []

            def is_refused() -> bool:
                answers.append(complete(client, "m", key))
                return answers[-1] != 200

            wait_for("one is refused", is_refused, every_s=every_s)
            assert answers[-1] == 429
            return len(answers) - 1

        first_client, other_client = clients
        assert count_admitted_requests(first_client, 0) >= 18
        # Alone, the other one would admit nineteen as well, and one every three seconds; but it has
        # heard of those.
        assert count_admitted_requests(other_client, 0.5) < 15


def test_a_log_is_followed_through_a_worker(tmp_path: Path) -> None:
    with (
        start_gateway(tmp_path, "--print", "one\n") as gateway,
        httpx.Client(base_url=gateway.url, trust_env=False, timeout=hang_s()) as another,
        gateway.client.stream("GET", "/admin/models/m/logs", params={"follow": "true"}) as log,
    ):
        pieces = log.iter_text()
        text = next(pieces)
        count = text.count("/v1/completions")
        assert another.post(
            "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 1}
        ).is_success
        while text.count("/v1/completions") == count:
            text += next(pieces)
        another.delete("/admin/models/m")
        text += "".join(pieces)
        assert "one" in text


def test_a_follower_that_leaves_ends_the_request_in_the_control_process(tmp_path: Path) -> None:
    with start_gateway(tmp_path) as gateway:
        assert gateway.process is not None
        descriptors = Path(f"/proc/{gateway.process.pid}/fd")

        def readers() -> int:
            """How often the control process has the engine's log open."""
            cancellations = 0
            for descriptor in descriptors.iterdir():
                with contextlib.suppress(OSError):
                    cancellations += descriptor.readlink().suffix == ".log"
            return cancellations

        # The gateway reads it too, now and then: so many followers that it makes no difference.
        followed = []
        with contextlib.ExitStack() as followers:
            for _ in range(10):
                log = followers.enter_context(
                    gateway.client.stream("GET", "/admin/models/m/logs", params={"follow": "true"})
                )
                # The iterator is kept, because a dropped one closes its answer.
                followed.append(log.iter_text())
                next(followed[-1])
            assert readers() >= 10
        wait_for("nobody reads for clients who left", lambda: readers() < 5)


async def test_workers_outlive_the_control_process_and_end_with_the_next_one(
    tmp_path: Path,
) -> None:
    starts, hold = asyncio.Semaphore(0), tmp_path / "hold"
    with start_gateway(tmp_path, "--hold", str(hold)) as gateway:
        serving, old = engines(gateway), set(workers(gateway))
        hold.touch()
        async with client() as follower:
            before = asyncio.gather(*(stream(follower, gateway, starts) for _ in range(20)))
            for _ in range(20):
                await asyncio.wait_for(starts.acquire(), hang_s())
            gateway.kill()
            later = asyncio.gather(*(stream(follower, gateway, starts) for _ in range(10)))
            health = await follower.get(f"{gateway.url}/healthz")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "model_not_ready")
            for _ in range(10):
                await asyncio.wait_for(starts.acquire(), hang_s())
            assert set(workers(gateway)) == old
            await asyncio.to_thread(gateway.start)
            # The next gateway serves, and the old workers finish their answers.
            assert old < set(workers(gateway))
            assert not before.done()
            assert not later.done()
            hold.unlink()
            texts = [*await before, *await later]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        wait_for("the old workers end", lambda: not old & set(workers(gateway)))
        wait_for("two workers", lambda: len(workers(gateway)) == 2)
        gateway.until("m", "ready")
        assert engines(gateway) == serving
        # One process alone takes over from workers too.
        gateway.kill()
        gateway.environment["FITSERVE_WORKERS"] = "1"
        gateway.start()
        wait_for("no worker", lambda: not workers(gateway))
        assert engines(gateway) == serving


def test_health_is_bad_without_any_worker(tmp_path: Path) -> None:
    with (
        start_gateway(tmp_path) as gateway,
        httpx.Client(
            base_url="http://localhost",
            timeout=hang_s(),
            transport=httpx.HTTPTransport(uds=short_path(gateway.data / "run" / "control.sock")),
        ) as control,
    ):
        assert (gateway.data / "run" / "control.sock").stat().st_mode & 0o777 == 0o600
        assert control.get("/healthz").json() == {"status": "ok"}

        def without_workers() -> bool:
            """Killed young, they are started again after ever longer pauses."""
            for pid in workers(gateway):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            health = control.get("/healthz")
            return (health.status_code, health.json()) == (503, {"status": "no worker"})

        wait_for("no worker", without_workers, every_s=0.02)
        wait_for("workers", lambda: control.get("/healthz").json() == {"status": "ok"})


def test_the_port_and_the_data_folder_are_held_as_by_one_process(tmp_path: Path) -> None:
    with start_gateway(tmp_path / "one") as gateway:
        second_result = gateway.cli("serve", "--workers", "3")
        assert (second_result.returncode, "Another gateway" in second_result.stderr) == (3, True)
        other_scripted_gateway = scripted_gateway(tmp_path / "two", FITSERVE_WORKERS="2")
        other_scripted_gateway.environment["FITSERVE_PORT"] = str(gateway.port)
        result = other_scripted_gateway.cli("serve")
        assert (result.returncode, "Address already in use" in result.stderr) == (2, True)


async def test_responses_outlive_the_workers_that_answered(tmp_path: Path) -> None:
    """Each acknowledged response is continued by its owner on its replica, and by nobody else, also
    while workers die and come back."""
    ids: list[str] = []
    refusals = Counter[tuple[int, ...]]()
    async with Upstream(Engine()) as first_upstream, Upstream(Engine()) as second:
        running = serve_models(
            tmp_path,
            {"m": [f"{upstream.url}/v1" for upstream in (first_upstream, second)]},
            ADMIN,
            **TWO,
        )
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=hang_s()
            ) as async_client:
                new_answer = await async_client.post(
                    "/admin/keys", json={"name": "other"}, headers=bearer(ADMIN)
                )
                other_key = new_answer.json()["key"]
                for number in range(60):
                    pids = worker_pids(tmp_path / "data")
                    if number % 10 == 5 and pids:
                        os.kill(pids[number // 10 % len(pids)], signal.SIGKILL)
                    with contextlib.suppress(httpx.TransportError):
                        answer = await async_client.post(
                            "/v1/responses", json=ASKED, headers=bearer(ADMIN)
                        )
                        assert answer.status_code == 200, answer.text
                        ids.append(answer.json()["id"])
                        answers = await uses(async_client, other_key, ids[-1])
                        refusals[tuple(status for status, _ in answers)] += 1
                for id_ in ids:
                    assert [
                        (
                            await async_client.get(f"/v1/responses/{id_}", headers=bearer(key))
                        ).status_code
                        for key in (ADMIN, other_key)
                    ] == [200, 404]
                    continued = {**ASKED, "previous_response_id": id_}
                    answer = await async_client.post(
                        "/v1/responses", json=continued, headers=bearer(ADMIN)
                    )
                    assert answer.status_code == 200, answer.text
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
    assert len(ids) > 40
    assert refusals.keys() == {(404,) * 5}
    assert refusals.total() > 30


TWO = {"FITSERVE_WORKERS": "2"}
