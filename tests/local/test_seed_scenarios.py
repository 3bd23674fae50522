"""The five reported failures, played end to end: `fitserve serve` as a process on the machines that
reported them (as snapshots), its command line, its process host, and engines as processes that
print the real ones' lines whenever they are launched with settings that fail in reality
(tests/support/seed_engine.py).

Each is played with all that is shipped, where the planner foresees the failure, and without that
knowledge, where the failure happens, is understood, and the next plan serves. The learned facts are
used by the next start, also of another gateway on the same data.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.conformance.speculative_questions import DRAFTERS
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines
from tests.support.paths import LOGS, ROOT
from tests.support.published import config
from tests.support.versions import NEWEST_VLLM, VLLM_REF

PROFILES = Profiles()
FAST = {
    "FITSERVE_TICK_S": "0.05",
    "FITSERVE_HEALTH_INTERVAL_S": "0.2",
    "FITSERVE_BACKOFF_S": "0.2",
    "FITSERVE_STOP_GRACE_S": "2",
}


class Seed(Gateway):
    """A gateway on the machine of a snapshot. `forgets`: shipped knowledge that it does not
    have."""

    forks = True

    def __init__(self, folder: Path, machine: str, *versions: str) -> None:
        super().__init__(folder / "data", folder / "gateway.log", **FAST)
        self.folder = folder
        self.machine = shipped_profiles() / "hardware" / f"{machine}.json"
        self.profiles = shipped_profiles()
        for version in versions:
            environment = self.data / "engines" / f"vllm-{version}"
            (environment / "bin").mkdir(parents=True)
            (environment / ".complete").touch()
            python = environment / "bin" / "python"
            program = (
                f"{sys.executable} -S {ROOT / 'tests/support/seed_engine.py'} {version}"
                f" {folder / 'starts'}"
            )
            python.write_text(
                f'#!/bin/sh\n[ "$1" != -c ] || exit 1  # it has no code to ask\nexec {program}'
                ' "$@"\n'
            )
            python.chmod(0o755)

    def forgets(self, file: str, rule: str = "", replacement: str = "") -> None:
        """A rule of a file of profiles/ has something else in its place, or a whole file is not
        there."""
        self.profiles = self.folder / "profiles"
        shutil.copytree(shipped_profiles(), self.profiles, copy_function=os.symlink)
        profile_file = self.profiles / file
        text = profile_file.read_text()
        profile_file.unlink()
        if rule:
            assert text.count(rule) == 1
            profile_file.write_text(text.replace(rule, replacement))

    def launch(self) -> None:
        self.command = [
            "-m",
            "tests.support.snapshot_gateway",
            str(self.machine),
            str(self.profiles),
        ]
        super().launch()

    def add(self, fields: dict[str, Any], *options: str, code: int = 0) -> Any:
        """`fitserve add m FOLDER OPTIONS --wait`, of a model without weights: the model's view."""
        result = self.cli(
            "add",
            "m",
            str(self.model("model", fields)),
            "--arg",
            "load-format=dummy",
            *options,
            "--wait",
        )
        assert result.returncode == code, (
            f"{result.stdout}{result.stderr}\n{self.log.read_text()[-3000:]}"
        )
        return self.show("m")

    def model(self, name: str, fields: dict[str, Any]) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(fields))
        return path

    def add_again(self, fields: dict[str, Any], *options: str) -> None:
        """Removed and added once more, it is ready without a failed attempt; and so it is for the
        next gateway on the same data,
        whose engines died meanwhile."""
        last = self.show("m")["plan"]["argv"]
        for renew in (self.remove_model, self.restart):
            before = len(self.starts)
            renew()
            view = (
                self.add(fields, *options)
                if renew == self.remove_model
                else self.until("m", "ready")
            )
            wait_for(
                "all copies are started", partial(self.has_started, before + len(view["replicas"]))
            )
            assert not [start["ending"] for start in self.starts[before:] if start["ending"]]
            model_view = self.show("m")
            assert model_view["plan"]["argv"] == last
            failure_kinds = [
                attempt["failure"]["kind"]
                for attempt in model_view["attempts"]
                if attempt["started_at"] >= self.starts[before]["at"] and attempt["failure"]
            ]
            assert not failure_kinds

    def has_started(self, count: int) -> bool:
        return len(self.starts) >= count

    def remove_model(self) -> None:
        assert self.cli("rm", "m", "--wait").returncode == 0

    def restart(self) -> None:
        self.kill()
        for pids in engines(self).values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        self.start()

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Of the engines, as they saw it themselves. Every flag that they were given is one of that
        version's."""
        path = self.folder / "starts"
        starts = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        for start in starts:
            flags = PROFILES.engine(f"vllm=={start['version']}").flags
            names = [
                item.removeprefix("--").partition("=")[0]
                for item in start["argv"]
                if item.startswith("--")
            ]
            assert set(names) <= flags.keys()
        return starts

    def values(self, flag: str) -> list[str]:
        """The value of a flag at each start; "" where it had none."""
        text = f"--{flag}"
        return [
            next(
                (
                    item.partition("=")[2]
                    for item in start["argv"]
                    if item.partition("=")[0] == text
                ),
                "",
            )
            for start in self.starts
        ]

    def learned_scopes(self, kind: str) -> list[dict[str, str]]:
        """The scopes of facts that were learned here."""
        facts = self.client.get("/admin/facts").json()["data"]
        return [
            fact["fact"]["scope"]
            for fact in facts
            if fact["id"] is not None and fact["fact"]["kind"] == kind
        ]

    def requests_by_engine(self, times: int) -> list[int]:
        """How often each engine that lives was asked, of so many requests; every one of them is
        answered."""
        requests_before = self._requests()
        for _ in range(times):
            answer = self.client.post(
                "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
            )
            assert answer.status_code == 200, answer.text
        return [
            count - requests_before.get(name, 0)
            for name, count in self._requests().items()
            if name in engines(self)
        ]

    def _requests(self) -> dict[str, int]:
        return {
            path.stem: path.read_bytes().count(b"POST /v1/completions")
            for path in (self.data / "logs").glob("*.log")
        }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    seeds.clear()
    yield tmp_path
    for seed in seeds:
        seed.close()
        assert not engines(seed)


