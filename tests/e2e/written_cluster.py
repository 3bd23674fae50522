"""Two machines of a cluster, with scripted engines and a gateway, whose models and keys writers
change. The state that shows is compared with the answers to the writers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
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
from tests.support.cluster_nodes import ClusterNode, ClusterNodes, cluster_nodes, install
from tests.support.makers import engine
from tests.support.paths import FAKE_ENGINE
from tests.support.patience import HANG_S, Patience, hang_s
from tests.support.running import model_folder

BOTH = {"one": "ready", "two": "ready"}
_FILLING_S = 2.0
_HEAD = "gcs_server"
Engines = dict[str, list[tuple[str, int]]]
"""Machines and pids of the engines that run, by instance."""


class WrittenCluster:
    """Machines under writers, which do nothing outside `writing`."""

    def __init__(self, nodes: ClusterNodes, folder: Path, chance: random.Random) -> None:
        self.nodes = nodes
        self.stop_event = threading.Event()
        self._chance = chance
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
        self._writers: list[Writer] = []

    def begin(self, writers: int) -> None:
        """Start the gateway, and wait until all is well. writers: their number."""
        self._writers = [
            Writer(index, self.target, random.Random(self._chance.random()))
            for index in range(writers)
        ]
        self.gateway.start()
        self.await_health("the cluster begins")

    def add_model(self, name: str) -> None:
        """Add a model of no writer."""
        wish = {**self.target.models["a"], "name": name}
        self.gateway.client.post("/admin/models", json=wish).raise_for_status()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Let the writers change models and keys in the block."""
        self.stop_event.clear()
        threads = [threading.Thread(target=writer.run) for writer in self._writers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop_event.set()
            for thread in threads:
                thread.join(2 * hang_s())
        assert not any(thread.is_alive() for thread in threads), "a writer hangs"

    def fill(self) -> None:
        """Let the writers make models until each machine has an engine."""
        patience = Patience(2 * HANG_S)
        while not all(self.engines_of(node) for node in self.nodes.nodes):
            assert not patience.is_over(), "a machine has no engine"
            with self.writing():
                time.sleep(_FILLING_S)
            self.await_health("the writers rest")

    def await_health(self, words: str) -> None:
        patience = Patience(2 * HANG_S)
        while (ailment := self._ailment()) and not patience.is_over():
            time.sleep(patience.pause_s(0.1))
        assert not ailment, f"{words}: {ailment}"

    def await_models(self) -> None:
        """Wait until all models are ready, wherever."""
        patience = Patience(2 * HANG_S)
        while self.serving_instances() is None:
            assert not patience.is_over(), "a model is not ready"
            time.sleep(patience.pause_s(0.1))

    def _ailment(self) -> str:
        """The reason why the cluster is not well yet; empty: it is."""
        if (states := self.gateway.machines()) != BOTH:
            return f"machines: {states}"
        instances = self.serving_instances()
        if instances is None:
            return "a model is not ready, or the gateway does not answer"
        running = self.engines()
        if set(running) != instances:
            return f"orphans or missing engines: {sorted(set(running) ^ instances)}"
        if twins := {name: places for name, places in running.items() if len(places) > 1}:
            return f"twins: {twins}"
        return ""

    def serving_instances(self) -> set[str] | None:
        """The engines of all models; None: a model is not ready, or the gateway is silent."""
        models = self.gateway.read("/admin/models")
        if models is None or any(model["state"] != "ready" for model in models["data"]):
            return None
        views = [self.gateway.read(f"/admin/models/{model['name']}") for model in models["data"]]
        return {str(view["attempts"][-1]["instance"]) if view else "" for view in views}

    def engines(self) -> Engines:
        engines_by_instance: Engines = defaultdict(list)
        for node in self.nodes.nodes:
            for run in (node.data / "run").glob("*"):
                for pid in living_in(run):
                    engines_by_instance[run.name].append((node.name, pid))
        return dict(engines_by_instance)

    def engines_of(self, node: ClusterNode) -> set[int]:
        """The processes of the engines on a machine."""
        places = [place for places in self.engines().values() for place in places]
        return {pid for name, pid in places if name == node.name}

    def compare(self, *, is_gateway_new: bool = False) -> None:
        """Raises AssertionError for a change that was acknowledged and is lost.

        is_gateway_new: the shown state decides about changes that got no answer.
        """
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
        if is_gateway_new:
            ledger.settle(orders_now)

    def end(self) -> None:
        self.gateway.close()
        for places in self.engines().values():
            for _, pid in places:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def show_logs(self) -> None:
        for log in (self.gateway.log, *(node.log for node in self.nodes.nodes)):
            sys.stderr.write(f"--- {log}\n{log.read_text(errors='replace')[-6000:]}\n")


def kill_head(cluster: WrittenCluster) -> None:
    """Kill the head while engines run. Raises AssertionError where one ends, or a change is
    lost."""
    cluster.fill()
    engines = cluster.engines()
    head = cluster.nodes.head
    former_pids = head.kill(_HEAD)
    patience = Patience(2 * HANG_S)
    while not {*head.pids(_HEAD)} - {*former_pids}:
        assert not patience.is_over(), "the head is not started again"
        time.sleep(0.1)
    cluster.await_health("the head is back")
    assert cluster.engines() == engines
    cluster.compare()
    with cluster.writing():
        time.sleep(1)
    cluster.await_health("changes after the return")
    cluster.compare()


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
def written_cluster(
    chance: random.Random, *, lease_s: float = 300, has_redis: bool = False
) -> Iterator[WrittenCluster]:
    """The machines, started. After a failure all logs are printed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster_nodes(lease_s, has_redis=has_redis) as nodes,
    ):
        for node in nodes.nodes:
            install(node.data, ENGINE.replace("==", "-"))
        cluster = WrittenCluster(nodes, Path(folder), chance)
        try:
            with nodes.network():
                yield cluster
        except BaseException:
            cluster.show_logs()
            raise
        finally:
            cluster.end()


def end_in_order(*_: object) -> None:
    """SIGTERM ends the machines too."""
    raise KeyboardInterrupt
