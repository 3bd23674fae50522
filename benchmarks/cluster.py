"""Planning and the control loop for 100 machines with 800 GPUs.

    python -m benchmarks.cluster [--nodes 100] [--count]

Machines are snapshots of 8xh100, each GPU with an engine of its own model. They answer from another
process, over the link's socket. Printed for a quarter, half and all of the machines: CPU seconds of
one plan and of one pass of the control loop, the best of the rounds, and the memory. `--count` adds
instructions in user mode, by valgrind's cachegrind, of a plan and a pass at the full size. Growth
by more than the number of machines is a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.controller.loop import Loop
from gateway.controller.steps.launcher import Launcher
from gateway.domain import (
    Attempt,
    Cluster,
    Engine,
    Instance,
    Network,
    Node,
    NodeLink,
    NodeRanks,
    NodeView,
    Observation,
    Plan,
    Wish,
)
from gateway.domain.plan_request import PlanRequest
from gateway.engines.common.planning_input import PlanningInput
from gateway.hosts.agent.calls import DoneAnswer
from gateway.hosts.cluster.host import ClusterHost
from gateway.hosts.nodes_host import NodesHost
from gateway.machine.gpu_watch import GpuWatch
from gateway.planner.decide import decide
from gateway.planner.nodes.over_nodes import decide_over_nodes
from gateway.planner.service.machine_planner import MachinePlanner
from gateway.planner.service.messages import REQUEST, request_frames
from gateway.profiles.cluster_forms import build_cluster
from gateway.profiles.profiles import Profiles
from gateway.proxy.routing.routes import Routes
from gateway.secret import REVEAL_CONTEXT
from gateway.settings import Settings
from gateway.store.recovery import open_store
from tests.support.published import config, model_from_config

ROOT = Path(__file__).resolve().parents[1]
SEED = 7
MACHINE = "8xh100"
MODEL = "llama-3.1-8b"
NETWORK = Network(bytes_s=25e9, latency_s=2e-6, rdma="roce")
PLAN_S, PASS_S = 2.0, 1.0
PROFILES = Profiles()


def newest_engine() -> Engine:
    return next(engine for engine in PROFILES.engines(("vllm",), device="cuda"))


class Machines:
    """Machines with an engine on each GPU: attempts as the store has them, and the answers of the
    node services."""

    def __init__(self, count: int) -> None:
        self.cluster = build_cluster([PROFILES.hardware(MACHINE)] * count, NETWORK)
        self.plan = self._plan_of_one_gpu()
        self.attempts = [
            self._attempt(number, node, gpu.uuid)
            for number, (node, gpu) in enumerate(
                (node, gpu) for node in self.cluster.nodes for gpu in node.hardware.gpus
            )
        ]

    def _plan_of_one_gpu(self) -> Plan:
        wish = Wish(name="m", source=MODEL, gpus="few")
        inputs = planning_input(self.cluster, wish)
        return decide(inputs, [newest_engine()], PROFILES.rules([newest_engine()])).plans[0]

    def _attempt(self, number: int, node: Node, uuid: str) -> Attempt:
        place = NodeRanks(node=node.name, ranks=(0,), gpus=(uuid,))
        plan = self.plan.evolve(gpus=(uuid,), nodes=(place,))
        now = time.time()
        return Attempt(
            id=number + 1,
            model=f"m{number}",
            replica=0,
            state="ready",
            plan=plan,
            fingerprint=plan.fingerprint,
            port=20_000,
            started_at=now,
            ready_at=now,
        )

    def answers(self) -> dict[tuple[str, str], bytes]:
        """The answer to each call, by machine and call."""
        answers = {}
        for node in self.cluster.nodes:
            attempts = [attempt for attempt in self.attempts if node.name in _places(attempt)]
            instances = tuple(_instance(attempt, node.name) for attempt in attempts)
            view = NodeView(
                name=node.name,
                version="0",
                address=f"{node.name}.internal",
                hardware=node.hardware,
                lease_s=300,
                engines=tuple(instance.name for instance in instances),
            )
            for call, answer in (
                ("list", DoneAnswer(instances=instances)),
                ("node", DoneAnswer(node=view)),
            ):
                text = answer.model_dump_json(context=REVEAL_CONTEXT)
                answers[node.name, call] = text.encode() + b"\n"
        return answers


def _places(attempt: Attempt) -> set[str]:
    return {row.node for row in attempt.plan.nodes}


def _instance(attempt: Attempt, node: str) -> Instance:
    return Instance(
        name=attempt.instance_name,
        model=attempt.model,
        attempt=attempt.id,
        fingerprint=attempt.fingerprint,
        state="running",
        url=f"http://{node}.internal:{attempt.port}",
    )


def planning_input(cluster: Cluster, wish: Wish, **fields: Any) -> PlanningInput:
    return PlanningInput(
        model_from_config(config(MODEL)),
        cluster.nodes[0].hardware,
        wish,
        gpus=PROFILES.gpus,
        speed_knowledge=PROFILES.speed_knowledge,
        parsers=PROFILES.parsers,
        **fields,
    )


def mix_memory(cluster: Cluster) -> Cluster:
    """The cluster with GPUs of which some are free, some full, and some shared by small models."""
    chance = random.Random(SEED)
    nodes = []
    for node in cluster.nodes:
        gpus = tuple(
            gpu.evolve(
                free_bytes=int(
                    (gpu.total_bytes or 0) * chance.choice((0.99, 0.04, chance.random()))
                )
            )
            for gpu in node.hardware.gpus
        )
        nodes.append(node.evolve(hardware=node.hardware.evolve(gpus=gpus)))
    return cluster.evolve(nodes=tuple(nodes))


def link_nodes(cluster: Cluster) -> Cluster:
    """The cluster with a measured network between each two nodes, of three speeds."""
    chance = random.Random(SEED)
    names = [node.name for node in cluster.nodes]
    links = tuple(
        NodeLink(a=a, b=b, bytes_s=chance.choice((50e9, 25e9, 1.25e9)), latency_s=2e-6, rdma="roce")
        for number, a in enumerate(names)
        for b in names[:number]
    )
    return cluster.evolve(links=links)


def plan_once(cluster: Cluster) -> int:
    """Plan on the cluster. Returns the bytes of the decision as JSON."""
    engines = [newest_engine()]
    inputs = planning_input(cluster, Wish(name="m", source=MODEL))
    decision = decide_over_nodes(inputs, cluster, engines, PROFILES.rules(engines))
    if not decision.plans:
        raise SystemExit("The model has no plan.")
    return len(decision.model_dump_json())


def send_request(cluster: Cluster) -> int:
    """Pass the machines to the plan process, as bytes. Returns their number."""
    wish = Wish(name="m", source=MODEL)
    request = PlanRequest(wish, machine=cluster.nodes[0].hardware, cluster=cluster)
    head, _ = request_frames(request, ())
    REQUEST.validate_json(head)
    return len(head)


def best_cpu_s(action: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        action()
        times.append(time.process_time() - began)
    return min(times)


def serve(path: str, answers: dict[tuple[str, str], bytes], states: bytes) -> None:
    """Answer as the link does, until the process is ended."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError):
            name = json.loads(await reader.readline())["node"]
            if name:
                call = json.loads(await reader.readline())["call"]
            writer.write(answers[name, call] if name else states)
            await writer.drain()
        writer.close()

    async def listen() -> None:
        server = await asyncio.start_unix_server(answer, path, backlog=1024)
        async with server:
            await server.serve_forever()

    asyncio.run(listen())


