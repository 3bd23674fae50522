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
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.contract.process_harness import living_in
from tests.e2e.clustered import ClusterGateway
from tests.e2e.ledger import Entry, KeyOrder, Order
from tests.e2e.scripted import ENGINE
from tests.e2e.storm import Target, Writer, orders
from tests.support.cluster_nodes import ClusterNode, ClusterNodes, cluster_nodes, install, obstacle
from tests.support.makers import engine
from tests.support.paths import FAKE_ENGINE
from tests.support.patience import HANG_S, Patience, hang_s
from tests.support.running import model_folder

ENGINE_PROCESS = "engine"
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
    ENGINE_PROCESS: "fake_engine",
    REDIS: "redis-server",
}


class ClusterStorm:
    """Kills one victim a round, waits until all is well, and compares."""

    def __init__(
        self, nodes: ClusterNodes, folder: Path, chance: random.Random, victims: Sequence[str]
    ) -> None:
        """victims: keys of VICTIMS, of which the storm chooses."""
        self.nodes = nodes
        self._chance = chance
        self._victims = victims
        self.stop_event = threading.Event()
        self.gateway = ClusterGateway(
            nodes,
            FITSERVE_PROFILES_DIR=str(profiles(folder / "profiles")),
            FITSERVE_TICK_S="0.1",
            FITSERVE_BACKOFF_S="0.2",
            FITSERVE_STOP_GRACE_S="0.5",
        )
        fields = {"source": str(model_folder(folder / "model")), "engines": [ENGINE]}
        models = dict.fromkeys(("a", "b", "c"), fields)
        self.target = Target(
            self.gateway.url, self.gateway.client.headers, models, self.stop_event, whole=False
        )
        self.writers: list[Writer] = []
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self._sound_rounds = 0

    def begin(self, writers: int) -> None:
        self.writers = [
            Writer(index, self.target, random.Random(self._chance.random()))
            for index in range(writers)
        ]
        self.gateway.start()
        self._await_health("the cluster begins")

    def round(self) -> None:
        """Raises AssertionError for an orphan, a twin, or a lost change."""
        self.stop_event.clear()
        writing = [threading.Thread(target=writer.run) for writer in self.writers]
        for thread in writing:
            thread.start()
        time.sleep(self._chance.uniform(0, 3))
        victim = self._kill()
        began = time.monotonic()
        # Changes during the outage count too.
        time.sleep(self._chance.uniform(0, 1))
        if victim == GATEWAY:
            self.gateway.start()
        self.stop_event.set()
        for thread in writing:
            thread.join(2 * hang_s())
            assert not thread.is_alive(), "a writer hangs"
        self._await_health(f"recovery of {victim}")
        self.recoveries[victim].append(time.monotonic() - began)
        self._compare(victim)
        self._sound_rounds += 1

    def _kill(self) -> str:
        """Kill a victim that runs, and return its kind."""
        while True:
            victim = self._chance.choice(self._victims)
            running = [
                (node, pid) for node in self.nodes.nodes for pid in node.pids(VICTIMS[victim])
            ]
            if not running:
                continue
            node, pid = self._chance.choice(running)
            if victim == "supervisor" and node.supervisor is not None:
                pid = node.supervisor.pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if victim == GATEWAY:
                self.gateway.stop(signal.SIGKILL)
            if victim == REDIS:
                self.nodes.stop_redis()
                self.nodes.start_redis()
            if victim == "supervisor" and node.supervisor is not None:
                # systemd does the same.
                node.supervisor.wait(hang_s())
                node.start()
            return victim

    def _await_health(self, words: str) -> None:
        patience = Patience(2 * HANG_S)
        while (ailment := self._ailment()) and not patience.is_over():
            time.sleep(patience.pause_s(0.1))
        assert not ailment, f"{words}: {ailment}"

    def _ailment(self) -> str:
        """The reason why the cluster is not well yet; empty: it is."""
        if (states := self.gateway.machines()) != {"one": "ready", "two": "ready"}:
            return f"machines: {states}"
        models = self.gateway.read("/admin/models")
        if models is None:
            return "the gateway does not answer"
        if waiting := [model["name"] for model in models["data"] if model["state"] != "ready"]:
            return f"not ready: {waiting}"
        running = self.engines()
        instances = {self._instance(model["name"]) for model in models["data"]}
        if set(running) != instances:
            return f"orphans or missing engines: {sorted(set(running) ^ instances)}"
        if twins := {name: places for name, places in running.items() if len(places) > 1}:
            return f"twins: {twins}"
        return ""

    def _instance(self, model: str) -> str:
        view = self.gateway.read(f"/admin/models/{model}")
        return str(view["attempts"][-1]["instance"]) if view else ""

    def engines(self) -> dict[str, list[tuple[str, int]]]:
        """Machines and pids of the engines that run, by instance."""
        engines_by_node: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for node in self.nodes.nodes:
            for run in (node.data / "run").glob("*"):
                for pid in living_in(run):
                    engines_by_node[run.name].append((node.name, pid))
        return dict(engines_by_node)

    def _compare(self, victim: str) -> None:
        models, keys = self.gateway.read("/admin/models"), self.gateway.read("/admin/keys")
        assert models is not None, "the gateway does not answer"
        assert keys is not None, "the gateway does not answer"
        orders_now: dict[Entry, Sequence[Order]] = {
            ("models", model["name"]): agreeing
            for model in models["data"]
            if (agreeing := orders(model, at_once=False))
        }
        names = {key["name"] for key in keys["data"]} - {"admin"}
        orders_now |= {("keys", name): [KeyOrder()] for name in names}
        ledger = self.target.ledger
        assert not (losses := ledger.losses(orders_now)), f"acknowledged and lost: {losses}"
        assert not ledger.denials, f"refused by a lost change: {ledger.denials}"
        if victim == GATEWAY:
            ledger.settle(orders_now)

    def end(self) -> None:
        self.gateway.stop()
        for places in self.engines().values():
            for _, pid in places:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def figures(self) -> dict[str, object]:
        return {
            "kills": sum(map(len, self.recoveries.values())),
            "acknowledged": self.target.ledger.count,
            "rounds without orphan, twin or lost change": self._sound_rounds,
            "recovery s (count, median, slowest)": {
                victim: [len(times), round(statistics.median(times), 1), round(max(times), 1)]
                for victim, times in sorted(self.recoveries.items())
            },
        }