seeds: list[Seed] = []


def begin_seed(folder: Path, machine: str, *versions: str, forget: tuple[str, ...] = ()) -> Seed:
    seed = Seed(folder, machine, *versions)
    if forget:
        seed.forgets(*forget)
    seeds.append(seed)
    seed.start()
    return seed


# --- 000: two RTX 3090, Qwen3.6-35B-A3B in 4 bits: no kernel takes the 32 rows of a gate that is
# cut in two ---

QWEN36 = config("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"])
# Version 0.19.1 inherits the rule of Marlin from 0.18.0.
MARLIN_TILES = (
    "      - weights: [4-bit symmetric, 8-bit symmetric, 4-bit with zero points]\n"
    "      - groups: [-1, 32, 64, 128]\n"
    "      - n_multiple: 64\n      - k_multiple: 128\n      - whole_groups: rank unless one group\n"
)
NO_TILES = ("engines/vllm/0.18.0/linear.yaml", MARLIN_TILES)


def test_seed_scenario_000_is_foreseen_and_served_by_two_copies(folder: Path) -> None:
    seed = begin_seed(folder, "2x3090", "0.19.1")
    seed.add(QWEN36, "--engine", "vllm==0.19.1", "--replicas", "2")
    view = both_ready(seed)
    assert [start["ending"] for start in seed.starts] == ["", ""]
    assert seed.values("tensor-parallel-size") == ["1", "1"]
    assert len({start["env"]["CUDA_VISIBLE_DEVICES"] for start in seed.starts}) == 2
    assert {attempt["max_model_len"] for attempt in view["attempts"]} == {32768}
    rejection = next(
        rejection for rejection in view["decision"]["rejected"] if rejection["tensor_parallel"] == 2
    )
    assert (rejection["verdict"], rejection["layer"]) == (
        "no_kernel",
        "language_model.model.layers.*.linear_attn.in_proj_ba",
    )
    for kernel in ("CutlassW4A8", "Machete", "AllSpark", "Marlin", "Conch", "Exllama"):
        assert kernel in rejection["reasons"][0]
    # Balanced, and one that is killed does not touch the other.
    assert seed.requests_by_engine(40) == [20, 20]
    (victim, pids), (survivor, other_pids) = sorted(engines(seed).items())
    os.kill(pids[0], signal.SIGKILL)
    seed.wait_for_failure("m", victim)
    seed.requests_by_engine(20)
    both_ready(seed)
    assert engines(seed)[survivor] == other_pids
    assert victim not in engines(seed)
    assert len({start["env"]["CUDA_VISIBLE_DEVICES"] for start in seed.starts}) == 2
    seed.add_again(QWEN36, "--engine", "vllm==0.19.1", "--replicas", "2")


