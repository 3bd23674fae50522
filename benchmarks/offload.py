"""A KV cache that reaches into RAM: returning conversations and plain traffic, with and without.

    python -m benchmarks.offload FOLDER MODEL --python ENGINE/bin/python [--gpu 0]
        [--cache-gib 20] [--ram-gib 72] [--side none --side native] [--arg FLAG=VALUE]

All sides are engines of one GPU that stand together, each with so small a KV cache that the
conversations do not stay in it, and are asked in turn. native: vLLM's --kv-offloading-size.
simple: the same flag with VLLM_USE_SIMPLE_KV_OFFLOAD=1. lazy: that connector copies blocks only
before they are lost. Each figure is a line of JSON in FOLDER/offload.jsonl: seconds to the first
token of each conversation's first visit, of its return with 64 tokens more, and of all together;
tokens/s of requests that never come back, in rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from speed.load import ask
from start_times import Plain, Trial, add_options, end_session, free_port

SIDES = ("none", "native", "simple", "lazy")
CONVERSATIONS = ((32_000, 16), (100_000, 2))
"""(tokens, how many)."""
MORE_TOKENS, ANSWER_TOKENS = 64, 16
LOADS = {"chat": (64, 384, 512, 128), "prompts": (16, 64, 4096, 64)}
"""Name: (concurrent requests, requests, tokens in, tokens out)."""
VOCABULARY = 30_000
LOAD = Path(__file__).parent / "speed/load.py"

Visit = tuple[float, str]


class Side:
    """One engine."""

    def __init__(self, trial: Trial, name: str, cache_gib: float, ram_gib: float) -> None:
        self.name = name
        self._trial = trial
        self.port = free_port()
        self._plain = Plain(trial)
        size = f"--kv-offloading-size={ram_gib:g}"
        more = {"cpu_bytes_to_use": int(ram_gib * 2**30), "lazy_offload": True}
        connector = {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": more,
        }
        self.flags = [f"--kv-cache-memory-bytes={int(cache_gib * 2**30)}"]
        self.flags += {
            "none": [],
            "native": [size],
            "simple": [size],
            "lazy": [f"--kv-transfer-config={json.dumps(connector)}"],
        }[name]
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0

    def start(self) -> None:
        """Raises RuntimeError where the engine ends, or its time is over."""
        began = time.time()
        simple = {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"} if self.name == "simple" else {}
        argv = ["/usr/bin/env", *(f"{name}={value}" for name, value in simple.items())]
        argv += [*self._plain.argv(self._trial.model, self.port), *self.flags]
        log = self._trial.folder / f"offload-{self.name}.log"
        process = self.process = self._plain.launch(argv, log)
        url = f"http://127.0.0.1:{self.port}"
        self._trial.wait_for_engine(process, url, log)
        self.ready_s = round(time.time() - began, 1)

    def stop(self) -> None:
        if self.process is not None:
            end_session(self.process)

    def visits(self, prompts: list[list[int]], *, together: bool = False) -> list[float]:
        """Seconds to the first token of each."""
        return asyncio.run(self._visits(prompts, together=together))

    async def _visits(self, prompts: list[list[int]], *, together: bool) -> list[float]:
        if together:
            answers = await asyncio.gather(
                *(ask(self.port, prompt, ANSWER_TOKENS) for prompt in prompts)
            )
        else:
            answers = [await ask(self.port, prompt, ANSWER_TOKENS) for prompt in prompts]
        if wrong := next((answer.error for answer in answers if answer.error), ""):
            raise RuntimeError(wrong)
        return [round(answer.first_s, 4) for answer in answers]

    def load(self, seed: int, load: tuple[int, int, int, int]) -> dict[str, Any]:
        concurrency, requests, tokens_in, tokens_out = load
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        numbers = (self.port, concurrency, requests, tokens_in, tokens_out, seed, VOCABULARY)
        done = subprocess.run(
            [sys.executable, str(LOAD), cores, *map(str, numbers)],
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def counters(self) -> list[str]:
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", trust_env=False).text
        words = ("offload", "prefix_cache", "num_preemptions")
        return [
            line
            for line in text.splitlines()
            if any(word in line for word in words)
            and not line.startswith("#")
            and "_bucket" not in line
            and "_created" not in line
        ]


class Notes:
    """Lines of the results."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, side: str, what: str, **figures: object) -> None:
        line = {"side": side, "what": what, **figures}
        with self._file.open("a") as results:
            results.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:400], flush=True)


def start_all(sides: list[Side], notes: Notes) -> list[Side]:
    """Those that are ready; the others are stopped."""

    def start(side: Side) -> bool:
        try:
            side.start()
        except RuntimeError as error:
            notes.add(side.name, "start", said=repr(error)[:300])
            side.stop()
            return False
        notes.add(side.name, "start", ready_s=side.ready_s, flags=side.flags)
        return True

    with ThreadPoolExecutor() as pool:
        stands = list(pool.map(start, sides))
    return [side for side, good in zip(sides, stands, strict=True) if good]


def measure_visits(sides: list[Side], notes: Notes) -> None:
    chance = random.Random(1)
    for side in sides:  # what is built at a first prompt of this length is not measured
        side.visits([[chance.randrange(100, VOCABULARY) for _ in range(CONVERSATIONS[0][0])]])
    for tokens, count in CONVERSATIONS:
        first = [[chance.randrange(100, VOCABULARY) for _ in range(tokens)] for _ in range(count)]
        more = [
            [
                prompt + [chance.randrange(100, VOCABULARY) for _ in range(MORE_TOKENS)]
                for prompt in first
            ]
            for _ in range(2)
        ]
        steps = [("first", first, False), ("return", more[0], False), ("together", more[1], True)]
        if tokens > CONVERSATIONS[0][0]:
            steps.pop()
        for side in sides:
            for what, prompts, together in steps:
                waits = side.visits(prompts, together=together)
                notes.add(
                    side.name, what, tokens=tokens, median_s=round(median(waits), 3), waits_s=waits
                )
            notes.add(side.name, "counters", lines=side.counters())


def measure_traffic(sides: list[Side], rounds: int, notes: Notes) -> None:
    for number in range(-1, rounds):
        turn = sides if number % 2 else sides[::-1]
        for name, load in LOADS.items():
            for side in turn:
                if number < 0:  # not counted: first requests of a size
                    side.load(7, (load[0], 2 * load[0], *load[2:]))
                else:
                    notes.add(
                        side.name, name, round=number, load=load, **side.load(100 + number, load)
                    )
    for side in sides:
        notes.add(side.name, "counters", lines=side.counters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    add_options(parser)
    parser.add_argument("--side", action="append", choices=SIDES)
    parser.add_argument("--cache-gib", type=float, default=20)
    parser.add_argument("--ram-gib", type=float, default=72)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    # Engines end with this program, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    trial = Trial(asked)
    trial.folder.mkdir(parents=True, exist_ok=True)
    notes = Notes(trial.folder / "offload.jsonl")
    made = [
        Side(trial, name, asked.cache_gib, asked.ram_gib)
        for name in asked.side or ("none", "native")
    ]
    try:
        sides = start_all(made, notes)
        measure_visits(sides, notes)
        measure_traffic(sides, asked.rounds, notes)
    finally:
        for side in made:
            side.stop()


if __name__ == "__main__":
    main()