@contextmanager
def serve_machines(machines: Machines, path: Path) -> Iterator[None]:
    states = [{"name": node.name, "state": "alive"} for node in machines.cluster.nodes]
    line = json.dumps(states).encode() + b"\n"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=serve, args=(str(path), machines.answers(), line))
    process.start()
    try:
        while not path.exists():
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.join()


class Gateway:
    """The control loop of a gateway for the machines, and its host."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        settings = Settings(data_dir=folder / "data")
        settings.data.mkdir()
        store = open_store(settings.data / "fitserve.db")
        for attempt in machines.attempts:
            wish = Wish(name=attempt.model, source=MODEL, engines=("vllm",))
            store.restore(wish, attempt.started_at, attempt)
            store.save_attempt(attempt)
        self.cluster_host = ClusterHost(folder / "link.sock", "benchmark")
        host = NodesHost(self.cluster_host)
        # No plan is made, and no engine is asked.
        absent: Any = None
        planner: Any = partial(MachinePlanner, cluster=self.cluster_host.cluster)(
            settings.data, absent, GpuWatch(), absent, PROFILES, None
        )
        self.routes = Routes()
        self.loop = Loop(
            store,
            planner,
            Launcher(settings, host, PROFILES.engine_in_image, _download),
            GpuWatch(),
            lambda: PROFILES.signatures,
            self.routes,
        )
        self.loop.load()
        watcher: Any = SimpleNamespace(
            observation=Observation(is_verified=True, is_healthy=True), tail=(), problems=()
        )
        for replica in self.loop.fleet.replicas():
            replica.watcher = watcher

    async def run_pass(self) -> None:
        await self.loop._pass()  # noqa: SLF001 - `run` makes passes without end

    def ask_all(self) -> None:
        """Let a request wait for each model."""
        waits = dict.fromkeys(self.loop.fleet.models, 1.0)
        self.routes.demand = lambda: waits  # type: ignore[method-assign]

    def check(self) -> None:
        """Raises SystemExit unless each model serves."""
        routes = self.routes.table.models
        states = {routes[name].state for name in self.loop.fleet.models}
        if states != {"ready"} or self.loop.health.host_problem is not None:
            raise SystemExit(f"The models are {states}: {self.loop.health.host_problem}")


async def _download(*_: Any, **__: Any) -> Path:
    raise SystemExit("Nothing is downloaded here.")


@contextmanager
def gateway_for(machines: Machines) -> Iterator[Gateway]:
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_machines(machines, Path(folder) / "link.sock"),
    ):
        yield Gateway(machines, Path(folder))


async def measure_loop(gateway: Gateway, rounds: int) -> dict[str, float]:
    """CPU seconds of one pass, of one with requests for all models, and of a look at the
    machines."""
    times: dict[str, list[float]] = {}

    async def note(name: str, action: Callable[[], Any]) -> None:
        began = time.process_time()
        await action()
        times.setdefault(name, []).append(time.process_time() - began)

    await gateway.run_pass()
    gateway.check()
    for _ in range(rounds):
        await note("pass", gateway.run_pass)
    gateway.check()
    gateway.ask_all()
    for _ in range(rounds):
        await note("pass with requests", gateway.run_pass)
    for _ in range(rounds):
        await note("hardware", gateway.cluster_host.cluster)
    return {name: min(values) for name, values in times.items()}


def report(nodes: int, rounds: int) -> None:
    machines = Machines(nodes)
    clusters = {
        "alike": machines.cluster,
        "mixed": mix_memory(machines.cluster),
        "linked": link_nodes(machines.cluster),
    }
    size = f"{nodes} machines, {len(machines.attempts)} GPUs"
    for name, cluster in clusters.items():
        decision_bytes = plan_once(cluster)
        cpu_s = best_cpu_s(partial(plan_once, cluster), rounds)
        print(f"{size}, {name}: plan {cpu_s:.3f} s, decision {decision_bytes / 1e6:.2f} MB")
    request_bytes = send_request(clusters["linked"])
    cpu_s = best_cpu_s(partial(send_request, clusters["linked"]), rounds)
    print(f"{size}: request to the plan process {cpu_s:.3f} s, {request_bytes / 1e6:.2f} MB")
    with gateway_for(machines) as gateway:
        for name, cpu_s in asyncio.run(measure_loop(gateway, rounds)).items():
            print(f"{size}: {name} {cpu_s:.3f} s")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{size}: at most {resident:.0f} MiB so far", flush=True)


def play(part: str, nodes: int, rounds: int) -> None:
    """Do a part `rounds` times."""
    machines = Machines(nodes)
    if part == "plan":
        for _ in range(rounds):
            plan_once(mix_memory(machines.cluster))
        return
    with gateway_for(machines) as gateway:

        async def pass_often() -> None:
            for _ in range(rounds):
                await gateway.run_pass()

        asyncio.run(pass_often())
        gateway.check()


def instructions(part: str, nodes: int, rounds: int) -> int:
    """The instructions of a process that repeats the part."""
    counter = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    arguments = ["--play", part, "--nodes", str(nodes), "--rounds", str(rounds)]
    done = subprocess.run(
        [*counter, sys.executable, "-m", "benchmarks.cluster", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    # A forked process that is killed prints no figure.
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    if found is None:
        raise SystemExit(f"valgrind counted nothing: {done.stderr[-500:]}")
    return int(found[1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", action="store_true", help="instructions too")
    parser.add_argument("--play", choices=("plan", "pass"), help="only do a part, for a count")
    args = parser.parse_args()
    if args.play:
        play(args.play, args.nodes, args.rounds)
        return
    for nodes in (args.nodes // 4, args.nodes // 2, args.nodes):
        report(nodes, args.rounds)
    print(f"to reach: a plan {PLAN_S:g} s, a pass {PASS_S:g} s")
    for part in ("plan", "pass") if args.count else ():
        few, many = (instructions(part, args.nodes, rounds) for rounds in (1, 3))
        print(f"a {part}: {(many - few) / 2e6:,.0f} million instructions", flush=True)


if __name__ == "__main__":
    main()