def both_ready(seed: Seed) -> Any:
    def both_replicas() -> Any:
        view = seed.show("m")
        return (
            [replica["state"] for replica in view["replicas"]] == ["ready", "ready"]
            and len(engines(seed)) == 2
            and view
        )

    return wait_for("both copies are ready", both_replicas)


def test_seed_scenario_000_is_cured_by_an_allowed_newer_version(folder: Path) -> None:
    seed = begin_seed(folder, "2x3090", "0.19.1", "0.26.0")
    seed.add(QWEN36, "--engine", "vllm==0.19.1", "--engine", "vllm==0.26.0", "--tp", "2")
    (start,) = seed.starts
    assert (start["version"], seed.values("tensor-parallel-size")) == ("0.26.0", ["2"])
    assert "--disable-custom-all-reduce" in start["argv"]


def test_seed_scenario_000_recovers_on_two_forced_gpus(folder: Path) -> None:
    seed = begin_seed(folder, "2x3090", "0.19.1", forget=NO_TILES)
    view = seed.add(QWEN36, "--engine", "vllm==0.19.1", "--tp", "2")
    first, second = view["attempts"]
    culprit = first["failure"]["culprit"]
    assert (first["failure"]["kind"], culprit["kernel"], culprit["n"]) == (
        "no_kernel",
        "MarlinLinearKernel",
        32,
    )
    assert culprit["layer"] == "in_proj_ba"
    assert (
        "Failed to find a kernel that can implement the WNA16 linear layer"
        in first["failure"]["line"]
    )
    assert seed.values("dtype") == ["bfloat16", "float16"]
    assert [scope["n"] for scope in seed.learned_scopes("kernel_refuses")] == ["32"]
    # Only that layer goes without Marlin: it is not switched off, which the engine can do for the
    # whole model only.
    assert "VLLM_DISABLED_KERNELS" not in seed.starts[-1]["env"]
    kernels = {row["layer"].rpartition(".")[2]: row["kernel"] for row in view["plan"]["kernels"]}
    assert (kernels["in_proj_ba"], kernels["in_proj_qkvz"]) == (
        "ExllamaLinearKernel",
        "MarlinLinearKernel",
    )
    assert second["grade"] == "verified"
    seed.add_again(QWEN36, "--engine", "vllm==0.19.1", "--tp", "2")


# --- 001: RTX PRO 6000, gpt-oss-20b as compressed-tensors MXFP4: it loads, and dies at the first
# full batch ---

GPT_OSS_CT = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4-ct"])
GPT_OSS_FP8 = config(
    "gpt-oss-20b",
    quantization_config={**QUANTS["fp8-dynamic"], "ignore": ["lm_head", "re:.*router$"]},
)
MOE_TILES = (
    "      - any_of: [{n_multiple: 64, k_multiple: 128}, {n_multiple: 128, k_multiple: 64}]\n"
)


def test_seed_scenario_001_is_refused_and_served_in_another_format(folder: Path) -> None:
    seed = begin_seed(folder, "rtx-pro-6000", "0.18.0")
    view = seed.add(GPT_OSS_CT, "--engine", "vllm", code=3)
    assert not seed.starts
    assert "MARLIN would crash at the first request" in view["detail"]
    assert "K=2880, N=2880" in view["detail"]
    for fields in (GPT_OSS_FP8, config("gpt-oss-20b", quantization_config=None)):
        seed.remove_model()
        seed.add(fields, "--engine", "vllm==0.18.0")
        assert not seed.starts[-1]["ending"]


