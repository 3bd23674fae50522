"""The five reported failures, played end to end: a whole gateway on the machines that reported them, with engines that print what
the real ones print whenever they get the plan that fails in reality.

Each is played twice: with all that is shipped, where the planner foresees the failure, and without that knowledge, where the
failure happens, is understood, and the next plan serves. What was learned then is used by the next start, also by another gateway
on the same data.
"""

from __future__ import annotations

import asyncio
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
    assert starts.failed == before, "\n".join(" ".join([*spec.argv, *spec.gpus]) for spec in starts.specs)
    assert [attempt["failure"] for attempt in view["attempts"]] == [None] * len(view["attempts"])
    return view


async def facts(gateway: Running, kind: str) -> list[dict[str, str]]:
    """The scopes of what was learned here."""
    found = (await gateway.client.get("/admin/facts")).json()["data"]
    return [one["fact"]["scope"] for one in found if one["id"] is not None and one["fact"]["kind"] == kind]


async def asked(gateway: Running, times: int) -> dict[str, int]:
    """How often each engine was asked, of so many requests; every one of them is answered."""
    before = {name: engine_requests(gateway, name) for name in gateway.world.engines}
    for _ in range(times):
        answer = await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3})
        assert answer.status_code == 200, answer.text
    return {name: engine_requests(gateway, name) - count for name, count in before.items()}


def engine_requests(gateway: Running, name: str) -> int:
    return sum(b"POST /v1/completions" in line for line in gateway.world.engines[name].log)


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
        await gateway.until("m", "ready", 30)
        view = await both_ready(gateway)
        assert starts.failed == 0
        assert [value(spec, "tensor-parallel-size") for spec in starts.specs] == ["1", "1"]
        assert len({spec.gpus for spec in starts.specs}) == 2
        assert {attempt["max_model_len"] for attempt in view["attempts"]} == {32768}
        refused = next(one for one in view["decision"]["rejected"] if one["tensor_parallel"] == 2)
        assert (refused["verdict"], refused["layer"]) == ("no_kernel", "language_model.model.layers.*.linear_attn.in_proj_ba")
        for kernel in ("CutlassW4A8", "Machete", "AllSpark", "Marlin", "Conch", "Exllama"):
            assert kernel in refused["reasons"][0]
        # Balanced, and one that is killed does not touch the other.
        shares = await asked(gateway, 40)
        assert sorted(shares.values()) == [20, 20]
        victim, other = sorted(gateway.world.engines)
        kept = gateway.world.engines[other]
        gateway.world.engines[victim].kill()
        async with asyncio.timeout(5):
            while victim in gateway.world.engines:
                await asyncio.sleep(0.01)
        assert set((await asked(gateway, 20)).values()) <= {20, 0}
        await both_ready(gateway)
        assert gateway.world.engines[other] is kept
        assert len({engine.spec.gpus for engine in gateway.world.engines.values()}) == 2
        await again(gateway, starts, source, "vllm==0.19.1")


async def both_ready(gateway: Running) -> Any:
    async with asyncio.timeout(20):
        while True:
            view = await gateway.show("m")
            if [one["state"] for one in view["replicas"]] == ["ready", "ready"]:
                return view
            await asyncio.sleep(0.02)


async def test_000_is_cured_by_a_newer_version_where_one_is_allowed(tmp_path: Path) -> None:
    starts = Starts(gates_cut_in_two)
    source = folder(tmp_path / "model", QWEN36)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", "vllm==0.26.0", tensor_parallel=2)
        await gateway.until("m", "ready", 30)
        (spec,) = starts.specs
        assert (spec.engine.version, value(spec, "tensor-parallel-size")) == ("0.26.0", "2")
        assert "--disable-custom-all-reduce" in spec.argv


