"""More models than memory under clients that ask for any of them, with the gateway killed in the
middle: the waits of requests, and the leaves of models.

`python -m tests.e2e.demand_storm --seconds 600` prints the figures of docs/on-demand.md, and ends
with 1 where a request failed, waited for longer than the bound, or a model left before its
residence was over; but for those that were loaded for no request, and left before they had one.

Everything is real but the engines and their GPU: tests/support/memory_engine.py takes memory as
vLLM does, of a GPU that exists in a folder only.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gateway.controller.decisions.eviction import MAX_S, MIN_S
from tests.e2e.boot_storm import BootStorm, say
from tests.e2e.conftest import wait_for
from tests.e2e.scripted import engines
from tests.support.makers import LLAMA_8B
from tests.support.patience import HANG_S, hang_s
from tests.support.sparse_weights import write_weights

MODELS, PLACES, CLIENTS = 5, 2, 8
# Two models of this size fit into 80 GiB with any context, and three do not.
LARGE = {**LLAMA_8B, "num_hidden_layers": 60}
_STOPS = "The gateway is stopping."
_MOMENT_S = 1.0
_LEFT = re.compile(r'^fitserve_unloads_total\{model="[^"]*",why="room"\} (\d+)', re.MULTILINE)


@dataclass
class ClientAnswers:
    """Answers that the clients saw. cut: begun before the gateway that was killed was back, and
    broken by that."""

    answered: int = 0
    cut: int = 0
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    by_model: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[str, float]] = field(default_factory=list)
    """Of which model, and when, in Unix seconds."""


@dataclass(frozen=True)
class Hurried:
    """A model that left for another one sooner than the least residence, in Unix seconds."""

    model: str
    loaded: float
    leaving_s: float


class DemandStorm(BootStorm):
    """`folder` keeps everything."""

    def __init__(self, folder: Path, chance: random.Random, gpus: int = 1) -> None:
        super().__init__(folder, MODELS, gpus)
        (self.source / "config.json").write_text(json.dumps(LARGE))
        write_weights(self.source, LARGE)
        self.answers = ClientAnswers()
        self.departures = 0
        self.slowest_load_s = 0.0
        self.plans: dict[str, set[str]] = {name: set() for name in self.names}
        """Fingerprints of the starts of each model."""
        self.plans_before: dict[str, set[str]] = {}
        """The same, as it was when the gateway was killed."""
        self._chance = chance
        self.away_s = 0.0
        """From the kill until the next gateway answers."""
        self._back_at = 0.0
        self._stop_event = threading.Event()
        self._killed = threading.Event()
        self._lock = threading.Lock()

    def begin(self) -> None:
        self.gateway.start()
        for name in self.names:
            self.add(name, replicas=1, max_context=8192, policy={"keep_alive": "10m"})

    def run(self, seconds: float) -> None:
        clients = [
            threading.Thread(target=self._ask, args=(random.Random(self._chance.random()),))
            for _ in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            time.sleep(seconds / 2)
            self._count()
            self.plans_before, self._back_at = copy.deepcopy(self.plans), math.inf
            self._killed.set()
            kill_time = time.monotonic()
            self.gateway.kill()
            self.gateway.start()
            self._back_at = time.monotonic()
            self.away_s = self._back_at - kill_time
            self._killed.clear()
            time.sleep(seconds / 2)
            # However slow the machine is: each model has its turn.
            wait_for(
                "each model was answered", lambda: len(self.answers.by_model) == MODELS, 4 * HANG_S
            )
            self._count()
        finally:
            self._stop_event.set()
            for client in clients:
                client.join(4 * hang_s())
        assert not any(client.is_alive() for client in clients), "a client hangs"

    def _ask(self, chance: random.Random) -> None:
        """One request after the other."""
        with httpx.Client(
            base_url=self.gateway.url, trust_env=False, timeout=4 * hang_s()
        ) as client:
            while not self._stop_event.is_set():
                name, streams = chance.choice(self.names), chance.random() < 0.5
                body = {
                    "model": name,
                    "prompt": "hi",
                    "max_tokens": chance.randint(1, 50),
                    "stream": streams,
                }
                began, why = time.monotonic(), ""
                try:
                    answer = client.post("/v1/completions", json=body)
                    if answer.status_code != 200 or (
                        streams and not answer.text.endswith("data: [DONE]\n\n")
                    ):
                        why = f"{name}: {answer.status_code} {answer.text[-300:]}"
                except httpx.HTTPError as error:
                    why = "" if self._gateway_dies() else f"{name}: {error!r}"
                    with self._lock:
                        self.answers.cut += not why
                    if not why:
                        continue
                # A worker of the gateway that was killed gives this reason.
                if _STOPS in why and began < self._back_at:
                    with self._lock:
                        self.answers.cut += 1
                    continue
                with self._lock:
                    if why:
                        self.answers.failed.append(why)
                    else:
                        self.answers.answered += 1
                        self.answers.by_model[name] += 1
                        self.answers.answers.append((name, time.time()))
                        self.answers.slowest_s = max(
                            self.answers.slowest_s, time.monotonic() - began
                        )
                time.sleep(chance.uniform(0, 0.2))

    def _gateway_dies(self) -> bool:
        """Whether the gateway was killed; then once it answers again."""
        if not self._killed.wait(0.2):
            return False
        wait_for("the gateway is back", lambda: not self._killed.is_set())
        return True

    def _count(self) -> None:
        """Before the counters of this gateway are gone."""
        text = self.gateway.client.get("/metrics").text
        self.departures += sum(int(count) for count in _LEFT.findall(text))
        for name in self.names:
            for attempt in self.gateway.show(name)["attempts"]:
                self.plans[name].add(attempt["fingerprint"])
                if attempt["ready_at"]:
                    self.slowest_load_s = max(
                        self.slowest_load_s, attempt["ready_at"] - attempt["started_at"]
                    )

    def hurried_requests(self) -> list[Hurried]:
        """Loads by the gateway's log. A line may be written a moment after its event."""
        loaded: dict[str, float] = {}
        requests = []
        for line in self.gateway.log.read_text().splitlines():
            if '"fitserve.loop"' not in line:
                continue
            document = json.loads(line)
            at = datetime.datetime.fromisoformat(document["timestamp"]).timestamp()
            if document["event"] in ("ready", "woke up"):
                loaded[document["model"]] = at
            elif document["event"] == "leaves" and document["why"].startswith("it makes room for"):
                hurried = Hurried(document["model"], loaded[document["model"]], at)
                requests += (
                    [hurried] if hurried.leaving_s - hurried.loaded < MIN_S - _MOMENT_S else []
                )
        return requests

    def longest_s(self) -> float:
        """A request waits no longer: by the measured times of the loads and the restart, so that a
        slow machine is allowed more time."""
        residence_s = min(MAX_S, max(MIN_S, self.slowest_load_s))
        return MODELS * (residence_s + 2 * self.slowest_load_s) + self.away_s

    def max_departures(self, seconds: float) -> float:
        """So many can have had their least residence."""
        return PLACES * (seconds / MIN_S + 2)

    def problems(self, seconds: float) -> list[str]:
        """The faults of a run."""
        lines = [f"failed: {why}" for why in self.answers.failed[:5]]
        if self.answers.slowest_s > self.longest_s():
            lines.append(
                f"a request waited {self.answers.slowest_s:.1f} s, and the bound is"
                f" {self.longest_s():.1f} s"
            )
        if self.departures > self.max_departures(seconds):
            lines.append(
                f"{self.departures} models left for another one, and"
                f" {self.max_departures(seconds):.0f} could have had their residence"
            )
        lines += [
            f"{hurried.model} left after {hurried.leaving_s - hurried.loaded:.1f} s, and had"
            " answered somebody"
            for hurried in self.hurried_requests()
            if any(
                name == hurried.model and hurried.loaded <= at <= hurried.leaving_s
                for name, at in self.answers.answers
            )
        ]
        if len(self.answers.by_model) < MODELS:
            lines.append(f"only {sorted(self.answers.by_model)} were answered")
        return lines

    def figures(self, seconds: float) -> dict[str, object]:
        counts = self.answers
        return {
            "seconds": round(seconds),
            "answered": counts.answered,
            "failed": len(counts.failed),
            "cut by the kill": counts.cut,
            "slowest request s": round(counts.slowest_s, 1),
            "its bound s": round(self.longest_s(), 1),
            "slowest load s": round(self.slowest_load_s, 1),
            "gateway away s": round(self.away_s, 1),
            "left for another": self.departures,
            "bound of that": round(self.max_departures(seconds)),
            "of them before their residence": len(self.hurried_requests()),
            "plans of each model": [len(plan) for plan in self.plans.values()],
            "of them new after the kill": [
                len(plans_of_model - self.plans_before[name])
                for name, plans_of_model in self.plans.items()
            ],
            "by model": dict(sorted(counts.by_model.items())),
        }

    def end(self) -> None:
        """Leave nothing running, whatever is wrong with it."""
        self._stop_event.set()
        with contextlib.suppress(Exception):
            self.gateway.close()
        for pids in engines(self.gateway).values():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="demand-storm-"))
    storm = DemandStorm(folder, random.Random(args.seed))
    storm.gateway.environment["FITSERVE_WORKERS"] = str(args.workers)
    began = time.monotonic()
    try:
        storm.begin()
        storm.run(args.seconds)
    finally:
        storm.end()
    seconds = time.monotonic() - began
    problems = storm.problems(seconds)
    say(json.dumps(storm.figures(seconds)))
    for problem in problems:
        say(problem)
    if problems:
        say(f"kept: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
