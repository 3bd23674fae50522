"""Programs of a cluster killed at random moments, under writers that change models and keys.

`python -m tests.e2e.cluster_storm --rounds 100 --writers 3` prints the figures of
benchmarks/notebook/reliability.md. Real Ray on two machines in network namespaces, with scripted
engines. After each kill the cluster recovers, and is compared with the answers to writers. After a
failure all logs are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from tests.e2e.written_cluster import WrittenCluster, end_in_order, written_cluster
from tests.support.cluster_nodes import obstacle
from tests.support.patience import hang_s

GATEWAY = "gateway"
REDIS = "redis"
# Words of the command lines of victims; a machine has none of some.
VICTIMS = {
    "actor": "ray::Relay",
    "raylet": "raylet/raylet",
    "head": "gcs_server",
    "node service": "cluster node",
    "supervisor": "gateway.__main__ cluster",
    "link": "hosts.cluster.link",
    GATEWAY: "gateway.__main__ serve",
    "engine": "fake_engine",
    REDIS: "redis-server",
}


class ClusterStorm:
    """Kills one victim a round, waits until all is well, and compares."""

    def __init__(
        self, cluster: WrittenCluster, chance: random.Random, victims: Sequence[str]
    ) -> None:
        """victims: keys of VICTIMS, of which the storm chooses."""
        self._cluster = cluster
        self._nodes = cluster.nodes
        self._chance = chance
        self._victims = victims
        self._recoveries: dict[str, list[float]] = defaultdict(list)
        self._sound_rounds = 0

    def round(self) -> None:
        """Raises AssertionError for an orphan, a twin, or a lost change."""
        cluster = self._cluster
        with cluster.writing():
            time.sleep(self._chance.uniform(0, 3))
            victim = self._kill()
            began = time.monotonic()
            # Changes during the outage count too.
            time.sleep(self._chance.uniform(0, 1))
            if victim == GATEWAY:
                cluster.gateway.start()
        cluster.await_health(f"recovery of {victim}")
        self._recoveries[victim].append(time.monotonic() - began)
        cluster.compare(is_gateway_new=victim == GATEWAY)
        self._sound_rounds += 1

    def _kill(self) -> str:
        """Kill a victim that runs, and return its kind."""
        while True:
            victim = self._chance.choice(self._victims)
            running = [
                (node, pid) for node in self._nodes.nodes for pid in node.pids(VICTIMS[victim])
            ]
            if not running:
                continue
            node, pid = self._chance.choice(running)
            if victim == "supervisor" and node.supervisor is not None:
                pid = node.supervisor.pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if victim == GATEWAY:
                self._cluster.gateway.stop(signal.SIGKILL)
            if victim == REDIS:
                self._nodes.stop_redis()
                self._nodes.start_redis()
            if victim == "supervisor" and node.supervisor is not None:
                # systemd does the same.
                node.supervisor.wait(hang_s())
                node.start()
            return victim

    def figures(self) -> dict[str, object]:
        return {
            "kills": sum(map(len, self._recoveries.values())),
            "acknowledged": self._cluster.target.ledger.count,
            "rounds without orphan, twin or lost change": self._sound_rounds,
            "recovery s (count, median, slowest)": {
                victim: [len(times), round(statistics.median(times), 1), round(max(times), 1)]
                for victim, times in sorted(self._recoveries.items())
            },
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill programs of a cluster at random moments.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=[*VICTIMS])
    parser.add_argument("--redis", action="store_true", help="the head keeps its tables in Redis")
    args = parser.parse_args()
    if reason := obstacle():
        sys.stderr.write(f"The storm cannot run here: {reason}.\n")
        return 2
    signal.signal(signal.SIGTERM, end_in_order)
    victims = [victim for victim in args.victims if victim != REDIS or args.redis]
    chance = random.Random(args.seed)
    with written_cluster(chance, has_redis=args.redis) as cluster:
        storm = ClusterStorm(cluster, chance, victims)
        cluster.begin(args.writers)
        for _ in range(args.rounds):
            storm.round()
            sys.stderr.write(json.dumps(storm.figures()) + "\n")
        sys.stdout.write(json.dumps(storm.figures()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
