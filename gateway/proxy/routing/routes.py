"""Which replica a request goes to: the table in force, how busy each replica is, and the requests
that wait.

Only the event loop that serves requests touches `Routes`, so nothing here locks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import FitserveError
from gateway.proxy.routing import balance
from gateway.proxy.routing.queue import Queue, overloaded, places
from gateway.proxy.routing.responses import Responses, no_response
from gateway.proxy.routing.table import Call, ModelRoute, RoutedReplica, RouteTable

if TYPE_CHECKING:
    from gateway.proxy.queue_wait import QueueWait


@dataclass(slots=True)
class _Load:
    """The work of one replica. `heard`: when the replica last gave a client a byte, or began to
    work."""

    requests: int
    tokens: int
    heard: float


class Routes:
    """The table in force; the requests in flight per replica id, which outlive the table they were
    picked from; and the queues.

    `queue_per_model`: how many requests may wait; 0: none; None: see
    `gateway.proxy.routing.queue.places`.
    """

    def __init__(
        self,
        table: RouteTable | None = None,
        queue_per_model: int | None = None,
        responses: Responses | None = None,
    ) -> None:
        self._loads: dict[str, _Load] = {}
        self._last_pick: dict[str, int] = {}
        self._picks = 0
        self.responses = responses or Responses()
        self._queues: dict[str, Queue] = {}
        self._queue_per_model = queue_per_model
        self._called = False
        self._table = table or RouteTable({})
        self.demanded: Callable[[], object] = _nobody_hears
        """Called when the first request begins to wait for a model that no replica serves."""

    @property
    def table(self) -> RouteTable:
        return self._table

    @table.setter
    def table(self, table: RouteTable) -> None:
        kept = {replica.id for route in table.models.values() for replica in route.replicas}
        self._last_pick = {id_: turn for id_, turn in self._last_pick.items() if id_ in kept}
        for queue in self._queues.values():
            for waiter in queue.waiting:
                waiter.avoid = waiter.avoid if waiter.avoid in kept else None
        self._table = table
        self._call()

    # --- choosing ---

    def pick(self, route: ModelRoute, call: Call, avoid: str | None = None) -> RoutedReplica | None:
        """The replica for a call, but not `avoid`; None: the call has to `wait`. Raises NotReady,
        Overloaded.

        A call that goes on from a response goes to the replica that made the response: no other
        replica knows it.
        """
        if (
            len(route.replicas) == 1
            and avoid is None
            and not self._queues
            and self._has_room(route.replicas[0])
        ):
            return route.replicas[0]
        queue = self._queues.get(call.model)
        replica = self._choose(route, call, avoid) if queue is None or call.light else None
        if replica is None:
            ready = any(replica.id != avoid for replica in route.replicas)
            if not ready and not route.wait_s:
                raise route.not_ready()
            if (len(queue.waiting) if queue is not None else 0) >= self._places(route):
                raise (
                    self.refusal(route, "as many requests wait for them as may")
                    if ready
                    else route.not_ready()
                )
        return replica

    def _places(self, route: ModelRoute) -> int:
        """How many may wait for a model."""
        return places(route, self._queue_per_model)

    def _choose(self, route: ModelRoute, call: Call, avoid: str | None) -> RoutedReplica | None:
        """The replica that can take the call now."""
        maker = self._maker(route, call)
        if maker is not None and maker.id != avoid:
            return maker if call.light or self._has_room(maker) else None
        free = [
            one for one in route.replicas if (self._has_room(one) or call.light) and one.id != avoid
        ]
        if len(free) < 2:
            return free[0] if free else None
        loads = [
            load.tokens if (load := self._loads.get(one.id)) is not None else 0 for one in free
        ]
        if call.prefix is not None:
            chosen = free[
                balance.affine(loads, [one.seed for one in free], call.tokens, call.prefix)
            ]
        else:
            chosen = free[balance.least(loads, [self._last_pick.get(one.id, 0) for one in free])]
        self._picks += 1
        self._last_pick[chosen.id] = self._picks
        return chosen

    def _has_room(self, replica: RoutedReplica) -> bool:
        return replica.capacity is None or self.in_flight(replica.id) < replica.capacity

    def _maker(self, route: ModelRoute, call: Call) -> RoutedReplica | None:
        """The replica that made the response from which the call goes on."""
        if call.maker is None:
            return None
        return next((replica for replica in route.replicas if replica.seed == call.maker), None)

    # --- waiting ---

    def wait(self, waiter: QueueWait) -> None:
        """For a call that got no replica from `pick`. Later `waiter.go` is called with a
        replica."""
        name = waiter.call.model
        queue = self._queues.setdefault(name, Queue())
        queue.waiting[waiter] = time.monotonic()
        if len(queue.waiting) == 1:
            route = self._table.models.get(name)
            if route is not None and not route.replicas:
                self.demanded()
        else:
            # the requests before may wait for one replica only, while another replica has room
            self._call()

    def forget(self, waiter: QueueWait) -> None:
        """It does not wait any more."""
        queue = self._queues.get(waiter.call.model)
        if queue is not None:
            queue.waiting.pop(waiter, None)
            if not queue.waiting:
                del self._queues[waiter.call.model]

    def waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return len(queue.waiting) if queue is not None else 0

    def demand(self) -> dict[str, float]:
        """The models that requests wait for, and the seconds that the oldest of each has waited."""
        now = time.monotonic()
        return {
            name: now - next(iter(queue.waiting.values())) for name, queue in self._queues.items()
        }

    def refusal(self, route: ModelRoute, why: str) -> FitserveError:
        """For a request that every replica is too busy for."""
        queue = self._queues.get(route.name)
        return overloaded(route, queue.retry_after_s() if queue is not None else 1, why)

    def _call(self) -> None:
        """Something has changed: the queues are looked at soon, but not from within the call that
        made the change."""
        if self._queues and not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._call_queues)

    def _call_queues(self) -> None:
        self._called = False
        for name, queue in list(self._queues.items()):
            for waiter in list(queue.waiting):
                try:
                    route = self._table.find(name)
                    if not route.replicas and not route.wait_s:
                        raise route.not_ready()
                except FitserveError as error:
                    self.forget(waiter)
                    waiter.give_up(error)
                    continue
                replica = self._choose(route, waiter.call, waiter.avoid)
                if replica is not None:
                    queue.pace.went()
                    self.forget(waiter)
                    waiter.go(replica)
                elif waiter.avoid is None and self._maker(route, waiter.call) is None:
                    break

    def model_of(self, response: str, maker: int) -> str:
        """The model of the replica that made the response. Raises NotFound where the replica is
        gone."""
        for route in self._table.models.values():
            if any(replica.seed == maker for replica in route.replicas):
                return route.name
        raise no_response(response)

    # --- in flight ---

    def begin(self, replica: RoutedReplica, tokens: int = 1) -> None:
        """Counts a request to `replica`; every begin has its end, whatever happens between."""
        load = self._loads.get(replica.id)
        if load is None:
            self._loads[replica.id] = _Load(1, tokens, time.monotonic())
        else:
            load.requests += 1
            load.tokens += tokens

    def end(self, replica: RoutedReplica, tokens: int = 1) -> None:
        load = self._loads[replica.id]
        if load.requests == 1:
            del self._loads[replica.id]
        else:
            load.requests -= 1
            load.tokens -= tokens
        if self._queues:
            self._call()

    def progress(self, replica: RoutedReplica) -> None:
        """The engine gave a client bytes of its answer."""
        load = self._loads.get(replica.id)
        if load is not None:
            load.heard = time.monotonic()

    def silent_s(self, replica_id: str) -> float | None:
        """Seconds since the replica gave any client a byte; None while no client waits."""
        load = self._loads.get(replica_id)
        return time.monotonic() - load.heard if load is not None else None

    def working(self, name: str) -> bool:
        """Whether an engine of the model works for a client."""
        route = self.table.models.get(name)
        return route is not None and any(
            self.silent_s(replica.id) is not None for replica in route.replicas
        )

    def in_flight(self, replica_id: str) -> int:
        load = self._loads.get(replica_id)
        return load.requests if load is not None else 0

    def drained(self, replica_id: str) -> bool:
        """Whether nothing is in flight at a replica, and nothing will be: it is in no table any
        more."""
        return not self.in_flight(replica_id) and not self.holds(replica_id)

    def holds(self, replica_id: str) -> bool:
        """Whether requests may go to a replica."""
        return any(
            replica.id == replica_id
            for route in self._table.models.values()
            for replica in route.replicas
        )

    @property
    def total_in_flight(self) -> int:
        return sum(load.requests for load in self._loads.values())


def _nobody_hears() -> None:
    """Nobody loads models on request."""
