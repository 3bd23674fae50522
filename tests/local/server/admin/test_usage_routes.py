"""Usage of a whole gateway, over a socket."""

from __future__ import annotations

import contextlib
import csv
import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from gateway.domain.grant import Grant
from gateway.store.store import Store
from gateway.store.usage_table import PARTS
from tests.support.memory_host import World
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

SUMS = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "requests_without_usage")
ESTIMATED = "estimated_tokens"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def usage_rows(gateway: Running, **query: Any) -> list[dict[str, Any]]:
    answer = await gateway.client.get("/admin/usage", params=query)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def test_usage_is_by_day_key_and_model_and_survives_a_restart(tmp_path: Path) -> None:
    world = World()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        grant = Grant(name="root", scopes=("admin",)).model_dump()
        key = (await gateway.client.post("/admin/keys", json=grant)).json()["key"]
        gateway.client.headers["authorization"] = f"Bearer {key}"
        usage = (await gateway.client.post("/v1/chat/completions", json=CHAT)).json()["usage"]
        # A stream tells its tokens where its client asks for that, and else is counted without.
        for options in ({"stream_options": {"include_usage": True}}, {}):
            assert (
                await gateway.client.post(
                    "/v1/chat/completions", json={**CHAT, "stream": True, **options}
                )
            ).is_success
        # Requests that the gateway refuses reached no engine.
        assert (
            await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": "x"})
        ).status_code == 404
        (row,) = await usage_rows(gateway)
        sums = (3, 2 * usage["prompt_tokens"], 2 * usage["completion_tokens"], 0, 1)
        assert (row["key"], row["model"], *(row[name] for name in SUMS)) == ("root", "m", *sums)
        # The request alone has more than a token for each 8 bytes.
        assert row[ESTIMATED] > len(json.dumps(CHAT)) // 8
    async with running(tmp_path, healthy, world) as gateway:
        gateway.client.headers["authorization"] = f"Bearer {key}"
        await gateway.until("m", "ready")
        assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).is_success
        (row,) = await usage_rows(gateway, by="model")
        assert (row["day"], row["key"], row["model"], row["requests"]) == (None, None, "m", 4)
    # Counts after the last look are on the disk too.
    with sqlite3.connect(tmp_path / "data" / "fitserve.db") as db:
        assert db.execute("SELECT sum(requests) FROM usage").fetchone() == (4,)


async def test_usage_comes_as_csv_and_of_the_days_that_are_asked_for(tmp_path: Path) -> None:
    today = datetime.now(UTC).date()
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        for _ in range(2):
            assert (await gateway.client.post("/v1/chat/completions", json=CHAT)).is_success
        for options in (
            {"params": {"format": "csv", "by": "model"}},
            {"params": {"by": "model"}, "headers": {"accept": "text/csv"}},
        ):
            answer = await gateway.client.get("/admin/usage", **options)  # type: ignore[arg-type]
            assert answer.headers["content-type"] == "text/csv; charset=utf-8"
            (row,) = csv.DictReader(answer.text.splitlines())
            assert list(row) == ["model", *SUMS, ESTIMATED]
            assert (row["model"], row["requests"]) == ("m", "2")
        days = str(today - timedelta(days=1)), str(today + timedelta(days=1))
        assert len(await usage_rows(gateway, **{"from": days[0], "to": days[1]})) == 1
        assert await usage_rows(gateway, to=days[0]) == []
        assert await usage_rows(gateway, key="nobody") == []
        response = await gateway.client.get("/admin/usage", params={"by": "hour"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "by")
        assert (await gateway.client.get("/admin/usage", params={"to": "0001-01-01"})).json()[
            "data"
        ] == []


async def test_usage_of_an_older_database_has_no_estimates(tmp_path: Path) -> None:
    path = tmp_path / "fitserve.db"
    Store(path).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE usage DROP COLUMN estimated_tokens")
        db.execute("INSERT INTO usage VALUES (7, 'app', 'm', 2, 10, 5, 0, 1)")
        db.execute("PRAGMA user_version=15")
        db.commit()
    store = Store(path)
    (row,) = store.usage.sums(7, 7, PARTS, None, None)
    assert (row.requests, row.requests_without_usage, row.estimated_tokens) == (2, 1, 0)
    store.close()
