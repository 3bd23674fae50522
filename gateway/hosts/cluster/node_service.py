"""The node service: owns the host of this machine, for the one gateway that holds its lease.

Engines are its children or its predecessor's, never Ray's. Engines outlive the service, and the
next one adopts them. Without a gateway's call for the time of the lease, it stops them: another
machine may run them by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from gateway.domain import LaunchSpec, NodeView
from gateway.engines.common import trace_flags
from gateway.errors import AgentRefusal, FitserveError, HostError
from gateway.hosts.agent.agent_server import HostServer
from gateway.hosts.agent.calls import (
    Answer,
    Call,
    DoneAnswer,
    DrainCall,
    ExpectCall,
    FollowCall,
    ListCall,
    ListenCall,
    MeasureCall,
    MissingCall,
    NodeCall,
    ProcessesCall,
    ReceiveCall,
    SendCall,
    StartCall,
    WeightsCall,
)
from gateway.hosts.cluster.lease import Lease
from gateway.hosts.cluster.membership import Membership, folder, node_socket
from gateway.hosts.cluster.networks.network_server import NetworkServer
from gateway.hosts.cluster.node_host import ENVIRONMENT, PATH_START
from gateway.hosts.cluster.weights_server import WeightsServer
from gateway.hosts.cluster.weights_store import WeightsStore
from gateway.hosts.host import Host
from gateway.logging import Logger
from gateway.machine import network
from gateway.machine.environment import engine_dir, has_package
from gateway.machine.probe import probe
from gateway.machine.rdma import rdma_port
from gateway.models.catalog.hub_cache import HubCache
from gateway.store import atomic_file
from gateway.store.engine_logs import remove_old_logs
from gateway.version import __version__

log = Logger("fitserve.cluster")

_LOOK_S = 0.5
_HOUR_S = 3600.0
_LOG_AGE_S = 24 * _HOUR_S
# A commit in a cache of the Hub.
_COMMIT_PATH = re.compile(
    rf'{PATH_START}(?P<cache>/[^"=:]*)/models--(?P<repo>[A-Za-z0-9_.-]+)'
    r"/snapshots/(?P<commit>[0-9a-f]{40})(?![0-9a-f])"
)


def _traceable_start(spec: LaunchSpec, environment: Path) -> LaunchSpec:
    """The start without traces where the engine's environment has no library for them, as it would
    fail."""
    untraced_spec = trace_flags.untraced_start(spec)
    if untraced_spec is spec or has_package(environment, trace_flags.LIBRARY):
        return spec
    log.warning(
        "the engine starts without traces: its environment has no OpenTelemetry",
        engine=str(spec.engine),
        hint=f"Install opentelemetry-exporter-otlp in {environment}.",
    )
    return untraced_spec


class NodeService(HostServer):
    """Owns the host of this machine for the gateway that holds its lease.

    `host` listens on the address of the membership. `disk` has the models that other machines may
    copy. Raises OSError if `data` is not readable.
    """

    def __init__(
        self, host: Host, membership: Membership, data: Path, disk: HubCache, grace_s: float
    ) -> None:
        super().__init__(host)
        self._disk = disk
        self._weights = WeightsStore(disk, membership.name)
        self._weights_server = WeightsServer(self._weights)
        self._network_server = NetworkServer(membership.name, membership.address)
        self._membership = membership
        self._data = data
        self._grace_s = grace_s
        self._record = folder(data) / "lease.json"
        self._drained_path = folder(data) / "drained"
        self._lease = Lease(membership.lease_s, _owner(self._record), _boot_seconds())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve on the node's socket, and watch the lease. Raises SettingsError."""
        async with self.serving(node_socket(self._data)):
            tasks = [
                asyncio.ensure_future(self._watch_lease()),
                asyncio.ensure_future(self._remove_old_logs()),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _admit(self, call: Call) -> None:
        reads = isinstance(call, ListCall | ProcessesCall | FollowCall)
        if isinstance(call, NodeCall | DrainCall) or (reads and not call.owner):
            return
        if not call.owner:
            raise AgentRefusal(
                "The machine refuses: the call names no gateway.",
                hint="Use `fitserve` on the machine of the gateway.",
            )
        if self._lease.claim(call.owner, _boot_seconds()):
            # Recorded before anything is done for the new owner.
            await asyncio.to_thread(self._write_owner)
            log.info("a gateway owns this machine", owner=call.owner)
        if isinstance(call, StartCall) and self._drained_path.exists():
            raise HostError(
                f"The machine {self._membership.name} is drained and starts no engines.",
                hint=f"`fitserve cluster drain {self._membership.name} --undo` ends that.",
            )

    async def _perform_call(self, call: Call) -> AsyncGenerator[Answer, None]:
        """The answers of this node to a call."""
        if isinstance(call, DrainCall):
            if call.is_drained:
                self._drained_path.touch()
            else:
                self._drained_path.unlink(missing_ok=True)
        if isinstance(call, NodeCall | DrainCall):
            yield DoneAnswer(node=await self._node_view())
            return
        if isinstance(call, WeightsCall | MissingCall | SendCall):
            await self._admit(call)
            async with aclosing(self._weights_server.answers(call)) as answers:
                async for answer in answers:
                    yield answer
            return
        if isinstance(call, ListenCall | MeasureCall):
            await self._admit(call)
            async with aclosing(self._network_server.answers(call)) as answers:
                async for answer in answers:
                    yield answer
            return
        if isinstance(call, StartCall | ExpectCall):
            spec = await asyncio.to_thread(self._add_folders, call.spec)
            call = call.evolve(spec=spec)
        if isinstance(call, StartCall):
            await asyncio.to_thread(self._check_weights, call.spec)
        async with aclosing(super()._perform_call(call)) as answers:
            async for answer in answers:
                yield answer

    async def _receive(
        self, call: ReceiveCall, reader: asyncio.StreamReader
    ) -> AsyncGenerator[Answer, None]:
        await self._admit(call)
        async with aclosing(self._weights_server.receive(call, reader)) as answers:
            async for answer in answers:
                yield answer

    def _add_folders(self, spec: LaunchSpec) -> LaunchSpec:
        """The start with the environment and the weights of this machine.

        A commit in the gateway's cache has its path here too where that is a shared folder.
        """
        environment_folder = engine_dir(self._data, spec.engine)
        environment = str(environment_folder)
        spec = _traceable_start(spec, environment_folder)
        runs_code = "--trust-remote-code" in spec.argv

        def find_commit(match: re.Match[str]) -> str:
            if self._disk.folder is None:
                return match[0]
            repo = match["repo"].replace("--", "/", 1)
            commit = match["commit"]
            is_whole = self._disk.is_whole(repo, commit, remote_code=runs_code)
            if not is_whole and Path(match[0]).exists():
                return match[0]
            return str(self._disk.snapshot(repo, commit))

        return spec.evolve(
            argv=tuple(
                _COMMIT_PATH.sub(find_commit, argument.replace(ENVIRONMENT, environment))
                for argument in spec.argv
            )
        )

    def _check_weights(self, spec: LaunchSpec) -> None:
        """Check that the weights are here. Raises HostError."""
        for argument in spec.argv:
            path = argument.removeprefix("--model=")
            if path != argument and path.startswith("/") and not Path(path).exists():
                raise HostError(
                    f"The weights are not at {path} on the machine {self._membership.name}.",
                    hint=(
                        "A folder needs one path on all machines, for example on NFS. Models of the"
                        " Hub are in FITSERVE_MODELS_DIR of each machine, or at the gateway's path."
                    ),
                )

    async def _node_view(self) -> NodeView:
        instances = await self._host.list()
        address = self._membership.address
        interface = await asyncio.to_thread(network.find_interface, address)
        return NodeView(
            name=self._membership.name,
            version=__version__,
            address=address,
            interface=interface,
            rdma=await asyncio.to_thread(rdma_port, interface) if interface is not None else None,
            addresses=await asyncio.to_thread(network.addresses),
            ports=await asyncio.to_thread(network.listening_ports),
            hardware=await asyncio.to_thread(probe, self._data),
            owner=self._lease.owner,
            lease_s=self._lease.length_s,
            is_drained=self._drained_path.exists(),
            engines=tuple(instance.name for instance in instances if instance.state == "running"),
            weights=await asyncio.to_thread(self._weights.names),
        )

    async def _watch_lease(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._lease.has_ended(_boot_seconds()):
                continue
            try:
                await self._stop_engines()
            except FitserveError as error:
                log.warning("engines without a gateway could not be stopped", reason=str(error))
            else:
                with contextlib.suppress(OSError):
                    self._record.unlink(missing_ok=True)
                self._lease.release(_boot_seconds())

    async def _remove_old_logs(self) -> None:
        """Remove logs of engines that ended a day ago: the gateway has copies, and forgets them
        with their models."""
        while True:
            with contextlib.suppress(FitserveError):
                names = {instance.name for instance in await self._host.list()}
                await asyncio.to_thread(remove_old_logs, self._data, names, _LOG_AGE_S)
            await asyncio.sleep(_HOUR_S)

    async def _stop_engines(self) -> None:
        """Stop all engines of this machine. Raises HostError."""
        instances = await self._host.list()
        if instances:
            names = [instance.name for instance in instances]
            log.warning("no gateway claims the engines; stopping them", engines=names)
        await asyncio.gather(
            *(self._host.stop(instance.name, self._grace_s) for instance in instances)
        )

    def _write_owner(self) -> None:
        try:
            atomic_file.write(self._record, json.dumps(self._lease.owner).encode())
        except OSError as error:
            raise HostError(
                f"The owner of this machine cannot be written to {self._record}: {error.strerror}.",
                hint="Free disk space.",
            ) from None


def _boot_seconds() -> float:
    """Seconds, those of the machine's sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _owner(record: Path) -> str:
    """The owner before a restart of the node service; empty: none."""
    try:
        return str(json.loads(record.read_bytes()))
    except (OSError, ValueError):
        return ""
