"""A host over nodes: the parts of an engine over several nodes start, end and fail together.

`host` runs each part as an engine of its own, on the node that the part's start names. Only the
last listing is kept here, so the next gateway finds all engines by their names (node_group.py).

* `start` leaves all parts, or none.
* `follow` mixes the logs, each line of a later node with the node before it. A part that ends
  leaves the others waiting, so all logs end after the last words (part_logs.py).
* All other calls, and engines on one node, belong only to `host`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from gateway.domain import (
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    PreparedView,
    StartConditions,
)
from gateway.hosts.host import Host, Machines, running_conflict_error
from gateway.hosts.node_group import join_parts, part_name, part_specs
from gateway.hosts.part_logs import PartLogs

T = TypeVar("T")

# Inside the class `list` is the method.
Instances = list[Instance]


class NodesHost:
    """See the module's docstring, and `host.py` for the contract."""

    def __init__(self, host: Host) -> None:
        """host: starts each part on the node of its `LaunchSpec`, and lists it with that."""
        self._host = host
        self._listed_parts: dict[str, dict[str, str]] = {}
        """The parts of each engine as last listed, as `_nodes_by_part` gives them."""
        self.kind = host.kind
        self.can_fork = host.can_fork

    @property
    def machines(self) -> Machines | None:
        return self._host.machines

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        await self._host.prepare(engine, report)

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        await _gather_all(map(self._host.prepare_fork, part_specs(spec) if spec.nodes else [spec]))

    async def start(self, spec: LaunchSpec) -> Instance:
        if not spec.nodes:
            return await self._host.start(spec)
        present_instance = next(
            (instance for instance in await self.list() if instance.name == spec.name), None
        )
        if present_instance is not None and present_instance.state == "running":
            if present_instance.fingerprint != spec.fingerprint:
                raise running_conflict_error(spec, present_instance.fingerprint)
            return present_instance
        if present_instance is not None:
            # A part that waits for the former ones could not meet the new ones.
            await self.stop(spec.name, 0)
        try:
            instances = await _gather_all(map(self._host.start, part_specs(spec)))
        except BaseException:
            await self.stop(spec.name, 0)
            raise
        return join_parts(instances)[0]

    async def list(self) -> Instances:
        instances = await self._host.list()
        self._listed_parts = _group_parts(instances)
        return join_parts(instances)

    async def stop(self, name: str, grace_s: float) -> None:
        await _gather_all(
            self._host.stop(part, grace_s) for part in await self._nodes_by_part(name)
        )

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        groups = await _gather_all(map(self._host.processes, await self._known_parts(name)))
        return tuple(process for group in groups for process in group)

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        return await self._host.conditions(engine, cache)

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        return await self._host.prepared_views()

    async def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        """The lines of all parts as they come."""
        marks = {part: _mark(part, node) for part, node in (await self._known_parts(name)).items()}
        async with aclosing(PartLogs(self._host, marks).lines()) as lines:
            async for line in lines:
                yield line

    async def allocate_port(self) -> int:
        return await self._host.allocate_port()

    async def resolve(self, engine: EngineRef) -> EngineRef:
        return await self._host.resolve(engine)

    async def identity(self, engine: EngineRef) -> str:
        return await self._host.identity(engine)

    def run_inquiry(
        self, engine: EngineRef, document: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        return self._host.run_inquiry(engine, document, gpus)

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:
        return await self._host.stop_command(names)

    async def close(self) -> None:
        await self._host.close()

    async def _nodes_by_part(self, name: str) -> dict[str, str]:
        """The nodes of the engine's parts, by the names of the parts in order; the engine's own
        name where none is listed, as its log may still be there."""
        return _group_parts(await self._host.list()).get(name) or {name: ""}

    async def _known_parts(self, name: str) -> dict[str, str]:
        """The parts as last listed, else listed now: a look at one engine asks no other node."""
        return self._listed_parts.get(name) or await self._nodes_by_part(name)


def _group_parts(instances: Sequence[Instance]) -> dict[str, dict[str, str]]:
    """The nodes of the parts of each engine, by the names of the parts in order."""
    parts: dict[str, dict[str, str]] = {}
    for instance in sorted(instances, key=lambda instance: instance.name):
        part = part_name(instance.name)
        engine = part.name if part is not None else instance.name
        parts.setdefault(engine, {})[instance.name] = instance.node
    return parts


def _mark(name: str, node: str) -> bytes:
    """The beginning of each line of a part, in the form in which engines name a process."""
    part = part_name(name)
    return f"({node} pid={part.number}) ".encode() if part is not None and part.number else b""


async def _gather_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All answers, once all calls have ended. Raises the first error."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
