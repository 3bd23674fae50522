"""A gateway to which the system allows little: it says so and serves fewer clients, or refuses to
start; it never fails in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from gateway.domain.units import MIB
from tests.support.dataplane import until
from tests.support.paths import ROOT
from tests.support.patience import hang_s, wait_until
from tests.support.served import Served, serve_command, serve_models
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

LISTED = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def engine(call: Call) -> None:
    await call.reply(LISTED if call.head[0].startswith(b"GET") else b'{"choices":[]}')


def files(gateway: Served) -> int:
    return len(os.listdir(f"/proc/{gateway.process.pid}/fd"))  # noqa: PTH208


def knock(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), hang_s())


def status(client: socket.socket) -> bytes:
    """Its answer, without a further request where it is told to come back."""
    try:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return client.recv(65536)[9:12]
    except ConnectionError:
        return b""


async def test_few_files_allow_few_clients_and_always_a_file_for_their_engine(
    tmp_path: Path,
) -> None:
    async with Upstream(engine) as upstream:
        running = serve_models(tmp_path, {"m": [f"{upstream.url}/v1"]}, ulimit="-n 64")
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            assert '"files": 64, "connections": 15' in gateway.log
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=hang_s()
            ) as client:
                await client.get("/healthz")
                files_before, log_length = files(gateway), len(gateway.log)
                for _ in range(2):
                    crowd = [await asyncio.to_thread(knock, gateway.port) for _ in range(200)]
                    statuses = [await asyncio.to_thread(status, client) for client in crowd]
                    assert statuses.count(b"200") <= 15
                    assert set(statuses) <= {b"200", b"503", b""}
                    # Clients that are in are served, with all places taken and a crowd before the
                    # door.
                    for _ in range(20):
                        answer = await client.post("/v1/chat/completions", json=ASK)
                        assert answer.status_code == 200, answer.text
                    for crowd_client in crowd:
                        crowd_client.close()
                    await until(lambda: files(gateway) <= files_before + 2)
                await wait_until_ready(client)
            # It says nothing of each client that it turns away.
            assert gateway.log.count("\n", log_length) < 20, gateway.log
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)


@pytest.mark.parametrize(
    ("ulimit", "reason"),
    [
        ("-n 40", "may open 40 files, but needs at least 50"),
        ("-v 204800", "may use 200 MiB of address space (`ulimit -v`), and needs 256"),
    ],
)
def test_too_few_resources_refuse_the_start(tmp_path: Path, ulimit: str, reason: str) -> None:
    result = subprocess.run(
        serve_command(ulimit),
        env={**os.environ, "FITSERVE_DATA_DIR": str(tmp_path / "data"), "FITSERVE_PORT": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )
    assert result.returncode == 2
    assert reason in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "data").exists()


def allow(gateway: Served, more: int) -> None:
    """Address space: its present size, and `more` bytes."""
    pages = int(Path(f"/proc/{gateway.process.pid}/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.prlimit(
        gateway.process.pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard)
    )


async def wait_until_ready(client: httpx.AsyncClient) -> None:
    """A pass of the control loop that found no memory or no file is run anew."""

    async def is_ready() -> bool:
        return (await client.get("/readyz")).status_code == 200

    await wait_until("the gateway is ready", is_ready)


async def test_a_request_that_finds_no_memory_is_refused_and_costs_nobody_else_anything(
    tmp_path: Path,
) -> None:
    large = json.dumps(
        {**ASK, "messages": [{"role": "user", "content": "x" * 20_000_000}]}
    ).encode()
    async with Upstream(engine) as upstream:
        running = serve_models(tmp_path, {"m": [f"{upstream.url}/v1"]})
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=hang_s()
            ) as client:

                async def crowd() -> set[int]:
                    answers = await asyncio.gather(
                        *(client.post("/v1/chat/completions", content=large) for _ in range(6))
                    )
                    return {answer.status_code for answer in answers}

                allow(gateway, 0)
                assert await crowd() == {503}
                # For a thread more, and one or two of the bodies.
                allow(gateway, 48 * MIB)
                for _ in range(2):
                    assert await crowd() <= {200, 503}
                    assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
                    await wait_until_ready(client)
                body = {"name": "n", "endpoints": [f"{upstream.url}/v1"]}
                assert (await client.post("/admin/models", json=body)).status_code == 202
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
        # Nothing that was said to be kept is lost.
        running = serve_models(tmp_path, {})
        gateway = await asyncio.to_thread(running.__enter__)
        try:
            async with httpx.AsyncClient(
                base_url=gateway.url, trust_env=False, timeout=hang_s()
            ) as client:
                assert {
                    view["name"] for view in (await client.get("/admin/models")).json()["data"]
                } == {"m", "n"}
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
