"""The five reported failures, played end to end: a whole gateway on the machines that reported them, with engines that print what
the real ones print whenever they get the plan that fails in reality.

Each is played twice: with all that is shipped, where the planner foresees the failure, and without that knowledge, where the
failure happens, is understood, and the next plan serves. What was learned then is used by the next start, also by another gateway
on the same data.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
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
    """Take shipped knowledge away: a rule from a file of profiles/ (file, text, what stands there instead), or a whole file."""

    def forget(file: str, rule: str = "", instead: str = "") -> None:
        whole, part = profiles.shipped(), tmp_path / "shipped"
        shutil.copytree(whole, part, copy_function=os.symlink)
        changed = part / file
        text = changed.read_text()
        changed.unlink()
        if rule:
            assert text.count(rule) == 1
            changed.write_text(text.replace(rule, instead))
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


async def facts(gateway: Running) -> list[Any]:
    found: list[Any] = (await gateway.client.get("/admin/facts")).json()["data"]
    return found


def show(view, starts):
    for a, s in zip(view["attempts"], starts.specs, strict=False):
        print(a["engine"], a["state"], a["failure"] and (a["failure"]["kind"], a["failure"]["phase"], a["failure"]["culprit"], a["failure"]["line"]), s.argv, s.env)
    print(view["state"], view["detail"])


# --- 000: two RTX 3090, Qwen3.6-35B-A3B in 4 bits: no kernel takes the 32 rows of a gate that is cut in two ---

QWEN36 = config("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"])
MARLIN_TILES = "      - n_multiple: 64\n      - k_multiple: 128\n      - whole_groups: rank unless one group\n"


def gates_cut_in_two(spec: LaunchSpec) -> EngineScript | None:
    cut = value(spec, "tensor-parallel-size", "1") == "2" and spec.engine.version == "0.19.1"
    return dies(spec, "failed-000-wna16-n32-0.19.1") if cut and value(spec, "dtype") != "float16" else None


async def test_000_is_foreseen_and_served_by_two_copies(tmp_path: Path) -> None:
    starts = Starts(gates_cut_in_two)
    source = folder(tmp_path / "model", QWEN36)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1")
        view = await gateway.until("m", "ready", 30)
        show(view, starts)
        assert starts.failed == 0


async def test_000_is_recovered_from(tmp_path: Path, ignorant: Callable[..., None]) -> None:
    ignorant("engines/vllm/0.19.1/linear.yaml", MARLIN_TILES)
    starts = Starts(gates_cut_in_two)
    source = folder(tmp_path / "model", QWEN36)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", min_context=200000)
        view = await gateway.until("m", "ready", 30)
        show(view, starts)
        print(await facts(gateway))


async def test_000_is_recovered_from2(tmp_path: Path, ignorant: Callable[..., None]) -> None:
    ignorant("engines/vllm/0.19.1/linear.yaml", MARLIN_TILES)
    starts = Starts(gates_cut_in_two)
    source = folder(tmp_path / "model", QWEN36)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", tensor_parallel=2)
        view = await gateway.until("m", "ready", 30)
        show(view, starts)
        print(await facts(gateway))


GPT_OSS_CT = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4-ct"])
MOE_TILES = "      - any_of: [{n_multiple: 64, k_multiple: 128}, {n_multiple: 128, k_multiple: 64}]\n"


def experts_of_2880(spec: LaunchSpec) -> EngineScript | None:
    if spec.engine.version != "0.18.0":
        return None
    log = [line for _, line in lines("failed-001-marlin-moe-first-request")]
    return replace(serves(spec), lines=tuple((0, line) for line in log[:20]), crash_prompt=1000, crash_lines=tuple(log[20:]))


async def test_001_foreseen(tmp_path: Path) -> None:
    starts = Starts(experts_of_2880)
    source = folder(tmp_path / "model", GPT_OSS_CT)
    async with running(tmp_path, starts, hardware=machine("rtx-pro-6000")) as gateway:
        answer = await gateway.client.post("/admin/models", json={"name": "m", "source": str(source), "engines": ["vllm==0.18.0"]})
        print(answer.status_code, answer.text)
        view = await gateway.until("m", "no_plan", 30)
        show(view, starts)
        await gateway.client.delete("/admin/models/m")
        await gateway.gone("m")
        await add(gateway, source, "vllm==0.18.0", "vllm==0.26.0")
        view = await gateway.until("m", "ready", 30)
        show(view, starts)


async def test_001_recovered(tmp_path: Path, ignorant) -> None:
    ignorant("engines/vllm/0.18.0/moe.yaml", MOE_TILES, "      - {n_multiple: 64}\n")
    starts = Starts(experts_of_2880)
    source = folder(tmp_path / "model", GPT_OSS_CT)
    async with running(tmp_path, starts, hardware=machine("rtx-pro-6000")) as gateway:
        await add(gateway, source, "vllm==0.18.0", args={"max-model-len": 32768})
        view = await gateway.until("m", "no_plan", 30)
        show(view, starts)
        print(await facts(gateway))


GROUP_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
ODD = config(
    "llama-3.1-8b",
    intermediate_size=2112,
    quantization_config={**QUANTS["w4a16"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP_32}}},
)


def inputs_of_2112(spec: LaunchSpec) -> EngineScript | None:
    odd = spec.engine.version == "0.19.1" and value(spec, "dtype") != "float16"
    return dies(spec, "failed-002-wna16-k2112-0.19.1") if odd else None


async def test_002_foreseen(tmp_path: Path) -> None:
    starts = Starts(inputs_of_2112)
    source = folder(tmp_path / "model", ODD)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", "vllm==0.26.0")
        view = await gateway.until("m", "ready", 30)
        show(view, starts)


async def test_002_recovered(tmp_path: Path, ignorant) -> None:
    ignorant("engines/vllm/0.19.1/linear.yaml", MARLIN_TILES)
    starts = Starts(inputs_of_2112)
    source = folder(tmp_path / "model", ODD)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", tensor_parallel=1)
        view = await gateway.until("m", "ready", 30)
        show(view, starts)
        print(await facts(gateway))


GEMMA = config("gemma-4-31b", quantization_config=QUANTS["auto-round-language"])


def drafter_has_no_backend(spec: LaunchSpec) -> EngineScript | None:
    return dies(spec, "failed-003-no-backend-0.26.0") if value(spec, "speculative-config") else None


async def test_003_foreseen(tmp_path: Path) -> None:
    starts = Starts(drafter_has_no_backend)
    source, drafter = folder(tmp_path / "model", GEMMA), folder(tmp_path / "drafter", DRAFTERS["dflash gemma-4-31b"])
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", drafter=str(drafter), tensor_parallel=2)
        view = await gateway.until("m", "ready", 30)
        show(view, starts)


async def test_003_recovered(tmp_path: Path) -> None:
    starts = Starts(drafter_has_no_backend)
    source, drafter = folder(tmp_path / "model", GEMMA), folder(tmp_path / "drafter", DRAFTERS["dflash gemma-4-31b"])
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.26.0", drafter=str(drafter), tensor_parallel=2)
        view = await gateway.until("m", "ready", 30)
        show(view, starts)
        print(await facts(gateway))


FP8 = {"quantization": "fp8", "kv-cache-dtype": "fp8_e4m3", "enforce-eager": True, "gpu-memory-utilization": 0.2, "max-model-len": 8192}


def cutlass_on_the_gb10(spec: LaunchSpec) -> EngineScript | None:
    disabled = "CutlassFP8ScaledMMLinearKernel" in spec.env.get("VLLM_DISABLED_KERNELS", "")
    fp8 = value(spec, "quantization") == "fp8" and spec.engine.version == "0.18.0"
    return dies(spec, "failed-004-error-internal-gdn") if fp8 and not disabled else None


async def test_004_foreseen(tmp_path: Path) -> None:
    starts = Starts(cutlass_on_the_gb10)
    source = folder(tmp_path / "model", config("qwen3.5-9b"))
    async with running(tmp_path, starts, hardware=machine("gb10")) as gateway:
        await add(gateway, source, "vllm==0.18.0", args=FP8)
        view = await gateway.until("m", "ready", 30)
        show(view, starts)


async def test_004_recovered(tmp_path: Path, ignorant) -> None:
    ignorant("facts.yaml")
    starts = Starts(cutlass_on_the_gb10)
    source = folder(tmp_path / "model", config("qwen3.5-9b"))
    async with running(tmp_path, starts, hardware=machine("gb10")) as gateway:
        await add(gateway, source, "vllm==0.18.0", args=FP8)
        view = await gateway.until("m", "ready", 30)
        show(view, starts)
        print(await facts(gateway))