def test_seed_scenario_001_fails_before_traffic_and_only_once(folder: Path) -> None:
    seed = begin_seed(
        folder,
        "rtx-pro-6000",
        "0.18.0",
        forget=("engines/vllm/0.18.0/moe.yaml", MOE_TILES, "      - {n_multiple: 64}\n"),
    )
    arguments = (
        "--engine",
        "vllm==0.18.0",
        "--arg",
        "max-model-len=32768",
        "--arg",
        "gpu-memory-utilization=0.9",
    )
    view = seed.add(GPT_OSS_CT, *arguments, code=3)
    (attempt,) = view["attempts"]
    failure = attempt["failure"]
    assert (failure["kind"], failure["culprit"]["k"], failure["culprit"]["n"]) == (
        "kernel_runtime",
        2880,
        2880,
    )
    assert "Invalid thread config" in failure["line"]
    assert attempt["ready_at"] is None
    assert [model_row["state"] for model_row in seed.client.get("/v1/models").json()["data"]] == [
        "no_plan"
    ]
    assert "is known to fail here" in view["detail"]
    (scope,) = seed.learned_scopes("kernel_fails")
    assert (scope["capability"], scope["k"], scope["n"], scope["scheme"]) == (
        "12.0",
        "2880",
        "2880",
        "mxfp4",
    )
    # Another gateway on the same data knows it too: nothing is started.
    seed.restart()
    seed.remove_model()
    assert not seed.add(GPT_OSS_CT, *arguments, code=3)["attempts"]
    assert len(seed.starts) == 1


# --- 002: RTX 3090, dense layers of 2112 inputs in 4 bits ---

GROUP_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
ODD = config(
    "llama-3.1-8b",
    intermediate_size=2112,
    quantization_config={
        **QUANTS["w4a16"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP_32}},
    },
)


def test_seed_scenario_002_is_served_by_a_newer_version(folder: Path) -> None:
    seed = begin_seed(folder, "2x3090", "0.19.1", "0.26.0")
    view = seed.add(
        {**ODD, "torch_dtype": "bfloat16"},
        "--engine",
        "vllm==0.19.1",
        "--engine",
        "vllm==0.26.0",
        "--arg",
        "dtype=bfloat16",
        "--gpus",
        "1",
    )
    assert [start["version"] for start in seed.starts] == ["0.26.0"]
    old = next(
        rejection
        for rejection in view["decision"]["rejected"]
        if rejection["engine"]["version"] == "0.19.1"
    )
    assert old["verdict"] == "no_kernel"
    assert "K=2112 is not a multiple of 128" in old["reasons"][0]


def test_seed_scenario_002_recovers(folder: Path) -> None:
    seed = begin_seed(folder, "2x3090", "0.19.1", forget=NO_TILES)
    view = seed.add(ODD, "--engine", "vllm==0.19.1", "--gpus", "1")
    failure = view["attempts"][0]["failure"]
    assert (failure["kind"], failure["culprit"]["kernel"], failure["culprit"]["k"]) == (
        "no_kernel",
        "MarlinLinearKernel",
        2112,
    )
    assert seed.values("dtype") == ["bfloat16", "float16"]
    assert [scope["k"] for scope in seed.learned_scopes("kernel_refuses")] == ["2112"]
    kernels = {row["layer"].rpartition(".")[2]: row["kernel"] for row in view["plan"]["kernels"]}
    assert (kernels["down_proj"], kernels["qkv_proj"]) == (
        "ExllamaLinearKernel",
        "MarlinLinearKernel",
    )
    seed.add_again(ODD, "--engine", "vllm==0.19.1", "--gpus", "1")


# --- 003: two RTX 3090, Gemma 4 31B with a DFlash drafter that no attention backend computes ---

GEMMA = config("gemma-4-31b", quantization_config=QUANTS["auto-round-language"])