async def test_000_is_recovered_from_by_one_who_insists_on_two_gpus(tmp_path: Path, ignorant: Callable[..., None]) -> None:
    ignorant("engines/vllm/0.19.1/linear.yaml", MARLIN_TILES)
    starts = Starts(gates_cut_in_two)
    source = folder(tmp_path / "model", QWEN36)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", tensor_parallel=2)
        view = await gateway.until("m", "ready", 30)
        first, second = view["attempts"]
        culprit = first["failure"]["culprit"]
        assert (first["failure"]["kind"], culprit["kernel"], culprit["n"]) == ("no_kernel", "MarlinLinearKernel", 32)
        assert culprit["layer"] == "in_proj_ba"
        assert "Failed to find a kernel that can implement the WNA16 linear layer" in first["failure"]["line"]
        assert [value(spec, "dtype") for spec in starts.specs] == ["bfloat16", "float16"]
        assert [scope["n"] for scope in await facts(gateway, "kernel_fails")] == ["32"]
        assert second["grade"] == "verified"
        await again(gateway, starts, source, "vllm==0.19.1", tensor_parallel=2)


# --- 001: RTX PRO 6000, gpt-oss-20b as compressed-tensors MXFP4: it loads, and dies at the first full batch ---

GPT_OSS_CT = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4-ct"])
MOE_TILES = "      - any_of: [{n_multiple: 64, k_multiple: 128}, {n_multiple: 128, k_multiple: 64}]\n"


def experts_of_2880(spec: LaunchSpec) -> EngineScript | None:
    """What it prints before its trace is a healthy start; then /health says 200, and short prompts are answered."""
    log = [line for _, line in lines("failed-001-marlin-moe-first-request")]
    cut = next(number for number, line in enumerate(log) if "ERROR" in line)
    return replace(serves(spec), lines=tuple((0, line) for line in log[:cut]), crash_prompt=1000, crash_lines=tuple(log[cut:]))


async def test_001_is_refused_with_its_reason_by_every_version(tmp_path: Path) -> None:
    starts = Starts(experts_of_2880)
    source = folder(tmp_path / "model", GPT_OSS_CT)
    async with running(tmp_path, starts, hardware=machine("rtx-pro-6000")) as gateway:
        await add(gateway, source, "vllm")
        view = await gateway.until("m", "no_plan", 30)
        assert not starts.specs
        assert "MARLIN would crash at the first request" in view["detail"]
        assert "K=2880, N=2880" in view["detail"]


async def test_001_is_met_before_traffic_and_never_tried_again(tmp_path: Path, ignorant: Callable[..., None]) -> None:
    ignorant("engines/vllm/0.18.0/moe.yaml", MOE_TILES, "      - {n_multiple: 64}\n")
    starts = Starts(experts_of_2880)
    source = folder(tmp_path / "model", GPT_OSS_CT)
    wanted: dict[str, Any] = {"args": {"max-model-len": 32768, "gpu-memory-utilization": 0.9}}
    async with running(tmp_path, starts, hardware=machine("rtx-pro-6000")) as gateway:
        await add(gateway, source, "vllm==0.18.0", **wanted)
        view = await gateway.until("m", "no_plan", 30)
        (attempt,) = view["attempts"]
        failure = attempt["failure"]
        assert (failure["kind"], failure["culprit"]["k"], failure["culprit"]["n"]) == ("kernel_runtime", 2880, 2880)
        assert "Invalid thread config" in failure["line"]
        assert attempt["ready_at"] is None
        assert (await gateway.client.get("/v1/models")).json()["data"] == []
        assert "is known to fail here" in view["detail"]
        (scope,) = await facts(gateway, "kernel_fails")
        assert (scope["capability"], scope["k"], scope["n"], scope["scheme"]) == ("12.0", "2880", "2880", "mxfp4")
    # Another gateway on the same data knows it too: nothing is started.
    async with running(tmp_path, starts, hardware=machine("rtx-pro-6000")) as gateway:
        await gateway.client.delete("/admin/models/m")
        await gateway.gone("m")
        await add(gateway, source, "vllm==0.18.0", **wanted)
        assert not (await gateway.until("m", "no_plan", 30))["attempts"]
        assert len(starts.specs) == 1


@pytest.mark.parametrize(
    "block", [{**QUANTS["fp8-dynamic"], "ignore": ["lm_head", "re:.*router$"]}, None], ids=["fp8", "bfloat16"]
)
async def test_001_the_same_weights_in_another_format_are_served(tmp_path: Path, block: dict[str, Any] | None) -> None:
    starts = Starts(lambda _: None)
    source = folder(tmp_path / "model", config("gpt-oss-20b", quantization_config=block))
    async with running(tmp_path, starts, hardware=machine("rtx-pro-6000")) as gateway:
        await add(gateway, source, "vllm==0.18.0")
        await gateway.until("m", "ready", 30)


