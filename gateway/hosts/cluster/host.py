"""The host over the machines of a cluster, each with its node service.

A machine that Ray declares lost is listed with the engines that still take connections: its raylet
alone may have ended. Other engines of that machine count as gone and are planned again. Until then
its last listing holds: a short silence restarts nothing. When the machine returns with an engine
that another machine runs by now, the returned one is stopped: a name runs once.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from gateway.domain import (
    Cluster,
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    MachineView,
    Network,
    NodeView,
    PreparedView,
    StartConditions,
)
from gateway.errors import AgentAway, AgentRefusal, FitserveError, HostError
from gateway.hosts.cluster.link_process import LinkProcess
from gateway.hosts.cluster.machine_views import machine_views, node_of
from gateway.hosts.cluster.networks.measurement import measure_between
from gateway.hosts.cluster.node_host import ANSWER_S, ENVIRONMENT, PATH_START, NodeHost
from gateway.hosts.cluster.shared_reading import SharedReading
from gateway.hosts.cluster.weights_copies import WeightsCopies
from gateway.hosts.host import HubCommit, Machines
from gateway.hosts.known_problems import KnownProblems
from gateway.hosts.node_group import part_name
from gateway.logging import Logger
from gateway.machine.environment import engine_dir

log = Logger("fitserve.cluster")

# Inside the class `list` is the method.
Instances = list[Instance]

_LIST_S = 1.5
# A call that was silent for _LIST_S goes on, and each listing waits so long for it.
_SILENT_CALL_PATIENCE_S = 0.2
_CONNECT_S = 0.5
# A raylet that ended is back within this time.
_RETURN_S = 60.0
# Logs of ended engines are asked for soon, or never.
_MAX_NODE_NAMES = 10_000
# A start follows its port within this time, or never.
_RESERVATION_S = 1800.0


class _PortReservation(NamedTuple):
    """The machine of a port. reserved_at: the event loop's time."""

    node: str
    reserved_at: float


