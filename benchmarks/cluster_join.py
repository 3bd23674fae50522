"""Phases of a machine that joins a cluster, until a model of its own answers.

    python -m benchmarks.cluster_join [--runs 3]

Real Ray on two machines in network namespaces of this one, as root; the engine is scripted. The
second machine leaves and joins again in each run. Printed for each phase: seconds from the start of
`fitserve cluster join`, and processor seconds of each program of the machine. To reach: 15 s on a
quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gateway.errors import AgentAway
from gateway.hosts.cluster.host import node_states
from gateway.hosts.cluster.membership import folder
from tests.e2e.written_cluster import BOTH, WrittenCluster, written_cluster
from tests.support.cluster_nodes import ClusterNode, obstacle
from tests.support.patience import HANG_S, Patience, hang_s

JOIN_S = 15.0
_TICKS_S = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.05
# Words of command lines, the most telling first.
PROGRAMS = {
    "engine": "fake_engine",
    "the relay's process, with Ray's imports": "ray::Relay",
    "the agent of the dashboard": "ray::DashboardAgent",
    "the agent of environments": "ray::RuntimeEnvAgent",
    "raylet": "raylet/raylet",
    "ray start": "ray.scripts",
    "node service": "cluster node",
    "supervisor": "cluster join",
}
LOG_EVENTS = {"the node service listens": "node service listens"}


class Program(NamedTuple):
    """A program of the machine. began: seconds since boot. cpu_s: its processor time so far."""

    name: str
    began: float
    cpu_s: float


def programs(node: ClusterNode) -> list[Program]:
    running_programs = []
    for pid in node.pids():
        try:
            text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        name = next((name for name, words in PROGRAMS.items() if words in text), text[:60])
        user, system, began = (int(fields[number]) / _TICKS_S for number in (11, 12, 19))
        running_programs.append(Program(name, began, user + system))
    return sorted(running_programs, key=lambda program: program.began)


class Join:
    """One join of the second machine, and the moments of its phases."""

    def __init__(self, cluster: WrittenCluster, number: int) -> None:
        self._cluster = cluster
        self._node = cluster.nodes.second
        self._model = f"joined{number}"
        self._moments: dict[str, float] = {}
        """Seconds since the start of the command."""
        self.programs: list[Program] = []

    def run(self) -> dict[str, float]:
        """The moments of the phases, in order."""
        gateway = self._cluster.gateway
        name = self._node.name
        log_begin = self._node.log.stat().st_size
        began, began_boot_s = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
        self._node.start()
        self._note("Ray knows the machine", began, lambda: name in self._states())
        self._note("its node service answers", began, lambda: gateway.machines() == BOTH)
        self._cluster.add_model(self._model)
        self._note("a plan has chosen it", began, self._has_started)
        self._note("the engine answers", began, self._answers)
        self.programs = programs(self._node)
        for program in self.programs:
            self._moments.setdefault(f"start of {program.name}", program.began - began_boot_s)
        with self._node.log.open() as log:
            log.seek(log_begin)
            for line in log:
                self._read_event(line, began)
        return dict(sorted(self._moments.items(), key=lambda item: item[1]))

    def _states(self) -> dict[str, str]:
        """The states of machines by the link of the gateway, which waits for no machine."""
        link = folder(self._cluster.nodes.head.data) / "link.sock"
        with suppress(AgentAway):
            return asyncio.run(node_states(link))
        return {}

    def _read_event(self, text: str, began: float) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            return
        event = LOG_EVENTS.get(line["event"])
        if event is not None:
            moment = datetime.fromisoformat(line["timestamp"]).timestamp()
            self._moments.setdefault(event, moment - began)

    def _note(self, words: str, began: float, condition: Callable[[], bool]) -> None:
        patience = Patience(2 * HANG_S)
        while not condition():
            if patience.is_over():
                raise SystemExit(f"Not within {2 * HANG_S:g} s: {words}.")
            time.sleep(_POLL_S)
        self._moments[words] = time.time() - began

    def _has_started(self) -> bool:
        return bool(self._cluster.engines_of(self._node))

    def _answers(self) -> bool:
        body = {"model": self._model, "prompt": "hello", "max_tokens": 1}
        return self._cluster.gateway.client.post("/v1/completions", json=body).is_success

    def leave(self) -> None:
        """Remove the model, and let the machine leave."""
        client = self._cluster.gateway.client
        client.delete(f"/admin/models/{self._model}").raise_for_status()
        self._note("gone", time.time(), lambda: not self._cluster.engines_of(self._node))
        leave(self._cluster)


def leave(cluster: WrittenCluster) -> None:
    """End the programs of the second machine, and wait until the gateway has noticed."""
    node = cluster.nodes.second
    node.stop()
    deadline = time.monotonic() + hang_s()
    while node.pids() or node.name in cluster.gateway.machines():
        if time.monotonic() > deadline:
            raise SystemExit(f"Programs of the machine live on: {programs(node)}.")
        time.sleep(_POLL_S)


def load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if reason := obstacle():
        sys.stderr.write(f"No cluster can run here: {reason}.\n")
        return 2
    with written_cluster(random.Random(1)) as cluster:
        cluster.begin(writers=0)
        leave(cluster)
        # The next model then goes to the machine that joins.
        cluster.add_model("resident")
        cluster.await_models()
        for number in range(args.runs):
            print(f"run {number + 1}, load {load()}, {os.cpu_count()} cores")
            join = Join(cluster, number)
            for words, moment in join.run().items():
                print(f"  {moment:6.2f} s  {words}")
            for program in join.programs:
                print(f"  {program.cpu_s:6.2f} s of processor  {program.name}", flush=True)
            join.leave()
    print(f"to reach: the engine answers within {JOIN_S:g} s on a quiet machine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