# --- 002: RTX 3090, dense layers of 2112 inputs in 4 bits ---

GROUP_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
ODD = config(
    "llama-3.1-8b",
    intermediate_size=2112,
    quantization_config={**QUANTS["w4a16"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP_32}}},
)


def inputs_of_2112(spec: LaunchSpec) -> EngineScript | None:
    odd = spec.engine.version == "0.19.1" and value(spec, "dtype") != "float16"
    return dies(spec, "failed-002-wna16-k2112-0.19.1") if odd else None


async def test_002_is_served_by_a_newer_version(tmp_path: Path) -> None:
    starts = Starts(inputs_of_2112)
    source = folder(tmp_path / "model", ODD)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", "vllm==0.26.0", dtype="bfloat16")
        view = await gateway.until("m", "ready", 30)
        assert [spec.engine.version for spec in starts.specs] == ["0.26.0"]
        old = next(one for one in view["decision"]["rejected"] if one["engine"]["version"] == "0.19.1")
        assert old["verdict"] == "no_kernel"
        assert "K=2112 is not a multiple of 128" in old["reasons"][0]


async def test_002_is_recovered_from(tmp_path: Path, ignorant: Callable[..., None]) -> None:
    ignorant("engines/vllm/0.19.1/linear.yaml", MARLIN_TILES)
    starts = Starts(inputs_of_2112)
    source = folder(tmp_path / "model", ODD)
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", tensor_parallel=1)
        view = await gateway.until("m", "ready", 30)
        failure = view["attempts"][0]["failure"]
        assert (failure["kind"], failure["culprit"]["kernel"], failure["culprit"]["k"]) == (
            "no_kernel",
            "MarlinLinearKernel",
            2112,
        )
        assert [value(spec, "dtype") for spec in starts.specs] == ["bfloat16", "float16"]
        assert [scope["k"] for scope in await facts(gateway, "kernel_fails")] == ["2112"]
        await again(gateway, starts, source, "vllm==0.19.1", tensor_parallel=1)


# --- 003: two RTX 3090, Gemma 4 31B with a DFlash drafter that no attention backend computes ---

GEMMA = config("gemma-4-31b", quantization_config=QUANTS["auto-round-language"])


def drafter_has_no_backend(spec: LaunchSpec) -> EngineScript | None:
    return dies(spec, "failed-003-no-backend-0.26.0") if value(spec, "speculative-config") else None


async def test_003_a_version_without_the_method_serves_the_model_alone(tmp_path: Path) -> None:
    starts = Starts(drafter_has_no_backend)
    source, drafter = folder(tmp_path / "model", GEMMA), folder(tmp_path / "drafter", DRAFTERS["dflash gemma-4-31b"])
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.19.1", drafter=str(drafter), tensor_parallel=2)
        view = await gateway.until("m", "ready", 30)
        assert starts.failed == 0
        assert view["plan"]["speculation"]["value"] == "none"
        assert "has no such method" in view["plan"]["speculation"]["reason"]


async def test_003_a_drafter_that_fails_costs_only_itself(tmp_path: Path) -> None:
    starts = Starts(drafter_has_no_backend)
    source, drafter = folder(tmp_path / "model", GEMMA), folder(tmp_path / "drafter", DRAFTERS["dflash gemma-4-31b"])
    wanted = {"drafter": str(drafter), "tensor_parallel": 2}
    async with running(tmp_path, starts, hardware=machine("2x3090")) as gateway:
        await add(gateway, source, "vllm==0.26.0", **wanted)
        view = await gateway.until("m", "ready", 30)
        first, _ = view["attempts"]
        assert (first["failure"]["kind"], first["failure"]["culprit"]["head_dim"]) == ("no_backend", 256)
        drafting, alone = starts.specs
        assert '"num_speculative_tokens": 8' in value(drafting, "speculative-config")
        assert not [item for item in drafting.argv if "attention-backend" in item]
        assert not value(alone, "speculative-config")
        assert value(alone, "tensor-parallel-size") == "2"
        assert "failed here before" in view["plan"]["speculation"]["reason"]
        await again(gateway, starts, source, "vllm==0.26.0", **wanted)


