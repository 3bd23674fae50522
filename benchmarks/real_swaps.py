"""The wait for a model that is not loaded, with real engines: more models than one GPU holds.

    python -m benchmarks.real_swaps FOLDER MODEL MODEL MODEL --python ENGINE/bin/python
        --side fitserve [--places 2] [--seconds 600] [--each 150] [--gpu 0] [--arg FLAG=VALUE]

plain: `vllm serve`, stopped and started. A request for a model that is not loaded stops the one
that was asked longest ago, when it has answered, as soon as no other model is started. fitserve: a
gateway with the process host, which decides by itself. Both begin with their caches filled by one
start, and as many models loaded as have place. Each request is a line of FOLDER/swaps.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from random_requests import Clients
from start_times import (
    Fitserve,
    Late,
    Plain,
    Trial,
    add_options,
    end_session,
    free_port,
)

CALM_S = 20
"""Seconds in which no model starts any more, before requests begin."""


@dataclass
class Running:
    """A plain engine. busy: requests that it answers."""

    process: subprocess.Popen[bytes]
    url: str
    asked_at: float = 0.0
    busy: int = 0


class Places:
    """Plain engines of one GPU, of which the one asked longest ago gives its place."""

    def __init__(self, trial: Trial, models: dict[str, Path], places: int) -> None:
        self._trial, self._models, self._places = trial, models, places
        self._plain = Plain(trial)
        self._running: dict[str, Running] = {}
        self._change = threading.Condition()
        self._swap = threading.Lock()
        self._starts = 0

    def is_loaded(self, name: str) -> bool:
        return name in self._running

    @contextlib.contextmanager
    def reach(self, name: str) -> Iterator[tuple[str, str]]:
        engine = self._take(name)
        while engine is None:
            with self._swap:
                if not self.is_loaded(name):
                    self._load(name)
            engine = self._take(name)
        try:
            yield engine.url, "m"
        finally:
            with self._change:
                engine.busy -= 1
                self._change.notify_all()

    def close(self) -> None:
        for engine in self._running.values():
            end_session(engine.process)

    def _take(self, name: str) -> Running | None:
        with self._change:
            if (engine := self._running.get(name)) is not None:
                engine.busy += 1
                engine.asked_at = time.monotonic()
            return engine

    def _load(self, name: str) -> None:
        if len(self._running) >= self._places:
            with self._change:
                oldest = min(self._running, key=lambda one: self._running[one].asked_at)
                engine = self._running.pop(oldest)
                self._change.wait_for(lambda: engine.busy == 0)
            end_session(engine.process)
        port = free_port()
        self._starts += 1
        log = self._trial.folder / f"swap-{self._starts}-{name}.log"
        process = self._plain.launch(self._plain.argv(self._models[name], port), log)
        url = f"http://127.0.0.1:{port}"
        try:
            self._trial.wait_for_engine(process, url, log)
        except RuntimeError:
            end_session(process)
            raise
        with self._change:
            self._running[name] = Running(process, url, time.monotonic())


def run_plain(trial: Trial, models: dict[str, Path], asked: argparse.Namespace) -> Clients:
    places = Places(trial, models, asked.places)
    try:
        for name in list(models)[: asked.places]:
            with places.reach(name):
                pass
        clients = Clients(list(models), places.is_loaded, places.reach, asked.each, asked.seed)
        clients.run(asked.seconds)
    finally:
        places.close()
    return clients


def run_fitserve(trial: Trial, models: dict[str, Path], asked: argparse.Namespace) -> Clients:
    fitserve = Fitserve(trial)
    try:
        first, *others = models
        fitserve.add(first, models[first], "--keep-alive", "2h", *asked.option)
        trial.wait("ready", lambda: fitserve.view(first)["state"] == "ready")
        for name in others:
            fitserve.add(name, models[name], "--keep-alive", "2h", *asked.option)
        quiet_since = time.time()
        while time.time() - quiet_since < CALM_S and time.time() < trial.until:
            states = {name: fitserve.view(name)["state"] for name in models}
            if not set(states.values()) <= {"ready", "stopped"}:
                quiet_since = time.time()
            time.sleep(1)
        print(states, flush=True)
        last_event = fitserve.last_event()
        clients = Clients(
            list(models),
            lambda name: fitserve.view(name)["state"] == "ready",
            lambda name: contextlib.nullcontext((fitserve.url, name)),
            asked.each,
            asked.seed,
        )
        clients.run(asked.seconds)
        with (trial.folder / "events.jsonl").open("a") as events:
            events.writelines(json.dumps(event) + "\n" for event in fitserve.events(last_event))
    finally:
        with contextlib.suppress(httpx.HTTPError, Late):
            fitserve.close()
    return clients


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    add_options(parser)
    parser.add_argument("--side", choices=("plain", "fitserve"), required=True)
    parser.add_argument("--places", type=int, default=2, help="of plain engines")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--each", type=float, default=150, help="seconds between two of a model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="of `fitserve add`")
    asked = parser.parse_args()
    asked.model, asked.folder = asked.models[0], asked.folder / asked.side
    # Engines end with this program, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    trial = Trial(asked)
    trial.folder.mkdir(parents=True, exist_ok=True)
    models = {folder.name: folder.absolute() for folder in asked.models}
    clients = (run_plain if asked.side == "plain" else run_fitserve)(trial, models, asked)
    clients.write(trial.folder / "swaps.jsonl", side=asked.side)
    print(f"{asked.side}\n{clients}")


if __name__ == "__main__":
    main()
