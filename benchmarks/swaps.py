"""The wait for a model that is not loaded: five models on one GPU with memory for two.

    python -m benchmarks.swaps [--seconds 150] [--imports 4] [--each 20] [--sleep]

Scripted engines on a pretended H100 import for `--imports` seconds. Requests come at random, one
each `--each` seconds for a model on average. Printed: median and p95 of the wait for the first byte
of the answer, of requests that found their model not loaded, and of all.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.e2e.demand_storm import DemandStorm
from tests.support.quantiles import quantile_s

WAIT_S = 600


class Clients:
    """Requests at random times, the same for each run with one seed."""

    def __init__(self, storm: DemandStorm, each_s: float, seed: int) -> None:
        self.cold: list[float] = []
        self.every: list[float] = []
        self.failed: list[str] = []
        self._storm, self._each_s, self._chance = storm, each_s, random.Random(seed)
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        times = []
        for name in self._storm.names:
            at = 0.0
            while (at := at + self._chance.expovariate(1 / self._each_s)) < seconds:
                times.append((at, name))
        began, threads = time.monotonic(), []
        for at, name in sorted(times):
            time.sleep(max(0.0, began + at - time.monotonic()))
            threads.append(threading.Thread(target=self._ask, args=(name,)))
            threads[-1].start()
        for thread in threads:
            thread.join(WAIT_S)

    def _ask(self, name: str) -> None:
        gateway = self._storm.gateway
        body: dict[str, Any] = {"model": name, "prompt": "hi", "max_tokens": 10, "stream": True}
        try:
            with httpx.Client(base_url=gateway.url, trust_env=False, timeout=WAIT_S) as client:
                loaded = gateway.show(name)["state"] == "ready"
                began = time.monotonic()
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    first = next(
                        (
                            time.monotonic() - began
                            for line in answer.iter_lines()
                            if line.startswith("data: {")
                        ),
                        None,
                    )
        except (httpx.HTTPError, OSError) as error:
            first = None
            with self._lock:
                self.failed.append(repr(error))
        if first is not None:
            with self._lock:
                self.every.append(first)
                if not loaded:
                    self.cold.append(first)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--imports", type=float, default=4)
    parser.add_argument("--each", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sleep", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swaps-") as folder:
        storm = DemandStorm(Path(folder), random.Random(args.seed))
        python = storm.gateway.data / "engines/vllm-0.26.0/bin/python"
        python.write_text(python.read_text().replace("\nexec ", f"\nsleep {args.imports}\nexec "))
        try:
            storm.gateway.start()
            more = {} if args.sleep else {"args": {"enable-sleep-mode": False}}
            for name in storm.names:
                storm.add(name, replicas=1, max_context=8192, policy={"keep_alive": "10m"}, **more)
            time.sleep(2 * args.imports + 10)
            clients = Clients(storm, args.each, args.seed)
            clients.run(args.seconds)
        finally:
            storm.end()
    for words, waits in (("not loaded", clients.cold), ("all", clients.every)):
        if waits:
            print(
                f"{words}: {len(waits)} requests, median {median(waits):.2f} s,"
                f" p95 {quantile_s(waits, 0.95):.2f} s, longest {max(waits):.2f} s"
            )
    print(f"{len(clients.failed)} failed {clients.failed[:2]}")


if __name__ == "__main__":
    main()