# --- 004: DGX Spark, --quantization fp8: a kernel that passes every check, and dies while memory is measured ---

CUTLASS = "CutlassFP8ScaledMMLinearKernel"
FP8 = {"quantization": "fp8", "kv-cache-dtype": "fp8_e4m3", "enforce-eager": True}
FP8 |= {"gpu-memory-utilization": 0.2, "max-model-len": 8192}


def cutlass_on_the_gb10(log: str) -> Callable[[LaunchSpec], EngineScript | None]:
    def play(spec: LaunchSpec) -> EngineScript | None:
        chosen = value(spec, "quantization") == "fp8" and CUTLASS not in spec.env.get("VLLM_DISABLED_KERNELS", "")
        return dies(spec, log) if chosen and spec.engine.version == "0.18.0" else None

    return play


async def test_004_is_known_and_left_out(tmp_path: Path) -> None:
    starts = Starts(cutlass_on_the_gb10("failed-004-error-internal-gdn"))
    source = folder(tmp_path / "model", config("qwen3.5-9b"))
    async with running(tmp_path, starts, hardware=machine("gb10")) as gateway:
        await add(gateway, source, "vllm==0.18.0", args=FP8)
        await gateway.until("m", "ready", 30)
        (spec,) = starts.specs
        assert spec.env["VLLM_DISABLED_KERNELS"] == CUTLASS
        assert value(spec, "gpu-memory-utilization") == "0.2"


@pytest.mark.parametrize("log", ["error-internal-gdn", "error-internal-vision", "error-internal-short"])
async def test_004_is_recovered_from(tmp_path: Path, ignorant: Callable[..., None], log: str) -> None:
    ignorant("facts.yaml")
    starts = Starts(cutlass_on_the_gb10(f"failed-004-{log}"))
    source = folder(tmp_path / "model", config("qwen3.5-9b"))
    async with running(tmp_path, starts, hardware=machine("gb10")) as gateway:
        await add(gateway, source, "vllm==0.18.0", args=FP8)
        view = await gateway.until("m", "ready", 30)
        failure = view["attempts"][0]["failure"]
        assert (failure["kind"], failure["culprit"]["kernel"]) == ("kernel_runtime", CUTLASS)
        assert "Error Internal" in failure["line"]
        assert [spec.env.get("VLLM_DISABLED_KERNELS") for spec in starts.specs] == [None, CUTLASS]
        # The user's bound on memory, which the machine shares with everything else on it, is kept.
        assert {value(spec, "gpu-memory-utilization") for spec in starts.specs} == {"0.2"}
        (scope,) = await facts(gateway, "kernel_fails")
        assert scope == {"engine": "vllm==0.18.0", "capability": "12.1", "kernel": CUTLASS}
        await again(gateway, starts, source, "vllm==0.18.0", args=FP8)
    # So does another gateway on the same data, whose engine died meanwhile.
    starts.specs.clear()
    async with running(tmp_path, starts, hardware=machine("gb10")) as gateway:
        await gateway.until("m", "ready", 30)
        assert [spec.env.get("VLLM_DISABLED_KERNELS") for spec in starts.specs] == [CUTLASS]


async def test_004_an_unknown_text_gets_one_careful_try_and_a_whole_log(tmp_path: Path, ignorant: Callable[..., None]) -> None:
    ignorant("facts.yaml")
    starts = Starts(lambda spec: dies(spec, "failed-unknown-0.33.0"))
    source = folder(tmp_path / "model", config("qwen3.5-9b"))
    async with running(tmp_path, starts, hardware=machine("gb10")) as gateway:
        await add(gateway, source, "vllm==0.33.0")
        view = await gateway.until("m", "no_plan", 30)
        assert [attempt["failure"]["kind"] for attempt in view["attempts"]] == ["unknown", "unknown"]
        assert "--enforce-eager" in starts.specs[-1].argv
        kept = await gateway.client.get("/admin/models/m/logs")
        assert kept.text.splitlines() == [line for _, line in lines("failed-unknown-0.33.0")]
