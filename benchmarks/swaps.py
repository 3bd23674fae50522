"""The wait for a model that is not loaded: five models on one GPU with memory for two.

    python -m benchmarks.swaps [--seconds 150] [--imports 4] [--each 20] [--sleep]

Scripted engines on a pretended H100 import for `--imports` seconds. Requests come at random, one
each `--each` seconds for a model on average. Printed: median and p95 of the wait for the first byte
of the answer, of requests that found their model not loaded, and of all.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from random_requests import Clients

from tests.e2e.demand_storm import DemandStorm


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
            gateway = storm.gateway
            clients = Clients(
                storm.names,
                lambda name: gateway.show(name)["state"] == "ready",
                lambda name: nullcontext((gateway.url, name)),
                args.each,
                args.seed,
            )
            clients.run(args.seconds)
        finally:
            storm.end()
    print(clients)


if __name__ == "__main__":
    main()
