"""Two machines in network namespaces behind one gateway, each with the real CPU engine.

`scripts/cluster-demo` runs it: a request to each machine through one URL, then the power of one
machine fails and comes back. Prints each check, and `N passed, 0 failed`.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx

from gateway.cli.demo.checkpoint import SENTENCE, make_model
from tests.contract.process_harness import living_in
from tests.e2e.clustered import ClusterGateway
from tests.e2e.conftest import ENGINE, START_S, install_engines
from tests.support.cluster_nodes import ClusterNode, ClusterNodes, cluster_nodes, obstacle
from tests.support.listening import listening_addresses
from tests.support.patience import Patience, hang_s


class Step(NamedTuple):
    """A check with its words. Raises AssertionError where it does not hold."""

    words: str
    check: Callable[[], None]


class ClusterDemo:
    """The steps of the demonstration on running machines."""

    def __init__(self, nodes: ClusterNodes, gateway: ClusterGateway, model: Path) -> None:
        self._nodes = nodes
        self._gateway = gateway
        self._model = model
        self._places: dict[str, str] = {}
        self._lost = ""
        self._instances: dict[str, str] = {}

    def steps(self) -> list[Step]:
        return [
            Step("both machines are in the cluster", self._join),
            Step("each machine runs a model", self._serve),
            Step("one URL answers for both", self._ask_both),
            Step("engines listen on their machine's address alone", self._look_at_sockets),
            Step("the loss of a machine is noticed", self._lose),
            Step("its model runs on the other machine", self._move),
            Step("the model that was on the other machine served on", self._serve_on),
            Step("the machine is back in the cluster", self._return),
            Step("the machine runs the next model", self._use),
        ]

    def show_logs(self) -> None:
        """Print the ends of all logs."""
        machines = self._nodes.nodes
        engines = [log for node in machines for log in (node.data / "logs").glob("*.log")]
        for log in (self._gateway.log, *(node.log for node in machines), *engines):
            if log.exists():
                say(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}")

    def _join(self) -> None:
        self._await_machines({"one": "ready", "two": "ready"})

    def _serve(self) -> None:
        for model in ("a", "b"):
            self._add(model)
        for model in ("a", "b"):
            self._places[model] = self._await_place(model, {"one", "two"})
            self._instances[model] = self._ready_instance(model)
        assert {*self._places.values()} == {"one", "two"}, self._places

    def _ask_both(self) -> None:
        for model in ("a", "b"):
            assert self._ask(model).strip() in SENTENCE * 3

    def _look_at_sockets(self) -> None:
        for node in self._nodes.nodes:
            addresses = set().union(*map(listening_addresses, living_engines(node)))
            open_addresses = {
                name for name in addresses if not ipaddress.ip_address(name).is_loopback
            }
            assert open_addresses == {node.address}, f"{node.name}: {addresses}"

    def _lose(self) -> None:
        second_node = self._nodes.second
        self._nodes.part(second_node, parted=True)
        second_node.kill()
        assert second_node.supervisor is not None
        second_node.supervisor.wait(hang_s())
        self._await_machines({"one": "ready"})

    def _move(self) -> None:
        self._lost = next(model for model, place in self._places.items() if place == "two")
        self._await_place(self._lost, {"one"})
        assert self._ask(self._lost).strip() in SENTENCE * 3

    def _serve_on(self) -> None:
        stayed = next(model for model in self._places if model != self._lost)
        assert self._ready_instance(stayed) == self._instances[stayed]
        assert self._ask(stayed).strip() in SENTENCE * 3

    def _return(self) -> None:
        self._nodes.part(self._nodes.second, parted=False)
        self._nodes.second.start()
        self._await_machines({"one": "ready", "two": "ready"})

    def _use(self) -> None:
        self._add("c")
        assert self._await_place("c", {"one", "two"}) == "two"
        assert self._ask("c").strip() in SENTENCE * 3

    def _add(self, model: str) -> None:
        wish = {"name": model, "source": str(self._model), "engines": [ENGINE], "check": False}
        answer = self._gateway.client.post("/admin/models", json=wish)
        assert answer.status_code == 202, answer.text

    def _place(self, model: str) -> str:
        """The machine on which processes of the model's ready engine run; empty: none does."""
        if not (instance := self._ready_instance(model)):
            return ""
        places = [
            node.name for node in self._nodes.nodes if living_in(node.data / "run" / instance)
        ]
        return places[0] if len(places) == 1 else ""

    def _ready_instance(self, model: str) -> str:
        """The engine that serves the model; empty: none does."""
        view = self._gateway.read(f"/admin/models/{model}")
        return view["attempts"][-1]["instance"] if view and view["state"] == "ready" else ""

    def _ask(self, model: str) -> str:
        """The text of a completion."""
        body = {"model": model, "prompt": "hello", "max_tokens": 8, "temperature": 0}
        answer = self._gateway.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def _await_machines(self, states: dict[str, str]) -> None:
        self._wait(f"machines {states}", lambda: self._gateway.machines() == states)

    def _await_place(self, model: str, places: set[str]) -> str:
        self._wait(f"{model} on {places}", lambda: self._place(model) in places)
        return self._place(model)

    def _wait(self, words: str, condition: Callable[[], bool]) -> None:
        patience = Patience(START_S)
        while not condition():
            assert not patience.is_over(), f"not within {START_S:g} s: {words}"
            time.sleep(patience.pause_s(0.2))


def living_engines(node: ClusterNode) -> set[int]:
    """The processes of engines on a machine."""
    run = node.data / "run"
    return {pid for folder in run.iterdir() for pid in living_in(folder)}


@contextlib.contextmanager
def demo(engines: Path, folder: Path) -> Iterator[ClusterDemo]:
    """A cluster of two machines with a gateway. engines: has the environment of ENGINE.

    folder: the folder of the model. Both machines share the engine's compiled code, as the checkout
        does.
    """
    model = folder / "model"
    make_model(model)
    # Each engine starts once: a process with its imports would be of no use.
    with cluster_nodes(FITSERVE_PREPARED_ENGINES="0") as nodes:
        for node in nodes.nodes:
            share_engine(node.data, engines)
        gateway = ClusterGateway(nodes)
        gateway.start()
        try:
            with nodes.network():
                yield ClusterDemo(nodes, gateway, model)
        finally:
            gateway.close()
            end_engines(nodes)


def share_engine(data: Path, engines: Path) -> None:
    name = ENGINE.replace("==", "-")
    (data / "engines" / name).symlink_to(engines / name)
    for shared in ("answers", "caches"):
        (engines.parent / shared).mkdir(exist_ok=True)
        (data / shared).symlink_to(engines.parent / shared)


def end_engines(nodes: ClusterNodes) -> None:
    for node in nodes.nodes:
        for pid in living_engines(node) if (node.data / "run").exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(engines: Path, folder: Path) -> int:
    """Prints each step, and returns how many failed. A failure ends the run."""
    left_steps = 0
    with demo(engines, folder) as cluster:
        steps = cluster.steps()
        for number, step in enumerate(steps):
            began = time.monotonic()
            try:
                step.check()
            except (AssertionError, httpx.HTTPError) as error:
                left_steps = len(steps) - number
                say(f"FAILED  {step.words}: {error}")
                cluster.show_logs()
                break
            say(f"passed  {step.words} ({time.monotonic() - began:.1f} s)")
    say(f"{len(steps) - left_steps} passed, {left_steps} failed")
    return left_steps


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if reason := obstacle():
        say(f"The demonstration cannot run here: {reason}.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        return 1 if run(install_engines(), Path(folder)) else 0


if __name__ == "__main__":
    sys.exit(main())