def draft_flags(seed: Seed, version: str) -> tuple[str, ...]:
    drafter = seed.model("drafter", DRAFTERS["dflash gemma-4-31b"])
    return ("--engine", f"vllm=={version}", "--drafter", str(drafter), "--tp", "2")


def test_seed_scenario_003_serves_the_model_without_a_drafter(folder: Path) -> None:
    seed = begin_seed(folder, "2x3090", "0.19.1")
    view = seed.add(GEMMA, *draft_flags(seed, "0.19.1"))
    assert [start["ending"] for start in seed.starts] == [""]
    assert view["plan"]["speculation"]["value"] == "none"
    assert "has no such method" in view["plan"]["speculation"]["reason"]


def test_seed_scenario_003_drops_only_the_failed_drafter(folder: Path) -> None:
    seed = begin_seed(folder, "2x3090", "0.26.0")
    view = seed.add(GEMMA, *draft_flags(seed, "0.26.0"))
    first, _ = view["attempts"]
    assert (first["failure"]["kind"], first["failure"]["culprit"]["head_dim"]) == (
        "no_backend",
        256,
    )
    drafting, plain_configs = seed.values("speculative-config")
    assert '"num_speculative_tokens": 8' in drafting
    assert not plain_configs
    assert not [
        item for start in seed.starts for item in start["argv"] if "attention-backend" in item
    ]
    assert seed.values("tensor-parallel-size") == ["2", "2"]
    assert "failed here before" in view["plan"]["speculation"]["reason"]
    seed.add_again(GEMMA, *draft_flags(seed, "0.26.0"))


# --- 004: DGX Spark, --quantization fp8: a kernel that passes every check, and dies while memory is
# measured ---

CUTLASS = "CutlassFP8ScaledMMLinearKernel"
FP8 = (
    "quantization=fp8",
    "kv-cache-dtype=fp8_e4m3",
    "enforce-eager=true",
    "gpu-memory-utilization=0.2",
    "max-model-len=8192",
)
SPARK = ("--engine", "vllm==0.18.0", *(word for flag in FP8 for word in ("--arg", flag)))


def disabled_kernels(seed: Seed) -> list[str]:
    return [start["env"].get("VLLM_DISABLED_KERNELS", "") for start in seed.starts]


def test_seed_scenario_004_is_known_and_left_out(folder: Path) -> None:
    seed = begin_seed(folder, "gb10", "0.18.0")
    view = seed.add(config("qwen3.5-9b"), *SPARK)
    assert disabled_kernels(seed) == [CUTLASS]
    assert seed.values("gpu-memory-utilization") == ["0.2"]
    assert any("for the whole model only" in warning for warning in view["plan"]["warnings"])


def test_seed_scenario_004_recovers(folder: Path) -> None:
    seed = begin_seed(folder, "gb10", "0.18.0", forget=("facts.yaml",))
    view = seed.add(config("qwen3.5-9b"), *SPARK)
    failure = view["attempts"][0]["failure"]
    assert (failure["kind"], failure["culprit"]["kernel"]) == ("kernel_runtime", CUTLASS)
    assert "Error Internal" in failure["line"]
    assert disabled_kernels(seed) == ["", CUTLASS]
    # The user's bound on memory, which the machine shares with everything else on it, is kept.
    assert set(seed.values("gpu-memory-utilization")) == {"0.2"}
    (scope,) = seed.learned_scopes("kernel_fails")
    assert scope == {"engine": "vllm==0.18.0", "capability": "12.1", "kernel": CUTLASS}
    seed.add_again(config("qwen3.5-9b"), *SPARK)


def test_seed_scenario_004_tries_once_more_after_an_unknown_text(folder: Path) -> None:
    seed = begin_seed(folder, "gb10", NEWEST_VLLM, forget=("facts.yaml",))
    view = seed.add(config("qwen3.5-9b"), "--engine", VLLM_REF, code=3)
    assert [attempt["failure"]["kind"] for attempt in view["attempts"]] == ["unknown", "unknown"]
    assert "--enforce-eager" in seed.starts[-1]["argv"]
    stdout = seed.cli("logs", "m").stdout
    assert stdout.splitlines() == (LOGS / "failed-wrapper-only.log").read_text().splitlines()
