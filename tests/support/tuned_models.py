"""Models whose plans are measured, and their scripted speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.domain import LaunchSpec
from tests.support.makers import LLAMA_8B, machine
from tests.support.memory_host import World
from tests.support.patience import wait_until
from tests.support.running import Running, model_folder, running
from tests.support.scripted_engine import EngineScript
from tests.support.versions import VLLM_REF

# Far slower than any forecast of such a card, as a busy machine is.
SLOW, FAST = 20.0, 160.0


def paced_script(*fast: str, **of_fast: Any) -> Any:
    """Engines with one of these flags are fast, all others slow."""

    def script(spec: LaunchSpec) -> EngineScript:
        is_fast = any(item in spec.argv for item in fast)
        return EngineScript(
            model=spec.model,
            max_model_len=400_000,
            tokens_per_second=FAST if is_fast else SLOW,
            **(of_fast if is_fast else {}),
        )

    return script


def tune(tmp_path: Path, script: Any, name: str = "2x3090", world: World | None = None) -> Any:
    return running(tmp_path, script, world, hardware=machine(name))


async def add_model(gateway: Running, tmp_path: Path, **wish: Any) -> Any:
    # A short context has short prompts and answers.
    folder = model_folder(tmp_path / "model", **{**LLAMA_8B, "max_position_embeddings": 32})
    fields = {"engines": [VLLM_REF], "gpus": 1, "replicas": 1, "concurrency": 2, "check": False}
    await gateway.add("m", folder, **{**fields, **wish})
    view = await gateway.until("m", "ready")
    return view["attempts"][0]


async def wait_for_end(gateway: Running) -> Any:
    """The report of the search once it has ended."""

    async def look() -> Any:
        report = (await gateway.client.get("/admin/models/m/tune")).json()
        return None if report["state"] == "running" else report

    return await wait_until("the search has ended", look)


async def lone_attempt(gateway: Running) -> Any:
    """The one live attempt, once it serves and no other engine runs."""

    async def look() -> Any:
        view = await gateway.show("m")
        live = [
            attempt for attempt in view["attempts"] if attempt["state"] in ("starting", "ready")
        ]
        is_alone = [*gateway.world.engines] == [row["instance"] for row in live]
        return live[0] if view["state"] == "ready" and is_alone else None

    return await wait_until("one engine serves", look)
