"""The watch of the networks between machines.

Each pair that an engine could span is measured once, while no request is at work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from gateway.domain import Node, NodeLink
from gateway.errors import FitserveError
from gateway.hosts.host import Machines
from gateway.hosts.known_problems import KnownProblems
from gateway.logging import Logger
from gateway.planner.nodes.measured_networks import MeasuredNetworks, network_facts
from gateway.store.store import Store
from gateway.supervision import SupervisedTask

log = Logger("fitserve.cluster")

# Machines that join wake the watch earlier.
_LOOK_S = 60.0
_BUSY_S = 2.0
# The other machine may be busy, or a firewall may keep the measurement out.
_RETRY_S = 300.0
# Plans wait no longer for measurements after machines have come.
_PATIENCE_S = 10.0

Pair = tuple[str, str]


class NetworkWatch:
    """Measures one pair of machines at a time, and stores the figures as facts."""

    def __init__(
        self, machines: Machines, store: Store, is_busy: Callable[[], Awaitable[bool]]
    ) -> None:
        """is_busy: whether engines work on requests."""
        self._machines = machines
        self._store = store
        self._is_busy = is_busy
        self._retry_at: dict[Pair, float] = {}
        """Times of the event loop, of pairs whose measurement failed."""
        self._problems = KnownProblems()
        """Reasons of failed measurements, by the names and addresses of a pair."""
        self._change_event = asyncio.Event()
        self._idle_event = asyncio.Event()
        """Set while there is nothing to measure now."""
        self._patience_ends_at = asyncio.get_running_loop().time() + _PATIENCE_S
        self.on_change: Callable[[], object] = lambda: None
        """Called when machines have come or gone."""
        self.links: Sequence[NodeLink] = ()
        """The networks that engines could use, as last looked at."""
        machines.on_change = self.notice_machines
        self._work = SupervisedTask(self._measure_next, "measuring the network between machines")

    def notice_machines(self) -> None:
        """Look at the machines, some of which have come or gone."""
        self._patience_ends_at = asyncio.get_running_loop().time() + _PATIENCE_S
        self._idle_event.clear()
        self._change_event.set()
        self.on_change()

    async def settle(self) -> None:
        """Wait for measurements of machines that have just come, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._patience_ends_at):
                await self._idle_event.wait()

    async def close(self) -> None:
        await self._work.close()

    async def _measure_next(self) -> float:
        self._change_event.clear()
        try:
            nodes = {node.name: node for node in (await self._machines.cluster()).nodes}
        except FitserveError:
            # Machines that come wake the watch.
            nodes = {}
        facts = await asyncio.to_thread(self._store.facts)
        self.links = MeasuredNetworks(facts).links([*nodes.values()])
        pair = self._due_pair()
        if pair is None:
            if not self._change_event.is_set():
                self._idle_event.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._change_event.wait()
            return 0
        if await self._is_idle():
            await self._measure(nodes[pair[0]], nodes[pair[1]])
        return 0

    async def _is_idle(self) -> bool:
        """Wait until no request is at work. False: machines have come or gone meanwhile."""
        while await self._is_busy():
            self._idle_event.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_BUSY_S):
                    await self._change_event.wait()
                    return False
        return True

    def _due_pair(self) -> Pair | None:
        now = asyncio.get_running_loop().time()
        pairs = ((link.a, link.b) for link in self.links if link.tcp_bytes_s is None)
        return next((pair for pair in pairs if self._retry_at.get(pair, now) <= now), None)

    async def _measure(self, a: Node, b: Node) -> None:
        ends = (a.name, a.address), (b.name, b.address)
        try:
            network = await self._machines.measure_network(a.name, b.name)
        except FitserveError as error:
            self._retry_at[a.name, b.name] = asyncio.get_running_loop().time() + _RETRY_S
            if self._problems.record(ends, str(error)):
                log.warning(
                    "a network between machines is not measured",
                    a=a.name,
                    b=b.name,
                    reason=str(error),
                )
            return
        self._problems.forget(ends)
        facts = network_facts(a, b, network, time.time())
        await asyncio.to_thread(self._store.store_networks, facts)
        log.info(
            "a network between machines is measured",
            a=a.name,
            b=b.name,
            bytes_s=network.tcp_bytes_s,
            latency_s=network.latency_s,
        )
