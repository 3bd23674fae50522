"""What it takes to find a model, pick a replica and count a request, in this tree and another one, in turn.

    python -m benchmarks.lookup --before TREE [--rounds 15]      TREE: another checkout, as `git worktree add TREE COMMIT` makes it

Counted are bytecodes, which no other work on the machine changes; the times are of the thread, the least and the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODELS, CALLS = 50, 50_000
REPLICAS = (1, 4)


def bytecodes(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def measure() -> dict[str, tuple[int, float]]:
    """In a process whose `gateway` is the tree's. By replicas: bytecodes and nanoseconds of a request."""
    from gateway.access.auth import ANYONE
    from gateway.routing.routes import Routes
    from gateway.routing.table import Call, ModelRoute, RoutedReplica, RouteTable

    found = {}
    for replicas in REPLICAS:
        named = {
            f"m{number}": tuple(RoutedReplica(f"m{number}-{index}", "http://127.0.0.1:1", "m") for index in range(replicas))
            for number in range(MODELS)
        }
        routes = Routes(RouteTable({name: ModelRoute(name, "ready", "", 0, own, "generate") for name, own in named.items()}))
        call = Call("chat", "m7", b"", False)

        def request(routes: Routes = routes, call: Call = call) -> None:
            route = routes.table.find("m7", ANYONE)
            replica = routes.pick(route, call)
            assert replica is not None
            routes.begin(replica)
            routes.end(replica)

        for _ in range(1000):
            request()
        began = time.thread_time_ns()
        for _ in range(CALLS):
            request()
        took_ns = (time.thread_time_ns() - began) / CALLS
        found[str(replicas)] = (bytecodes(request), took_ns)
    return found


def measured(tree: Path) -> dict[str, tuple[int, float]]:
    """`tree`, by a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        check=True,
    )
    found: dict[str, tuple[int, float]] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure()))
        return
    if asked.before is None:
        parser.error("--before is missing: the checkout to compare with")
    rounds = [(measured(asked.before.resolve()), measured(ROOT)) for _ in range(asked.rounds)]
    for replicas in map(str, REPLICAS):
        codes = [{one[side][replicas][0] for one in rounds} for side in (0, 1)]
        times = [[one[side][replicas][1] for one in rounds] for side in (0, 1)]
        least, middle = [min(each) for each in times], [median(each) for each in times]
        print(
            f"{replicas} replicas: bytecodes {min(codes[0])} before, {min(codes[1])} now; "
            f"least {least[0]:.0f} and {least[1]:.0f} ns ({least[1] / least[0] - 1:+.1%}), "
            f"median {middle[0]:.0f} and {middle[1]:.0f} ns ({middle[1] / middle[0] - 1:+.1%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