class ClusterHost:
    """See the module's docstring, and `host.py` for the contract. Engines are processes."""

    kind: str = "process"
    can_fork = True

    def __init__(
        self,
        link: Path,
        owner: str,
        process: LinkProcess | None = None,
        data: Path | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """link: its socket.
        owner: the installation of the gateway.
        process: ended by `close`.
        data: the gateway's data folder, of the environments in commands.
        answer_s: seconds that a machine may be silent.
        """
        self._link = link
        self._owner = owner
        self._process = process
        self._data = data
        self._copies = WeightsCopies()
        self._answer_s = answer_s
        self._hosts: dict[str, NodeHost] = {}
        self._listings: dict[str, Instances] = {}
        self._silent_calls: dict[str, asyncio.Task[Instances]] = {}
        """Calls for listings without an answer for _LIST_S, by machine."""
        self._lost_at: dict[str, float] = {}
        """Times of the event loop, by machine."""
        self._gpus: dict[str, str] = {}
        """Machines by the UUIDs of their GPUs."""
        self._node_names: dict[str, str] = {}
        """Machines by instance, as last listed or started."""
        self._ports: dict[int, _PortReservation] = {}
        """Ports of engines that have not been started yet."""
        self._allocating = asyncio.Lock()
        self._view_reading = SharedReading(self._read_views)
        self._list_reading = SharedReading(self._read_instances)
        self._names: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._twins: set[asyncio.Task[None]] = set()
        self._machines: frozenset[str] = frozenset()
        self._has_listed = False
        self._refusals = KnownProblems()
        """Machines that refuse this gateway."""
        self.on_change: Callable[[], object] = lambda: None
        """Called by `list` when machines have come or gone."""

    # --- the contract ---

    @property
    def machines(self) -> Machines:
        return self

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        """Check that a machine has the engine. Plans skip machines without the engine."""
        nodes = await self._alive_nodes()
        answers = await asyncio.gather(
            *(node.prepare(engine, report) for node in nodes), return_exceptions=True
        )
        _raise_unless_one(answers)

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        node = await self._choose_node(spec)
        await node.prepare_fork(self._portable(spec))

    async def start(self, spec: LaunchSpec) -> Instance:
        async with self._names.setdefault(spec.name, asyncio.Lock()):
            node = await self._choose_node(spec)
            self._node_names[spec.name] = node.name
            try:
                started_instance = await node.start(self._portable(spec))
            finally:
                self._ports.pop(spec.port, None)
            instance = started_instance.evolve(node=node.name)
            self._record_start(instance)
        return instance

    async def list(self) -> Instances:
        return [*await self._list_reading.result()]

    async def _read_instances(self) -> Instances:
        """The instances of all machines. A lost machine keeps its last known ones."""
        nodes = await self._alive_nodes()
        names = [node.name for node in nodes]
        lost_names = sorted(self._listings.keys() - set(names))
        for name in self._silent_calls.keys() - set(names):
            del self._silent_calls[name]
        if self._machines != (machines := frozenset(names)):
            self._machines = machines
            self.on_change()
        listings = await asyncio.gather(
            *(self._list_instances(node) for node in nodes),
            *(self._list_unreachable(name) for name in lost_names),
        )
        for name, remaining in zip(lost_names, listings[len(names) :], strict=True):
            if not remaining:
                log.warning("a machine of the cluster is lost", node=name)
        self._listings = {
            name: listing
            for name, listing in zip((*names, *lost_names), listings, strict=True)
            if listing or (name in names and listing is not None)
        }
        self._lost_at = {
            name: at
            for name, at in self._lost_at.items()
            if name in lost_names and name in self._listings
        }
        self._has_listed = True
        return self._merge()

    async def stop(self, name: str, grace_s: float) -> None:
        nodes = await self._possible_nodes(name)
        await asyncio.gather(*(node.stop(name, grace_s) for node in nodes))

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        nodes = await self._possible_nodes(name)
        families = await asyncio.gather(*(node.processes(name) for node in nodes))
        return next((processes for processes in families if processes), ())

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        node, _ = await self._node_with(engine)
        return await node.conditions(engine, cache)

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        views = await asyncio.gather(
            *(node.prepared_views() for node in await self._alive_nodes()), return_exceptions=True
        )
        return tuple(view for answer in views if isinstance(answer, tuple) for view in answer)

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        for node in await self._possible_nodes(name):
            async with aclosing(node.follow(name)) as lines:
                async for line in lines:
                    yield line

    async def allocate_port(self) -> int:
        """A port of the machine with the fewest engines, which then gets the engine."""
        # Models that are added together are spread too.
        async with self._allocating:
            oldest_at = asyncio.get_running_loop().time() - _RESERVATION_S
            self._ports = {
                port: reserved
                for port, reserved in self._ports.items()
                if reserved.reserved_at > oldest_at
            }
            node = min(await self._open_nodes(), key=self._load)
            port = await node.allocate_port()
            # The GPUs of the plan may be on another machine.
            while port in self._used_ports() or port in self._ports:
                port = await node.allocate_port()
            self._ports[port] = _PortReservation(node.name, asyncio.get_running_loop().time())
        return port

    def _used_ports(self) -> Collection[int]:
        """The ports of the engines that are listed, of all machines."""
        return {
            urlsplit(instance.url).port or 0
            for instances in self._listings.values()
            for instance in instances
            if instance.url is not None
        }

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return engine

    async def identity(self, engine: EngineRef) -> str:
        return (await self._node_with(engine))[1]

    async def run_inquiry(
        self, engine: EngineRef, document: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        node, _ = await self._node_with(engine)
        async with aclosing(node.run_inquiry(engine, document, gpus)) as lines:
            async for line in lines:
                yield line

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:  # noqa: ARG002
        """A machine without a gateway ends them after the time of its lease."""
        return ()

    async def close(self) -> None:
        tasks = {*self._twins, *self._silent_calls.values()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            await self._process.close()

    def _portable(self, spec: LaunchSpec) -> LaunchSpec:
        """The start with a placeholder for the environment, which each machine has elsewhere."""
        if self._data is None:
            return spec
        folder = re.escape(str(engine_dir(self._data, spec.engine)))
        pattern = re.compile(rf'{PATH_START}{folder}(?=[/":]|$)')
        return spec.evolve(
            argv=tuple(pattern.sub(lambda _: ENVIRONMENT, argument) for argument in spec.argv)
        )

    # --- machines ---

    async def cluster(self) -> Cluster:
        """The machines that start engines now, for the planner. Raises HostError if none does."""
        nodes = [node_of(view) for view in await self.views() if not view.is_drained]
        if not nodes:
            raise _no_machine_error()
        return Cluster(nodes=tuple(sorted(nodes, key=lambda node: node.name)))

    async def machine_views(self) -> Sequence[MachineView]:
        states = await node_states(self._link)
        return machine_views(states, await self.views())

    async def measure_network(self, a: str, b: str) -> Network:
        return await measure_between(self.node(a), self.node(b))

    async def has_weights(self, commit: HubCommit) -> bool:
        answers = await asyncio.gather(
            *(self._copies.files(node, commit) for node in await self._alive_nodes()),
            return_exceptions=True,
        )
        return any(isinstance(answer, tuple) and answer for answer in answers)

    async def copy_weights(
        self, spec: LaunchSpec, commits: Sequence[HubCommit], report: Callable[[str], None]
    ) -> None:
        if not commits:
            return
        targets = (
            [self.node(node_launch.node) for node_launch in spec.nodes]
            if spec.nodes
            else [await self._choose_node(spec)]
        )
        nodes = await self._alive_nodes()
        for commit in commits:
            await asyncio.gather(
                *(self._copies.copy(target, nodes, commit, report) for target in targets)
            )

    async def views(self) -> Sequence[NodeView]:
        """The machines that answer. The GPUs of these machines decide where engines start."""
        return await self._view_reading.result()

    async def _read_views(self) -> Sequence[NodeView]:
        answers = await asyncio.gather(
            *(node.view() for node in await self._alive_nodes()), return_exceptions=True
        )
        views = [view for view in answers if isinstance(view, NodeView)]
        for view in views:
            self._gpus.update((gpu.uuid, view.name) for gpu in view.hardware.gpus)
        return views

    def node(self, name: str) -> NodeHost:
        return self._hosts.setdefault(name, NodeHost(self._link, name, self._owner, self._answer_s))

    async def _alive_nodes(self) -> Sequence[NodeHost]:
        """The machines that Ray knows. Raises AgentAway if the link does not answer."""
        states = await node_states(self._link)
        return [self.node(name) for name, state in states.items() if state == "alive"]

    async def _open_nodes(self) -> Sequence[NodeHost]:
        """The machines that start engines. Raises HostError if there is none."""
        names = {view.name for view in await self.views() if not view.is_drained}
        if not names:
            raise _no_machine_error()
        return [self.node(name) for name in sorted(names)]

    async def _possible_nodes(self, name: str) -> Sequence[NodeHost]:
        """The machine of an instance, or all where it is unknown."""
        node_name = self._node_names.get(name)
        return [self.node(node_name)] if node_name is not None else await self._alive_nodes()

    async def _choose_node(self, spec: LaunchSpec) -> NodeHost:
        """The machine of a start: a running instance's, the named one, that of its GPUs or port, or
        the one with the fewest engines. Raises HostError."""
        running_nodes = {instance.name: instance.node for instance in await self.list()}
        if node_name := running_nodes.get(spec.name):
            return self.node(node_name)
        if spec.node:
            if spec.node not in self._machines:
                raise HostError(
                    f"{spec.name} needs the machine {spec.node}, which is not in the cluster.",
                    hint="`fitserve cluster status` shows lost machines.",
                )
            return self.node(spec.node)
        if spec.gpus:
            if not set(spec.gpus) <= self._gpus.keys():
                await self.views()
            node_names = {self._gpus.get(uuid) for uuid in spec.gpus}
            if len(node_names) != 1 or None in node_names:
                raise HostError(
                    f"No machine of the cluster has all of the GPUs {', '.join(spec.gpus)}.",
                    hint="`fitserve cluster status` shows lost machines.",
                )
            return self.node(str(node_names.pop()))
        nodes = {node.name: node for node in await self._open_nodes()}
        if (reserved := self._ports.get(spec.port)) is not None and reserved.node in nodes:
            return nodes[reserved.node]
        return min(nodes.values(), key=self._load)

    def _load(self, node: NodeHost) -> int:
        """Engines of a machine, with those that start soon."""
        reserved = sum(reservation.node == node.name for reservation in self._ports.values())
        return len(self._listings.get(node.name, ())) + reserved

    async def _node_with(self, engine: EngineRef) -> tuple[NodeHost, str]:
        """A machine with the engine, and the identity of its code. Raises HostError."""
        nodes = await self._alive_nodes()
        answers = await asyncio.gather(
            *(node.identity(engine) for node in nodes), return_exceptions=True
        )
        _raise_unless_one(answers)
        return next(
            (node, answer)
            for node, answer in zip(nodes, answers, strict=True)
            if isinstance(answer, str)
        )

    # --- listings ---

    async def _list_instances(self, node: NodeHost) -> Instances | None:
        """The instances of a machine; the last known ones while it is silent; None: it has just
        come, and has not answered yet.

        Raises AgentAway before the first listing of all: engines that it runs would start twice.
        """
        try:
            listing = await self._query_instances(node)
            self._refusals.forget(node.name)
            return [instance.evolve(node=node.name) for instance in listing]
        except (AgentAway, TimeoutError) as error:
            if node.name not in self._listings and self._has_listed:
                return None
            if node.name not in self._listings:
                raise AgentAway(
                    f"The machine {node.name} has not said yet which engines it runs: {error}",
                    hint="`fitserve cluster status` shows whether the machine is reachable.",
                ) from None
            return self._listings[node.name]
        except AgentRefusal as error:
            # Its engines are another gateway's, or are being stopped.
            # The reason counts seconds.
            if self._refusals.record(node.name, "refused"):
                log.warning(
                    "a machine of the cluster is not ours", node=node.name, reason=str(error)
                )
            return []

    def _record_start(self, instance: Instance) -> None:
        """Add a new instance to the last listing of its machine, which may be silent next, and
        whose engines are counted for the next port."""
        if (listing := self._listings.get(instance.node)) is not None:
            neighbours = [entry for entry in listing if entry.name != instance.name]
            self._listings[instance.node] = [*neighbours, instance]

    async def _query_instances(self, node: NodeHost) -> Instances:
        """The engines of a machine. Raises TimeoutError while it is silent, and the errors of its
        answer."""
        call = self._silent_calls.get(node.name)
        patience_s = _SILENT_CALL_PATIENCE_S
        if call is None:
            call = asyncio.ensure_future(node.list())
            patience_s = _LIST_S
            call.add_done_callback(_read_failure)
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(call)
        except TimeoutError:
            if self._silent_calls.setdefault(node.name, call) is not call:
                call.cancel()
            raise
        finally:
            is_kept = self._silent_calls.get(node.name) is call
            if is_kept and call.done():
                del self._silent_calls[node.name]
            elif not is_kept:
                call.cancel()

    async def _list_unreachable(self, name: str) -> Instances:
        """The instances of a machine that Ray has lost, as far as they take connections.

        A part of an engine that has no port counts for a while where its machine refuses the
        connection: that machine is there.
        """
        now = asyncio.get_running_loop().time()
        is_recent = now < self._lost_at.setdefault(name, now) + _RETURN_S
        instances = self._listings.get(name, [])
        answers = await asyncio.gather(*map(_connects, instances))
        return [
            instance
            for instance, answer in zip(instances, answers, strict=True)
            if answer == "taken" or (answer == "refused" and is_recent and _has_no_port(instance))
        ]

    def _merge(self) -> Instances:
        """All instances, each name once; a twin is stopped."""
        merged_instances: dict[str, Instance] = {}
        for node, instances in sorted(self._listings.items()):
            for instance in instances:
                if (first := merged_instances.get(instance.name)) is None:
                    merged_instances[instance.name] = instance
                    continue
                remaining_instance = (
                    first if self._node_names.get(instance.name) != node else instance
                )
                merged_instances[instance.name] = remaining_instance
                twin = instance if remaining_instance is first else first
                self._stop_twin(twin)
        self._node_names.update(
            (name, instance.node) for name, instance in merged_instances.items()
        )
        for name in [*self._node_names][:-_MAX_NODE_NAMES]:
            del self._node_names[name]
        return [*merged_instances.values()]

    def _stop_twin(self, twin: Instance) -> None:
        async def stop() -> None:
            try:
                await self.node(twin.node).stop(twin.name, 0)
            except FitserveError as error:
                log.warning("a twin could not be stopped", engine=twin.name, reason=str(error))

        log.warning("an engine runs twice; one is stopped", engine=twin.name, node=twin.node)
        task = asyncio.ensure_future(stop())
        self._twins.add(task)
        task.add_done_callback(self._twins.discard)


async def _connects(instance: Instance) -> Literal["taken", "refused", "lost"]:
    """The fate of a connection to a running instance."""
    if instance.state != "running" or instance.url is None:
        return "lost"
    url = urlsplit(instance.url)
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
    except ConnectionRefusedError:
        return "refused"
    except (OSError, TimeoutError):
        return "lost"
    writer.close()
    return "taken"


def _read_failure(call: asyncio.Task[Instances]) -> None:
    """Read the outcome of a call that nobody may wait for, so that asyncio reports none."""
    if not call.cancelled():
        call.exception()


def _has_no_port(instance: Instance) -> bool:
    """Whether the instance is a part of an engine that answers no requests."""
    part = part_name(instance.name)
    return part is not None and part.number > 0


async def node_states(link: Path) -> dict[str, str]:
    """The states of machines by name, as Ray knows them: `alive`, or the problem.

    Raises AgentAway.
    """
    try:
        async with asyncio.timeout(_LIST_S):
            reader, writer = await asyncio.open_unix_connection(str(link))
            try:
                writer.write(b'{"node": ""}\n')
                nodes = json.loads(await reader.readline())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise AgentAway(
            f"The link to the cluster does not answer: {type(error).__name__}.",
            hint="It is started again by itself. `fitserve doctor` checks Ray on this machine.",
        ) from None
    return {str(node["name"]): str(node["state"]) for node in nodes}


def _no_machine_error() -> HostError:
    return HostError(
        "No machine of the cluster starts engines.",
        hint="`fitserve cluster status` shows lost and drained machines.",
    )


def _raise_unless_one(answers: Sequence[object]) -> None:
    """Raise an error of the machines if none succeeded, the most telling one first."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if len(errors) < len(answers):
        return
    if not errors:
        raise HostError(
            "The cluster has no machine.",
            hint="Run `fitserve cluster join` on a machine, then `fitserve cluster status` here.",
        )
    raise min(errors, key=lambda error: isinstance(error, AgentAway | AgentRefusal))
