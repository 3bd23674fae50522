"""A pass over many models at rest looks at none of them, and an order or a request ends a rest."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.fleet import model_state, route_table
from gateway.controller.steps.replica_steps import ReplicaSteps
from gateway.domain import LaunchSpec
from gateway.server.admin import model_routes, model_views
from tests.support.makers import LLAMA_8B, machine
from tests.support.patience import hang_s
from tests.support.running import model_folder, running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

MODELS = 12


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


async def test_passes_and_lists_cost_nothing_for_models_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[tuple[str, str]] = Counter()
    attend, route, view = ReplicaSteps.step, model_state.route, model_views.view

    async def counted_attend(self: ReplicaSteps, model: Any, *rest: Any) -> None:
        looks["step", model.wish.name] += 1
        await attend(self, model, *rest)

    def counted_route(model: Any, *rest: Any) -> Any:
        looks["route", model.wish.name] += 1
        return route(model, *rest)

    def counted_view(model: Any, *rest: Any, **options: Any) -> Any:
        looks["view", model.wish.name] += 1
        return view(model, *rest, **options)

    monkeypatch.setattr(ReplicaSteps, "step", counted_attend)
    monkeypatch.setattr(route_table, "route", counted_route)
    monkeypatch.setattr(model_routes, "view", counted_view)
    async with running(tmp_path, healthy, hardware=machine("3090")) as gateway:
        source = model_folder(tmp_path / "model", **LLAMA_8B)
        names = [f"m{number}" for number in range(MODELS)]
        for name in names:
            await gateway.add(name, source, engines=["vllm==0.26.0"])
            answer = await gateway.client.post(f"/admin/models/{name}/stop")
            assert answer.status_code == 202
        for name in names:
            await gateway.until(name, "stopped")
        await gateway.client.post("/admin/models/m0/start")
        await gateway.until("m0", "ready")
        resting = set(names[1:])
        async with asyncio.timeout(hang_s()):
            while True:
                await gateway.client.get("/admin/models")
                looks.clear()
                views = (await gateway.client.get("/admin/models")).json()["data"]
                while looks["step", "m0"] < 10:
                    await asyncio.sleep(0.05)
                if not {name for _, name in looks} & resting:
                    break
        assert {view["name"] for view in views} == set(names)
        # Another wish is seen in the list, and an order ends the rest.
        await gateway.client.patch("/admin/models/m3", json={"aliases": ["other"]})
        views = (await gateway.client.get("/admin/models")).json()["data"]
        assert [view["wish"]["aliases"] for view in views if view["name"] == "m3"] == [["other"]]
        assert (await gateway.client.get("/v1/models/other")).json()["state"] == "stopped"
        await gateway.client.post("/admin/models/m0/stop")
        await gateway.client.post("/admin/models/m3/start")
        await gateway.until("m3", "ready")
        assert (await gateway.client.delete("/admin/models/m5")).status_code == 202
        async with asyncio.timeout(hang_s()):
            while (await gateway.client.get("/admin/models/m5")).status_code != 404:
                await asyncio.sleep(0.05)
