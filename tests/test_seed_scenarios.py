"""The five reported failures, played end to end: a whole gateway on the machines that reported them, with engines that print what
the real ones print whenever they get the plan that fails in reality.

Each is played twice: with all that is shipped, where the planner foresees the failure, and without that knowledge, where the
failure happens, is understood, and the next plan serves. What was learned then is used by the next start, also by another gateway
on the same data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import profiles
from gateway.domain import LaunchSpec
from gateway.hosts.memory import World
from gateway.hosts.twin import EngineScript
from tests.conformance.layer_cases import QUANTS
from tests.conformance.speculative_questions import DRAFTERS
from tests.makers import machine
from tests.published import config
from tests.running import Running, running

pytestmark = [pytest.mark.local, pytest.mark.anyio]

LOGS = Path(__file__).parent / "logs"


def lines(log: str) -> tuple[tuple[float, str], ...]:
    return tuple((0, line) for line in (LOGS / f"{log}.log").read_text().splitlines())


def value(spec: LaunchSpec, flag: str, default: str = "") -> str:
    return next((item.partition("=")[2] for item in spec.argv if item.startswith(f"--{flag}=")), default)


def serves(spec: LaunchSpec) -> EngineScript:
    context = value(spec, "max-model-len") or value(spec, "context-length")
    return EngineScript(model=spec.model, max_model_len=int(context))


def dies(spec: LaunchSpec, log: str) -> EngineScript:
    return EngineScript(model=spec.model, lines=lines(log), exit_code=1, serve=False)


class Starts:
    """What was started, in order. `fails` gives the log of the failure that this plan meets in reality, or None."""

    def __init__(self, play: Callable[[LaunchSpec], EngineScript | None]) -> None:
        self.specs: list[LaunchSpec] = []
        self.failed = 0
        self._play = play

    def __call__(self, spec: LaunchSpec) -> EngineScript:
        self.specs.append(spec)
        failure = self._play(spec)
        self.failed += failure is not None
        return failure or serves(spec)


def folder(path: Path, fields: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.fixture
def ignorant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Take shipped knowledge away: the rules of these engine versions, and with `facts` what is known to fail."""

    def forget(*engines: str, facts: bool = False) -> None:
        whole, part = profiles.shipped(), tmp_path / "shipped"
        for kind in (whole / "engines").iterdir():
            (part / "engines" / kind.name).mkdir(parents=True)
            for entry in kind.iterdir():
                if not (entry.is_dir() and f"{kind.name}=={entry.name}" in engines):
                    (part / "engines" / kind.name / entry.name).symlink_to(entry)
        for entry in whole.iterdir():
            if entry.name != "engines" and not (facts and entry.name == "facts.yaml"):
                (part / entry.name).symlink_to(entry)
        monkeypatch.setattr(profiles, "shipped", lambda: part)

    return forget


async def add(gateway: Running, source: Path, *engines: str, **fields: Any) -> Any:
    return await gateway.add("m", source, engines=list(engines), **fields)


async def again(gateway: Running, starts: Starts, source: Path, *engines: str, **fields: Any) -> Any:
    """Remove the model, and add it once more: its view when it is ready. Nothing may fail on the way."""
    before = starts.failed
    await gateway.client.delete("/admin/models/m")
    await gateway.gone("m")
    await add(gateway, source, *engines, **fields)
    view = await gateway.until("m", "ready", 30)
    assert starts.failed == before
    assert [attempt["failure"] for attempt in view["attempts"]] == [None] * len(view["attempts"])
    return view


# --- 000: two RTX 3090, Qwen3.6-35B-A3B in 4 bits: no kernel takes the 32 rows of a gate that is cut in two ---

QWEN36 = config("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"])


def gates_cut_in_two(spec: LaunchSpec) -> EngineScript | None:
    cut = value(spec, "tensor-parallel-size", "1") == "2" and spec.engine.version == "0.19.1"
    return dies(spec, "failed-000-wna16-n32-0.19.1") if cut and value(spec, "dtype") != "float16" else None


async def test_000_is_foreseen_and_served_by_two_copies(tmp_path: Path) -> None:
    starts = Starts(gates_cut_in_two)
    source = folder(tmp_path / "model", QWEN36)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1")
        view = await gateway.until("m", "ready", 30)
        print(json.dumps([(a["engine"], a["state"], a["failure"] and a["failure"]["kind"]) for a in view["attempts"]]))
        assert starts.failed == 0


async def test_000_is_recovered_from(tmp_path: Path, ignorant: Callable[..., None]) -> None:
    ignorant("vllm==0.19.1")
    starts = Starts(gates_cut_in_two)
    source = folder(tmp_path / "model", QWEN36)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1")
        view = await gateway.until("m", "ready", 30)
        for a, s in zip(view["attempts"], starts.specs, strict=False):
            print(a["engine"], a["state"], a["failure"] and (a["failure"]["kind"], a["failure"]["culprit"], a["failure"]["line"]), s.argv)
        print((await gateway.client.get("/admin/facts")).json())
