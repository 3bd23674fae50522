"""Hosts with folders of their own as the machines of one host, each engine on the one it names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from gateway.domain import (
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    PreparedView,
    StartConditions,
)
from gateway.errors import HostError
from gateway.hosts.host import Host, Machines

# Inside the class `list` is the method.
Instances = list[Instance]


class SeparateHosts:
    """An engine that names no machine belongs to the first one, as do questions."""

    def __init__(self, hosts: Mapping[str, Host]) -> None:
        self._hosts = dict(hosts)
        self._first = next(iter(self._hosts.values()))
        self.kind = self._first.kind
        self.can_fork = self._first.can_fork
        self.machines: Machines | None = None

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        for host in self._hosts.values():
            await host.prepare(engine, report)

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        await self._first.prepare_fork(spec)

    async def start(self, spec: LaunchSpec) -> Instance:
        node = spec.node or next(iter(self._hosts))
        if node not in self._hosts:
            raise HostError(f"{spec.name} needs {node}, which is not a node here.", hint="")
        return (await self._hosts[node].start(spec)).evolve(node=node)

    async def list(self) -> Instances:
        return [
            instance.evolve(node=node)
            for node, host in self._hosts.items()
            for instance in await host.list()
        ]

    async def stop(self, name: str, grace_s: float) -> None:
        for host in self._hosts.values():
            await host.stop(name, grace_s)

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        families = [await host.processes(name) for host in self._hosts.values()]
        return tuple(process for family in families for process in family)

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        return await self._first.conditions(engine, cache)

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return await self._first.prepared_views()

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        nodes = {instance.name: instance.node for instance in await self.list()}
        host = self._hosts[nodes[name]] if name in nodes else self._first
        async with aclosing(host.follow(name)) as lines:
            async for line in lines:
                yield line

    async def allocate_port(self) -> int:
        return await self._first.allocate_port()

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return await self._first.resolve(engine)

    async def identity(self, engine: EngineRef) -> str:
        return await self._first.identity(engine)

    def run_inquiry(
        self, engine: EngineRef, document: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        return self._first.run_inquiry(engine, document, gpus)

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:
        return await self._first.stop_command(names)

    async def close(self) -> None:
        for host in self._hosts.values():
            await host.close()
