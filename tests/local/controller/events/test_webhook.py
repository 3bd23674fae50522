"""Events told to a receiver over a real socket."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.events.event_log import EventLog
from gateway.controller.events.webhook import Webhook
from gateway.domain import LaunchSpec
from gateway.domain.facts import Event
from gateway.secret import Secret
from gateway.store.recovery import open_store
from tests.support.memory_host import World
from tests.support.patience import hang_s
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

KEY = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.controller.events.webhook._FIRST_REST_S", 0.01)
    monkeypatch.setattr("gateway.controller.events.webhook._MAX_REST_S", 0.02)


class Receiver:
    """Takes events where `refuses` is 0; else it answers with this status, so often."""

    def __init__(self, status: int = 500, refuses: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.request_count = 0
        self._status = status
        self._refusals_left = refuses

    async def __call__(self, call: Call) -> None:
        self.request_count += 1
        headers = call.headers
        content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + call.body
        signature = base64.b64encode(hmac.digest(KEY, content, hashlib.sha256)).decode()
        assert headers["webhook-signature"] == f"v1,{signature}"
        assert call.head[0].startswith(b"POST /hook?a=1 ")
        if self._refusals_left:
            self._refusals_left -= 1
            await call.reply(b"no", f"{self._status} No", "location: /hook?a=1\r\n")
            return
        self.events.append(json.loads(call.body))
        self.ids.append(headers["webhook-id"])
        await call.reply(b"")

    async def count(self, number: int) -> None:
        async with asyncio.timeout(hang_s()):
            while len(self.events) < number:
                await asyncio.sleep(0.02)

    async def until(self, kind: str) -> None:
        async with asyncio.timeout(hang_s()):
            while kind not in [event["type"] for event in self.events]:
                await asyncio.sleep(0.02)


def settings(url: str, **more: str) -> dict[str, Any]:
    return {"webhook": f"{url}/hook?a=1", "webhook_secret": SECRET, **more}


@pytest.mark.parametrize("status", [500, 302, 429])
async def test_events_come_signed_in_order_and_once_though_some_are_refused_first(
    tmp_path: Path, status: int
) -> None:
    receiver = Receiver(status, refuses=3)
    async with (
        Upstream(receiver) as upstream,
        running(tmp_path, healthy, **settings(upstream.url)) as gateway,
    ):
        await gateway.add("m", model_folder(tmp_path / "model"))
        await receiver.until("engine.ready")
        events = (await gateway.client.get("/admin/events", params={"follow": "false"})).json()[
            "data"
        ]
    expected_events = [
        event
        for event in events
        if event["kind"] in ("gateway.started", "model.added", "engine.ready")
    ]
    assert [message["data"] for message in receiver.events][:3] == expected_events
    assert receiver.events[0]["type"] == "gateway.started"
    assert len(set(receiver.ids)) == len(receiver.ids)
    assert receiver.request_count == len(receiver.events) + 3


async def test_the_next_gateway_sends_the_events_that_an_absent_receiver_missed(
    tmp_path: Path,
) -> None:
    world, deaf = World(), Receiver(503, refuses=10**6)
    async with Upstream(deaf) as upstream:
        async with running(
            tmp_path, healthy, world, **settings(upstream.url, webhook_events="model.*")
        ) as gateway:
            await gateway.add("m", model_folder(tmp_path / "model"))
            await gateway.until("m", "ready")
            async with asyncio.timeout(hang_s()):
                while not deaf.request_count:
                    await asyncio.sleep(0.02)
        deaf._refusals_left = 0
        async with running(
            tmp_path, healthy, world, **settings(upstream.url, webhook_events="model.*")
        ) as gateway:
            await gateway.client.delete("/admin/models/m")
            await deaf.until("model.removed")
    assert [message["type"] for message in deaf.events if message["type"] != "model.state"] == [
        "model.added",
        "model.removing",
        "model.removed",
    ]


async def test_a_new_receiver_hears_all_events_from_the_next_gateway(
    tmp_path: Path,
) -> None:
    deaf = Receiver(503, refuses=10**6)
    async with Upstream(deaf) as upstream:
        async with running(tmp_path, healthy, **settings(upstream.url, webhook_events="gateway.*")):
            async with asyncio.timeout(hang_s()):
                while not deaf.request_count:
                    await asyncio.sleep(0.02)
        deaf._refusals_left = 0
        async with (
            running(tmp_path, healthy, **settings(upstream.url, webhook_events="gateway.*")),
            asyncio.timeout(hang_s()),
        ):
            while len(deaf.events) < 3:
                await asyncio.sleep(0.02)
    assert [message["type"] for message in deaf.events[:3]] == [
        "gateway.started",
        "gateway.stopped",
        "gateway.started",
    ]


async def test_a_receiver_that_is_gone_is_asked_no_more_and_no_secret_is_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    receiver = Receiver(410, refuses=10**6)
    async with (
        Upstream(receiver) as upstream,
        running(tmp_path, healthy, **settings(upstream.url)) as gateway,
    ):
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        async with asyncio.timeout(hang_s()):
            while not receiver.request_count:
                await asyncio.sleep(0.02)
    assert receiver.request_count == 1
    output = "".join(capfd.readouterr())
    assert "a webhook wants no more events" in output
    assert "hook?a=1" not in output
    assert SECRET not in output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system of its own")
async def test_events_of_a_full_disk_are_told_in_order_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.controller.events.event_log._RETRY_S", 0.05)
    disk, receiver = tmp_path / "disk", Receiver()
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    store = open_store(disk / "fitserve.db")
    log = EventLog(store)
    await log.start()
    try:
        async with Upstream(receiver) as upstream:
            url = Secret(f"{upstream.url}/hook?a=1")
            webhook = Webhook(url, Secret(SECRET), ("*",), log, store)
            log.append([large_event(0)])
            await receiver.count(1)
            (disk / "filler").write_bytes(bytes(free_bytes(disk)))
            for number in range(1, 40):
                log.append([large_event(number)])
            async with asyncio.timeout(hang_s()):
                while not log._is_failing:
                    await asyncio.sleep(0.02)
            (disk / "filler").unlink()
            await receiver.count(40)
            await webhook.close()
        assert [message["data"]["words"][:2] for message in receiver.events] == [
            large_event(number).words[:2] for number in range(40)
        ]
        assert len(set(receiver.ids)) == 40
    finally:
        await log.close()
        store.close()
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(disk)], check=False)


def free_bytes(disk: Path) -> int:
    counts = os.statvfs(disk)
    return counts.f_bavail * counts.f_frsize


def large_event(number: int) -> Event:
    """An event that takes much room."""
    return Event(at=time.time(), kind="model.state", words=f"{number:02}" + "x" * 4000)
