"""Transcripts of a gateway that a user starts: every end of a request, workers, kills and disks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.dataplane import ASK, CHAT, DONE, event
from tests.support.patience import hang_s
from tests.support.served import Served, serve_models, worker_pids
from tests.support.transcripts import new_key, write_keys
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio

ADMIN = "the-admin-key-of-this-test"
BEARER = {"authorization": f"Bearer {ADMIN}"}
LISTED = {"object": "list", "data": [{"id": "m", "object": "model"}]}
USAGE = {"prompt_tokens": 30, "completion_tokens": 20, "total_tokens": 50}


def asks_for(text: str, **fields: Any) -> dict[str, Any]:
    return {**ASK, "messages": [{"role": "user", "content": text}], **fields}


async def engine(call: Call) -> None:
    """Answers as the prompt says."""
    if call.head[0].startswith(b"GET"):
        await call.reply(json.dumps(LISTED).encode())
        return
    request = json.loads(call.body)
    text = request["messages"][0]["content"]
    if text == "refuse":
        await call.reply(b'{"error":{"message":"too long for me"}}', status="400 Bad Request")
    elif not request.get("stream"):
        message = {"role": "assistant", "content": f"answer to {text}"}
        body = {"choices": [{"index": 0, "message": message}], "usage": USAGE}
        await call.reply(json.dumps(body).encode())
    else:
        await call.start()
        await call.chunk(event("Hello"))
        if text == "wait":
            await call.closed.wait()
            return
        if text == "break":
            call.abort()
            return
        await call.chunk(event(" world"))
        await call.chunk(b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(USAGE).encode())
        await call.chunk(DONE)
        await call.end()


@contextlib.asynccontextmanager
async def recording(
    folder: Path, model: str = "m", ulimit: str = "-c 0", **settings: str
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """A gateway that records its model for all keys."""
    keys = folder / "keys"
    if not keys.exists():
        write_keys(keys)
    usual_settings = {
        "FITSERVE_TRANSCRIPT_KEY_FILE": str(keys),
        "FITSERVE_TRANSCRIPT_MODELS": model,
    }
    async with Upstream(engine) as upstream, contextlib.AsyncExitStack() as stack:
        serving = serve_models(
            folder,
            {model: [f"{upstream.url}/v1"]},
            admin_key=ADMIN,
            ulimit=ulimit,
            **{**usual_settings, **settings},
        )
        gateway = await asyncio.to_thread(serving.__enter__)
        stack.push_async_callback(asyncio.to_thread, serving.__exit__, None, None, None)
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=gateway.url, headers=BEARER, timeout=hang_s(), trust_env=False
            )
        )
        yield gateway, client


async def transcripts(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
    """All transcripts with their texts, the newest first, once there are so many."""

    async def look() -> list[dict[str, Any]] | None:
        answer = await client.get("/admin/transcripts/export")
        views = [json.loads(line) for line in answer.text.splitlines()]
        return views if len(views) >= count else None

    for _ in range(int(hang_s() / 0.05)):
        views = await look()
        if views is not None:
            return views
        await asyncio.sleep(0.05)
    pytest.fail(f"there are no {count} transcripts")


async def test_every_end_of_a_request_has_its_transcript(tmp_path: Path) -> None:
    async with recording(tmp_path) as (_, client):
        await client.post(CHAT, json=asks_for("whole"), headers={"x-request-id": "mine"})
        (whole,) = await transcripts(client, 1)
        assert (whole["request_id"], whole["key"], whole["model"]) == ("mine", "admin", "m")
        assert whole["answer"] == "answer to whole"
        assert whole["request"]["messages"][0]["content"] == "whole"
        assert (whole["prompt_tokens"], whole["completion_tokens"]) == (30, 20)
        assert 0 <= whole["routed_s"] <= whole["first_byte_s"] <= whole["duration_s"]

        await client.post(CHAT, json=asks_for("stream", stream=True))
        stream, *_ = await transcripts(client, 2)
        assert (stream["answer"], stream["is_stream"]) == ("Hello world", True)
        assert stream["completion_tokens"] == 20

        await client.post(CHAT, json=asks_for("refuse"))
        refused_view, *_ = await transcripts(client, 3)
        assert (refused_view["status"], refused_view["answer"]) == (400, "[error] too long for me")

        with contextlib.suppress(httpx.HTTPError):
            await client.post(CHAT, json=asks_for("break", stream=True))
        broken, *_ = await transcripts(client, 4)
        assert (broken["outcome"], broken["answer"]) == ("broken", "Hello")

        async with client.stream("POST", CHAT, json=asks_for("wait", stream=True)) as answer:
            async for _ in answer.aiter_bytes():
                break
        left, *_ = await transcripts(client, 5)
        assert (left["outcome"], left["answer"]) == ("left", "Hello")


async def test_only_recorded_keys_and_models_have_transcripts(tmp_path: Path) -> None:
    async with recording(tmp_path, FITSERVE_TRANSCRIPT_MODELS="") as (_, client):
        answer = await client.post("/admin/keys", json={"name": "seen", "is_recorded": True})
        recorded_bearer = {"authorization": f"Bearer {answer.json()['key']}"}
        await client.post(CHAT, json=asks_for("private"))
        await client.post(CHAT, json=asks_for("public"), headers=recorded_bearer)
        (view,) = await transcripts(client, 1)
        assert (view["key"], view["answer"]) == ("seen", "answer to public")
        state = (await client.get("/admin/transcripts/state")).json()
        assert (state["is_on"], state["keys"], state["models"]) == (True, ["seen"], [])
        models = (await client.get("/v1/models", headers=recorded_bearer)).json()["data"]
        assert [entry["recorded"] for entry in models] == [True]
        models = (await client.get("/v1/models")).json()["data"]
        assert all("recorded" not in entry for entry in models)
        # A recorded key reads no transcript.
        refusal = await client.get("/admin/transcripts", headers=recorded_bearer)
        assert refusal.status_code == 403


async def test_readings_are_events_with_the_name_of_the_reader(tmp_path: Path) -> None:
    async with recording(tmp_path) as (_, client):
        await client.post(CHAT, json=asks_for("canary"))
        (view,) = await transcripts(client, 1)
        await client.get(f"/admin/transcripts/{view['id']}")
        replay = await client.post(f"/admin/transcripts/{view['id']}/replay", json={"model": "m"})
        assert replay.json()["answer"] == "answer to canary"
        assert replay.json()["is_exact"]
        await client.request("DELETE", "/admin/transcripts")
        events: list[dict[str, Any]] = []
        while not any(event["kind"] == "transcripts.deleted" for event in events):
            listing = await client.get("/admin/events", params={"follow": "false"})
            events = listing.json()["data"]
        readings = [event for event in events if event["kind"] == "transcripts.read"]
        assert {event["data"]["reader"] for event in readings} == {"admin"}
        assert [event["data"].get("id") for event in readings[-2:]] == [view["id"]] * 2
        assert "canary" not in json.dumps(events)


async def test_a_replay_to_an_unknown_model_has_the_error_of_the_data_plane(
    tmp_path: Path,
) -> None:
    async with recording(tmp_path, FITSERVE_WORKERS="2") as (_, client):
        await client.post(CHAT, json=asks_for("a"))
        (view,) = await transcripts(client, 1)
        path = f"/admin/transcripts/{view['id']}/replay"
        answer = (await client.post(path, json={"model": "absent"})).json()
        assert answer["status"] == 404
        assert "absent" in answer["answer"]
        assert (await client.post(path, json={"model": "m"})).json()["status"] == 200


async def test_requests_of_all_workers_are_kept_over_kills(tmp_path: Path) -> None:
    async with recording(tmp_path, FITSERVE_WORKERS="2") as (gateway, client):
        for number in range(10):
            async with httpx.AsyncClient(
                base_url=gateway.url, headers=BEARER, timeout=hang_s()
            ) as new_client:
                await new_client.post(CHAT, json=asks_for(f"request {number}"))
        views = await transcripts(client, 10)
        for pid in worker_pids(tmp_path / "data"):
            os.kill(pid, signal.SIGKILL)
        (keeper,) = children(gateway.process.pid, "transcripts.keeper")
        os.kill(keeper, signal.SIGKILL)
        assert await transcripts(client, 10) == views
        # The next keeper and the next workers go on.
        await client.post(CHAT, json=asks_for("after"))
        newest, *_ = await transcripts(client, 11)
        assert newest["answer"] == "answer to after"


async def test_transcripts_survive_a_kill_of_everything(tmp_path: Path) -> None:
    with contextlib.suppress(AssertionError):
        async with recording(tmp_path) as (gateway, client):
            for number in range(5):
                await client.post(CHAT, json=asks_for(f"request {number}"))
            await transcripts(client, 5)
            pids = [gateway.process.pid, *children(gateway.process.pid, "")]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    async with recording(tmp_path, "second") as (_, client):
        views = await transcripts(client, 5)
        assert [view["answer"] for view in views] == [
            f"answer to request {number}" for number in (4, 3, 2, 1, 0)
        ]


async def test_a_rotated_key_reads_former_transcripts_and_a_lost_key_locks_them(
    tmp_path: Path,
) -> None:
    old_key, next_key = new_key(), new_key()
    write_keys(tmp_path / "keys", old_key)
    async with recording(tmp_path) as (_, client):
        await client.post(CHAT, json=asks_for("old"))
        await transcripts(client, 1)
    write_keys(tmp_path / "keys", next_key, old_key)
    async with recording(tmp_path, "second") as (_, client):
        await client.post(CHAT, json=asks_for("next", model="second"))
        views = await transcripts(client, 2)
        assert [view["answer"] for view in views] == ["answer to next", "answer to old"]
    write_keys(tmp_path / "keys", next_key)
    async with recording(tmp_path, "third") as (_, client):
        views = await transcripts(client, 2)
        assert [view["is_locked"] for view in views] == [False, True]


async def test_a_full_disk_stops_the_recorder_and_no_request(tmp_path: Path) -> None:
    # No file may have more than 200 KiB; the database stays below.
    async with recording(tmp_path, ulimit="-f 400") as (_, client):
        events: list[dict[str, Any]] = []
        while not any(event["kind"] == "transcripts.stopped" for event in events):
            answer = await client.post(CHAT, json=asks_for("long " * 30_000))
            assert answer.status_code == 200
            listing = await client.get("/admin/events", params={"follow": "false"})
            events = listing.json()["data"]
        state = (await client.get("/admin/transcripts/state")).json()
        assert "the size that this process may write" in state["problem"]
        assert state["dropped_count"] > 0
        answer = await client.post(CHAT, json=asks_for("after"))
        assert answer.json()["choices"][0]["message"]["content"] == "answer to after"
        # Earlier transcripts are still there.
        await transcripts(client, 1)


async def test_a_gateway_without_a_key_refuses_to_record(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        async with recording(tmp_path, FITSERVE_TRANSCRIPT_KEY_FILE=""):
            pass
    log = (tmp_path / "gateway.log").read_text()
    assert "no key encrypts the transcripts" in log
    settings = {"FITSERVE_TRANSCRIPT_KEY_FILE": "", "FITSERVE_TRANSCRIPT_MODELS": ""}
    async with recording(tmp_path, **settings) as (_, client):
        refusal = await client.post("/admin/keys", json={"name": "seen", "is_recorded": True})
        assert refusal.status_code == 400
        assert "FITSERVE_TRANSCRIPT_KEY_FILE" in refusal.json()["error"]["message"]
        assert (await client.get("/admin/transcripts")).status_code == 404
        assert not (await client.get("/admin/transcripts/state")).json()["is_on"]
        await client.post(CHAT, json=asks_for("private"))
    assert not (tmp_path / "data" / "transcripts").exists()


def children(pid: int, program: str) -> list[int]:
    """The processes that a process started, whose command has a word."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().decode()
            if int(fields[1]) == pid and program in command:
                pids.append(int(entry.name))
    return pids
