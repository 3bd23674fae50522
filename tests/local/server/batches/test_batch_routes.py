"""Batches by the official openai SDK: every call, every end, and the key that they belong to."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.server.batches import batches, line_step, reading_turns, result_writer
from gateway.server.batches.batch_run import BatchRun
from tests.support.batch_calls import (
    BODIES,
    CHAT,
    batch_input,
    batch_line,
    ids,
    make_batch,
    results,
    run_batch,
    sdk,
    until_count,
    until_status,
)
from tests.support.dataplane import until
from tests.support.key_gateway import (
    ADMIN,
    answer_with_usage,
    gateway,
    make,
    serve_models,
    unused_script,
)
from tests.support.running import running
from tests.support.upstream import Call, Upstream

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_step, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(line_step, "_LAST_PAUSE_S", 0.05)


class WaitingCalls:
    """A script that never answers. count: requests that wait now."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, call: Call) -> None:
        self.count += 1
        try:
            await call.closed.wait()
        finally:
            self.count -= 1


@pytest.fixture
def delayed_batches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of batches whose lines had to wait, one for each time. Few lines run concurrently."""
    batch_ids: list[str] = []
    delay = BatchRun._delay

    def note_delay(run: BatchRun, seconds: float) -> None:
        batch_ids.append(run.record.id)
        delay(run, seconds)

    monkeypatch.setattr(BatchRun, "_delay", note_delay)
    monkeypatch.setattr(batches, "lines_at_once", lambda _: 2)
    return batch_ids


async def until_delays(delayed_batches: list[str], count: int) -> None:
    """Wait until lines had to wait that many times more."""
    end = len(delayed_batches) + count
    await until(lambda: len(delayed_batches) >= end)


def asked_count(upstream: Upstream) -> int:
    return sum(request.startswith(b"POST") for request in upstream.requests)


@pytest.mark.parametrize("endpoint", BODIES)
async def test_a_batch_answers_every_line_once(endpoint: str, tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, upstream):
        client = sdk(server.url, await make(server, "app"))
        batch = await run_batch(
            client, batch_input(50, endpoint), endpoint, metadata={"job": "night"}
        )
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 50, "completed": 50, "failed": 0}
        assert (batch.error_file_id, batch.errors) == (None, None)
        assert (batch.metadata, batch.endpoint) == ({"job": "night"}, endpoint)
        assert batch.in_progress_at is not None
        assert batch.completed_at is not None
        rows = await results(client, batch.output_file_id)
        assert ids(rows) == [f"line-{number}" for number in range(50)]
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            assert row["error"] is None
            assert row["response"]["status_code"] == 200
            assert row["response"]["request_id"]
            assert row["response"]["body"]["id"] == "c1"
        posts = [request for request in upstream.requests if request.startswith(b"POST")]
        assert len(posts) == 50
        assert all(request.startswith(b"POST %b " % endpoint.encode()) for request in posts)
        await client.close()


async def test_files_and_batches_are_listed_shown_and_deleted(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        client = sdk(server.url, await make(server, "app"))
        content = batch_input(2)
        first_batch, second_batch = [await run_batch(client, content) for _ in range(2)]
        listed_batches = [batch async for batch in await client.batches.list(limit=1)]
        assert [batch.id for batch in listed_batches] == [second_batch.id, first_batch.id]
        file = await client.files.retrieve(first_batch.input_file_id)
        assert (file.bytes, file.filename, file.purpose, file.status) == (
            len(content),
            "input.jsonl",
            "batch",
            "processed",
        )
        assert file.expires_at is not None
        assert (await client.files.content(file.id)).content == content
        files = [file async for file in await client.files.list(limit=1)]
        assert len({file.id for file in files}) == 4
        outputs = await client.files.list(purpose="batch_output", order="asc")
        assert [file.id for file in outputs.data] == [
            first_batch.output_file_id,
            second_batch.output_file_id,
        ]
        deletion = await client.files.delete(file.id)
        assert (deletion.id, deletion.deleted) == (file.id, True)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)
        with pytest.raises(openai.ConflictError, match="completed"):
            await client.batches.cancel(first_batch.id)
        await client.close()


async def test_wrong_lines_end_a_batch_before_any_is_sent(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, upstream):
        client = sdk(server.url, await make(server, "app", models=["a"]))
        lines = [batch_line("x"), b"{\n", batch_line("x"), batch_line("y", model="b")]
        batch = await run_batch(client, b"".join(lines))
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.errors is not None
        assert [(error.line, error.code) for error in batch.errors.data or []] == [
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "model_not_found"),
        ]
        assert batch.failed_at is not None
        assert asked_count(upstream) == 0
        await client.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"input_file_id": "file-none"},
        {"endpoint": "/v1/audio/speech"},
        {"completion_window": "24"},
        {"completion_window": "15d"},
        {"metadata": {"a": "x" * 600}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
    ],
)
async def test_a_wrong_batch_is_refused_with_its_field(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    async with gateway(tmp_path) as (server, _):
        client = sdk(server.url, ADMIN)
        file = await client.files.create(file=("x", batch_input(1)), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as error:
            await client.post("/batches", body=body, cast_to=object)
        assert error.value.body is not None
        await client.close()


async def test_answers_of_engines_are_kept_or_repeated_by_their_kind(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    async def script(call: Call) -> None:
        kind = json.loads(call.body)["user"]
        tries[kind] += 1
        if kind == "wrong":
            await call.reply(b'{"error": {"message": "too long"}}', "400 Bad Request")
        elif kind == "broken":
            await call.reply(b'{"error": {"message": "oh"}}', "500 Internal Server Error")
        elif kind == "words" and tries[kind] == 1:
            await call.reply(b"no json")
        elif (kind == "dies" and tries[kind] == 1) or kind == "kills":
            call.abort()
        elif kind == "busy" and tries[kind] < 6:
            await call.reply(b'{"error": {}}', "503 Service Unavailable")
        else:
            await answer_with_usage(call)

    async with gateway(tmp_path, script) as (server, _):
        client = sdk(server.url, await make(server, "app"))
        kinds = ("right", "wrong", "broken", "words", "dies", "kills", "busy")
        batch = await run_batch(client, b"".join(batch_line(kind, user=kind) for kind in kinds))
        assert batch.status == "completed"
        output = {row["custom_id"] for row in await results(client, batch.output_file_id)}
        assert output == {"right", "words", "dies", "busy"}
        failures = {row["custom_id"]: row for row in await results(client, batch.error_file_id)}
        statuses = {name: row["response"]["status_code"] for name, row in failures.items()}
        assert statuses["wrong"] == 400
        assert statuses["broken"] == 500
        assert statuses["kills"] == 502
        assert "too long" in failures["wrong"]["response"]["body"]["error"]["message"]
        assert (tries["wrong"], tries["broken"], tries["busy"]) == (1, line_step.MAX_TRIES, 6)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 3)
        await client.close()


async def test_a_cancelled_batch_leaves_the_engine_and_keeps_its_answers(tmp_path: Path) -> None:
    waiting_calls = WaitingCalls()

    async def script(call: Call) -> None:
        answers = json.loads(call.body)["user"] == "answer"
        await (answer_with_usage(call) if answers else waiting_calls(call))

    async with gateway(tmp_path, script) as (server, _):
        client = sdk(server.url, await make(server, "app"))
        lines = [batch_line("x-0", user="answer")]
        lines += [batch_line(f"x-{number}", user="wait") for number in range(1, 40)]
        batch = await make_batch(client, b"".join(lines))
        await until(lambda: waiting_calls.count > 0)
        await until_count(client, batch, 1)
        with pytest.raises(openai.ConflictError, match=batch.id):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        batch = await until_status(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelled_at is not None
        await until(lambda: not waiting_calls.count)
        assert ids(await results(client, batch.output_file_id)) == ["x-0"]
        rows = await results(client, batch.error_file_id)
        assert ids(rows) == [f"x-{number}" for number in range(1, 40)]
        assert {row["error"]["code"] for row in rows} == {"batch_cancelled"}
        await client.close()


async def test_a_batch_expires_with_an_error_for_each_line_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "window_s", lambda _: 0.5)
    async with gateway(tmp_path, WaitingCalls()) as (server, _):
        client = sdk(server.url, await make(server, "app"))
        batch = await run_batch(client, batch_input(5))
        assert (batch.status, batch.output_file_id) == ("expired", None)
        assert batch.expired_at is not None
        rows = await results(client, batch.error_file_id)
        assert ids(rows) == [f"line-{number}" for number in range(5)]
        assert {row["error"]["code"] for row in rows} == {"batch_expired"}
        await client.close()


async def test_no_key_sees_files_and_batches_of_another(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        owner = sdk(server.url, await make(server, "app"))
        batch = await run_batch(owner, batch_input(1))
        assert batch.output_file_id is not None
        for key in (ADMIN, await make(server, "other")):
            client = sdk(server.url, key)
            assert (await client.files.list()).data == []
            assert (await client.batches.list()).data == []
            for call in (
                client.files.retrieve(batch.input_file_id),
                client.files.content(batch.output_file_id),
                client.files.delete(batch.output_file_id),
                client.batches.retrieve(batch.id),
                client.batches.cancel(batch.id),
                client.batches.create(
                    input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            await client.close()
        assert (await owner.batches.retrieve(batch.id)).id == batch.id
        await owner.close()


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("fs-wrong", 401), ("reader", 403)])
async def test_a_caller_without_the_right_to_models_has_no_files(
    key: str | None, status: int, tmp_path: Path
) -> None:
    async with gateway(tmp_path) as (server, _):
        reader = await make(server, "reader", scopes=["read"])
        headers = (
            {} if key is None else {"authorization": f"Bearer {reader if key == 'reader' else key}"}
        )
        del server.client.headers["authorization"]
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/files/file-1/content"),
            ("DELETE", "/v1/files/file-1"),
            ("POST", "/v1/batches"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches/batch_1/cancel"),
            ("GET", "/v1/%66iles"),
        ):
            answer = await server.client.request(method, path, headers=headers)
            assert answer.status_code == status, (method, path)


async def test_a_revoked_key_ends_its_batches(tmp_path: Path) -> None:
    waiting_calls = WaitingCalls()
    async with gateway(tmp_path, waiting_calls) as (server, upstream):
        client = sdk(server.url, await make(server, "app"))
        batch = await make_batch(client, batch_input(20))
        await until(lambda: waiting_calls.count > 0)
        assert (await server.client.delete("/admin/keys/app")).status_code == 200
        record = tmp_path / "data" / "batches" / "batches" / f"{batch.id}.json"
        await until(lambda: json.loads(record.read_bytes())["status"] == "failed")
        assert json.loads(record.read_bytes())["errors"][0]["code"] == "key_revoked"
        await until(lambda: not waiting_calls.count)
        assert asked_count(upstream) <= 20
        with pytest.raises(openai.AuthenticationError):
            await client.batches.retrieve(batch.id)
        await client.close()


async def test_lines_count_to_the_limits_and_the_usage_of_their_key(tmp_path: Path) -> None:
    running_counts = [0]

    async def script(call: Call) -> None:
        running_counts.append(running_counts[-1] + 1)
        for _ in range(20):
            await asyncio.sleep(0)
        running_counts.append(running_counts[-1] - 1)
        await answer_with_usage(call)

    async with gateway(tmp_path, script) as (server, _):
        client = sdk(server.url, await make(server, "app", max_in_flight=4))
        batch = await run_batch(client, batch_input(30))
        assert batch.status == "completed"
        assert max(running_counts) <= 3
        usage = (await server.client.get("/admin/usage", params={"by": "key"})).json()
        rows = {row["key"]: row for row in usage["data"]}
        assert rows["app"]["requests"] == 30
        assert rows["app"]["prompt_tokens"] == 900
        await client.close()


async def test_a_key_with_a_full_minute_goes_on_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.proxy.access.rate_limits.MINUTE_S", 1.0)
    async with gateway(tmp_path) as (server, upstream):
        client = sdk(server.url, await make(server, "app", requests_per_minute=20))
        batch = await make_batch(client, batch_input(40))
        record = tmp_path / "data" / "batches" / "batches" / f"{batch.id}.json"
        await until(lambda: json.loads(record.read_bytes())["status"] == "completed")
        assert asked_count(upstream) == 40
        assert json.loads(record.read_bytes())["failed"] == 0
        await client.close()


async def test_lines_of_a_spent_budget_wait_and_are_answered_once(
    tmp_path: Path, delayed_batches: list[str]
) -> None:
    answers: Counter[str] = Counter()

    async def script(call: Call) -> None:
        answers[json.loads(call.body)["user"]] += 1
        await answer_with_usage(call)

    async with gateway(tmp_path, script) as (server, _):
        key = await make(server, "app", budget={"tokens_per_day": 200})
        client = sdk(server.url, key)
        lines = [batch_line(f"line-{number}", user=str(number)) for number in range(20)]
        batch = await make_batch(client, b"".join(lines))
        await until_delays(delayed_batches, 8)
        # Four answers spend the budget, and requests in time may exceed it.
        assert 4 <= len(answers) < 8
        path = "/admin/keys/app/budget"
        assert (await server.client.put(path, json={})).status_code == 200
        batch = await until_status(client, batch)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        rows = await results(client, batch.output_file_id)
        assert ids(rows) == [f"line-{number}" for number in range(20)]
        assert answers == Counter(map(str, range(20)))
        usage = (await server.client.get("/admin/usage", params={"by": "key"})).json()
        (row,) = (row for row in usage["data"] if row["key"] == "app")
        assert (row["requests"], row["prompt_tokens"]) == (20, 600)
        await client.close()


async def test_a_batch_of_a_spent_budget_holds_up_no_other_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delayed_batches: list[str]
) -> None:
    monkeypatch.setattr(reading_turns, "MAX_TURNS", 1)
    async with gateway(tmp_path) as (server, upstream):
        poor_client = sdk(server.url, await make(server, "poor", budget={"tokens_per_day": 50}))
        rich_client = sdk(server.url, await make(server, "rich"))
        poor_batch = await make_batch(poor_client, batch_input(10))
        await until_delays(delayed_batches, 3)
        rich_batch = await run_batch(rich_client, batch_input(10))
        assert rich_batch.status == "completed"
        assert 11 <= asked_count(upstream) < 15
        assert set(delayed_batches) == {poor_batch.id}
        for client in (poor_client, rich_client):
            await client.close()


async def test_an_input_that_is_gone_ends_a_batch_without_a_path(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (server, _):
        client = sdk(server.url, await make(server, "app"))
        file = await client.files.create(file=("x", batch_input(1)), purpose="batch")
        (tmp_path / "data" / "batches" / "files" / file.id).unlink()
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        batch = await until_status(client, batch)
        assert batch.status == "failed"
        assert batch.errors is not None
        (error,) = batch.errors.data or []
        assert error.code == "input_unreadable"
        assert error.message == "The input cannot be read: No such file or directory."
        await client.close()


async def test_results_beyond_the_quota_end_a_batch(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        await call.reply(json.dumps({"id": "c1", "text": "x" * 5000}).encode())

    async with gateway(tmp_path, script, batch_key_bytes=60_000) as (server, _):
        client = sdk(server.url, await make(server, "app"))
        batch = await run_batch(client, batch_input(100))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [error.code for error in batch.errors.data or []] == ["quota_reached"]
        rows = await results(client, batch.output_file_id)
        assert 0 < len(rows) < 12
        assert len({row["custom_id"] for row in rows}) == len(rows)
        with pytest.raises(openai.APIStatusError) as error:
            await client.files.create(file=("x", b"x" * 50_000), purpose="batch")
        assert error.value.status_code == 413
        await client.close()


async def test_a_full_disk_makes_results_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended = result_writer.ResultWriter.write
    refusals: list[Any] = []

    def write(writer: Any, lines: Any) -> None:
        if len(refusals) < 3:
            refusals.append(lines)
            raise OSError(28, "No space left on device")
        appended(writer, lines)

    monkeypatch.setattr(result_writer.ResultWriter, "write", write)
    monkeypatch.setattr("gateway.server.batches.result_writer._DISK_RETRY_S", 0.01)
    async with gateway(tmp_path) as (server, upstream):
        client = sdk(server.url, await make(server, "app"))
        batch = await run_batch(client, batch_input(20))
        assert (batch.status, asked_count(upstream)) == ("completed", 20)
        assert ids(await results(client, batch.output_file_id)) == ids(
            {"custom_id": f"line-{number}"} for number in range(20)
        )
        await client.close()


async def test_a_stopped_gateway_goes_on_with_the_lines_without_an_answer(tmp_path: Path) -> None:
    answers: Counter[str] = Counter()
    waiting_calls = WaitingCalls()

    async def script(call: Call) -> None:
        user = json.loads(call.body)["user"]
        if sum(answers.values()) >= limit:
            await waiting_calls(call)
            return
        answers[user] += 1
        await answer_with_usage(call)

    lines = b"".join(batch_line(f"line-{number}", user=str(number)) for number in range(60))
    limit = 25
    async with Upstream(script) as upstream:
        async with running(tmp_path, unused_script) as server:
            await serve_models(server, upstream, [{"id": "a", "object": "model"}])
            client = sdk(server.url)
            batch = await make_batch(client, lines)
            await until(lambda: waiting_calls.count > 0)
            await until_count(client, batch, limit)
            await client.close()
        limit = 1000
        async with running(tmp_path, unused_script) as server:
            client = sdk(server.url)
            batch = await until_status(client, batch)
            assert batch.status == "completed"
            rows = await results(client, batch.output_file_id)
            assert ids(rows) == [f"line-{number}" for number in range(60)]
            assert set(answers.values()) == {1}
            await client.close()