def profiles(folder: Path) -> Path:
    """Profiles with the scripted engine, which each machine has in an environment."""
    new_engine = engine(
        "cpu", "99.0.0", process_command=("{env}/bin/python", "-S", str(FAKE_ENGINE))
    )
    file = folder / "engines" / new_engine.kind / f"{new_engine.version}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(new_engine.model_dump_json())
    return folder


@contextlib.contextmanager
def storm(
    chance: random.Random, victims: Sequence[str], *, has_redis: bool = False
) -> Iterator[ClusterStorm]:
    with tempfile.TemporaryDirectory() as folder, cluster_nodes(has_redis=has_redis) as nodes:
        for node in nodes.nodes:
            install(node.data, ENGINE.replace("==", "-"))
        cluster_storm = ClusterStorm(nodes, Path(folder), chance, victims)
        try:
            with nodes.network():
                yield cluster_storm
        except BaseException:
            show(cluster_storm)
            raise
        finally:
            cluster_storm.end()


def show(storm: ClusterStorm) -> None:
    nodes: tuple[ClusterNode, ...] = storm.nodes.nodes
    for log in (storm.gateway.log, *(node.log for node in nodes)):
        sys.stderr.write(f"--- {log}\n{log.read_text(errors='replace')[-6000:]}\n")
    sys.stderr.write(json.dumps(storm.figures()) + "\n")


def end_in_order(*_: object) -> None:
    """SIGTERM ends the machines too."""
    raise KeyboardInterrupt


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
    with storm(random.Random(args.seed), victims, has_redis=args.redis) as new_storm:
        new_storm.begin(args.writers)
        for _ in range(args.rounds):
            new_storm.round()
            sys.stderr.write(json.dumps(new_storm.figures()) + "\n")
        sys.stdout.write(json.dumps(new_storm.figures()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
