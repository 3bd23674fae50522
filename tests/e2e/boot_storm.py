"""Gateway and all engines killed together, again and again, as by a power cut: twelve models on
four GPUs start anew at once.

`python -m tests.e2e.boot_storm --rounds 50` prints the figures of
benchmarks/notebook/reliability.md, and ends with 1 where a start failed by a neighbour, a model did
not get ready, or something wrong was learned. `--ungated` shows the figures without the gate of
starts.

Everything is real but the engines and their GPUs: tests/support/memory_engine.py takes and measures
memory as vLLM does, of GPUs that exist in a folder only (tests/support/pretended_gpus.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gateway.domain import Hardware
from gateway.planner.sizes import UNCERTAINTY_PARTS
from gateway.profiles.profile_tables import shipped_profiles
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines
from tests.support.makers import LLAMA_8B
from tests.support.paths import ROOT
from tests.support.patience import HANG_S
from tests.support.sparse_weights import write_weights

ENGINE = "vllm==0.26.0"
SNAPSHOT = "4xh100"
SHARE = 0.3
SMALL = {
    **LLAMA_8B,
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
}
SMALL |= {
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "head_dim": 64,
}
# How an attempt ends whose engine was killed.
_KILLED = ("killed", "exited")
# The bytes that an engine measures alone, give or take rounding.
_NEAR = 64 * 2**20
# The bytes of a GPU that an engine with given bytes has less.
_OFF = 0.02


@dataclass
class StormSummary:
    """The results of all rounds together."""

    ready: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    measured: int = 0
    """KV caches that were made."""
    short: int = 0
    """KV caches that were measured smaller or larger than alone, of engines that got as far as
    that."""
    sized: int = 0
    """KV caches of a size that was given."""
    slowest_s: float = 0.0

    @property
    def good(self) -> bool:
        return not self.failures and not self.facts and not self.short


class BootStorm:
    """`folder` keeps everything. models: so many, spread over the GPUs by the planner."""

    def __init__(
        self,
        folder: Path,
        models: int = 12,
        gpus: int = 4,
        *,
        ungated: bool = False,
        snapshot: str = SNAPSHOT,
    ) -> None:
        shipped_one = Hardware.model_validate_json(
            (shipped_profiles() / "hardware" / f"{snapshot}.json").read_bytes()
        )
        self.machine: Hardware = shipped_one.select_gpus(lambda gpu: gpu.index < gpus)
        described = folder / "machine.json"
        described.write_text(self.machine.model_dump_json(by_alias=True))
        self.gpus = folder / "gpus"
        self.gpus.mkdir()
        settings = {
            "FITSERVE_TICK_S": "0.1",
            "FITSERVE_BACKOFF_S": "0.2",
            "FITSERVE_HEALTH_INTERVAL_S": "0.2",
            "FITSERVE_STOP_GRACE_S": "1",
        }
        self.gateway = Gateway(folder / "data", folder / "gateway.log", **settings)
        self.gateway.command = [
            "-m",
            "tests.support.shared_gpus_gateway",
            str(described),
            str(self.gpus),
            *(["ungated"] if ungated else []),
        ]
        self._install(self.gateway.data / "engines" / "vllm-0.26.0")
        self.source = folder / "model"
        self.source.mkdir()
        (self.source / "config.json").write_text(json.dumps(SMALL))
        write_weights(self.source, SMALL)
        self.names = [f"m{number}" for number in range(models)]
        self.summary = StormSummary()
        self._attempts: set[tuple[str, int]] = set()
        self._measured = 0

    def _install(self, environment: Path) -> None:
        (environment / "bin").mkdir(parents=True)
        (environment / ".complete").touch()
        python = environment / "bin" / "python"
        total = self.machine.gpus[0].total_bytes
        played = (
            f"{sys.executable} -S {ROOT / 'tests/support/memory_engine.py'} {self.gpus} {total}"
        )
        # It has no code to ask. Behind a door, or without a warm-up, its program is code too.
        script = 'case "$1$2" in -c*fitserve_door*|-c*PLACES*) ;; -c*) exit 1 ;; esac'
        python.write_text(f'#!/bin/sh\n{script}\nshift 2\nexec {played} "$@"\n')
        python.chmod(0o755)

    def begin(self) -> None:
        """All models are added at once."""
        self.gateway.start()
        for name in self.names:
            self.add(name, args={"gpu-memory-utilization": SHARE}, replicas=1)
        self.settle()

    def add(self, name: str, **wish: Any) -> None:
        body = {
            "name": name,
            "source": str(self.source),
            "engines": [ENGINE],
            "check": False,
            **wish,
        }
        answer = self.gateway.client.post("/admin/models", json=body)
        assert answer.status_code == 202, answer.text

    def rounds(self, count: int) -> None:
        for _ in range(count):
            pids = [pid for family in engines(self.gateway).values() for pid in family]
            self.gateway.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for("all engines are gone", lambda: not engines(self.gateway))
            self.gateway.start()
            self.settle()

    def settle(self) -> None:
        """Wait until all models are ready, and count the ends of their starts."""
        began = time.monotonic()
        with contextlib.suppress(AssertionError):
            wait_for("all models are ready", self._all_ready, 2 * HANG_S, 0.05)
        self.summary.slowest_s = max(self.summary.slowest_s, time.monotonic() - began)
        self.summary.ready += sum(
            view["state"] == "ready" for view in map(self.gateway.show, self.names)
        )
        self._count()
        # An engine that dies five times within ten minutes of its starts is left alone otherwise.
        for name in self.names:
            self.gateway.client.post(f"/admin/models/{name}/retry").raise_for_status()

    def _all_ready(self) -> bool:
        # Attempts of before the kill are ready in the database until the gateway has seen that
        # their engines are gone.
        live = engines(self.gateway)
        return len(live) == len(self.names) and all(
            model["state"] == "ready"
            for model in self.gateway.client.get("/admin/models").json()["data"]
        )

    def _count(self) -> None:
        for name in self.names:
            for attempt in self.gateway.show(name)["attempts"]:
                key = name, attempt["id"]
                failure = attempt["failure"]
                if (
                    key not in self._attempts
                    and failure is not None
                    and failure["kind"] not in _KILLED
                ):
                    self._attempts.add(key)
                    self.summary.failures[failure["kind"]] += 1
        facts: list[dict[str, Any]] = [
            row["fact"]
            for row in self.gateway.client.get("/admin/facts").json()["data"]
            if row["id"] is not None
        ]
        self.summary.facts |= Counter(fact["kind"] for fact in facts if fact["grade"] == "failed")
        file = self.gpus / "measured"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        # An engine with given bytes gets a little less than one that measures alone, and never
        # more; and before the first start of its plan, less for the unsure part of the rest.
        max_error = _NEAR + int(_OFF * (self.machine.gpus[0].total_bytes or 0))
        self.summary.short += sum(
            not (
                row["alone"]
                - (max_error + row["beside"] // UNCERTAINTY_PARTS if row["sized"] else _NEAR)
                <= row["bytes"]
                <= row["alone"] + _NEAR
            )
            for row in rows[self._measured :]
        )
        self.summary.sized += sum(row["sized"] for row in rows[self._measured :])
        self._measured = self.summary.measured = len(rows)

    def close(self) -> None:
        self.gateway.close()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--ungated", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="boot-storm-"))
    storm = BootStorm(folder, args.models, ungated=args.ungated)
    try:
        storm.begin()
        for number in range(args.rounds):
            storm.rounds(1)
            say(f"{number + 1:4}  {storm.summary}")
    finally:
        with contextlib.suppress(httpx.HTTPError):
            storm.close()
    boots, goal = storm.summary, args.models * (args.rounds + 1)
    good = boots.good and boots.ready == goal
    say(
        f"{boots.ready} of {goal} starts ready, failed {dict(boots.failures)}, learned"
        f" {dict(boots.facts)}, {boots.short} of {boots.measured} caches of a wrong size,"
        f" {boots.sized} were given theirs in bytes, slowest boot {boots.slowest_s:.1f} s"
    )
    if good:
        shutil.rmtree(folder)
    else:
        say(f"kept: {folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
