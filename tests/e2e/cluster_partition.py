"""A machine of a cluster without network for a minute, under writers that change models and keys.

`python -m tests.e2e.cluster_partition --runs 3 --seconds 60 --lease-s 300 30` prints the figures of
benchmarks/notebook/reliability.md. Real Ray on two machines in network namespaces, with scripted
engines. A lease shorter than the partition ends the engines that no gateway reaches; after a longer
one they are stopped as soon as the network is back.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.e2e.written_cluster import BOTH, WrittenCluster, end_in_order, written_cluster
from tests.support.cluster_nodes import obstacle
from tests.support.patience import HANG_S, Patience

_WRITING_S = 3.0


class PartitionTimes(NamedTuple):
    """Seconds of one partition, the first three from the cut, the others from its end.

    noticed: time until the gateway shows the machine as lost.
    moved: time until all models are served by the other machine.
    ended: time until a look finds no engine on the machine, the first one after `moved`; None: the
        lease outlasts the partition.
    returned: time until both machines are ready.
    well: time until each model is ready and no other engine runs.
    engines: the number of engines on the machine at the cut, and at the end of the partition.
    """

    noticed: float
    moved: float
    ended: float | None
    returned: float
    well: float
    engines: tuple[int, int]

    def figures(self) -> dict[str, object]:
        times = {
            name: value and round(value, 1)
            for name, value in self._asdict().items()
            if name != "engines"
        }
        return {**times, "engines": self.engines}


class Partition:
    """Cuts the second machine off, and heals the network."""

    def __init__(self, cluster: WrittenCluster, chance: random.Random, lease_s: float) -> None:
        self._cluster = cluster
        self._chance = chance
        self._lease_s = lease_s
        self._node = cluster.nodes.second

    def run(self, seconds: float) -> PartitionTimes:
        """The times of a partition of this length. Raises AssertionError for an orphan, a twin, or
        a lost change."""
        self._cluster.fill()
        engines_before = len(self._cluster.engines_of(self._node))
        try:
            with self._cluster.writing():
                time.sleep(self._chance.uniform(0, _WRITING_S))
                self._cluster.nodes.part(self._node, parted=True)
                began = time.monotonic()
                noticed_s = self._wait("the loss is noticed", self._is_lost)
            moved_s = self._wait("the models run on the other machine", self._has_moved, began)
            ended_s = (
                self._wait("engines without a gateway end", self._is_empty, began)
                if self._lease_s < seconds
                else None
            )
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            engines_after = len(self._cluster.engines_of(self._node))
        finally:
            self._cluster.nodes.part(self._node, parted=False)
        healed_at = time.monotonic()
        with self._cluster.writing():
            time.sleep(self._chance.uniform(0, _WRITING_S))
        returned_s = self._wait("the machine is back", self._has_returned, healed_at)
        self._cluster.await_health("the network is back")
        well_s = time.monotonic() - healed_at
        self._cluster.compare()
        engines = engines_before, engines_after
        return PartitionTimes(noticed_s, moved_s, ended_s, returned_s, well_s, engines)

    def _is_lost(self) -> bool:
        return self._cluster.gateway.machines() == {self._cluster.nodes.head.name: "ready"}

    def _has_moved(self) -> bool:
        """Whether every model is served, and on the other machine."""
        instances = self._cluster.serving_instances()
        if instances is None:
            return False
        engines = self._cluster.engines()
        head = self._cluster.nodes.head.name
        return all(
            [name for name, _ in engines.get(instance, ())] == [head] for instance in instances
        )

    def _is_empty(self) -> bool:
        return not self._cluster.engines_of(self._node)

    def _has_returned(self) -> bool:
        return self._cluster.gateway.machines() == BOTH

    def _wait(self, words: str, condition: Callable[[], bool], began: float | None = None) -> float:
        """The seconds from `began`, or from now, until the condition holds."""
        began = time.monotonic() if began is None else began
        patience = Patience(2 * HANG_S)
        while not condition():
            assert not patience.is_over(), f"not within {2 * HANG_S:g} s: {words}"
            time.sleep(0.1)
        return time.monotonic() - began


def run(lease_s: float, runs: int, seconds: float, writers: int, seed: int) -> None:
    """Print the times of each partition. Raises AssertionError where one is not survived."""
    chance = random.Random(seed)
    with written_cluster(chance, lease_s=lease_s) as cluster:
        cluster.begin(writers)
        partition = Partition(cluster, chance, lease_s)
        for number in range(runs):
            times = partition.run(seconds)
            line = {"lease_s": lease_s, "run": number + 1, **times.figures()}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        count = cluster.target.ledger.count
        sys.stdout.write(f"{runs} passed, {count} changes acknowledged, 0 lost\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--lease-s", type=float, nargs="+", default=[300, 30])
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if reason := obstacle():
        sys.stderr.write(f"No cluster can run here: {reason}.\n")
        return 2
    signal.signal(signal.SIGTERM, end_in_order)
    for lease_s in args.lease_s:
        run(lease_s, args.runs, args.seconds, args.writers, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
