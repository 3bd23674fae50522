"""Choice of a replica for each request: the route table, load of replicas, and queues.

Only the event loop that serves requests uses `Routes`, so nothing here locks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import FitserveError
from gateway.proxy.routing import balance
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.queue import Queue, capacity_for, overload_error, places
from gateway.proxy.routing.responses import Responses, missing_response_error
from gateway.proxy.routing.route_table import RouteTable

if TYPE_CHECKING:
    from gateway.proxy.queue_wait import QueueWait


@dataclass(slots=True)
class _Load:
    """Work of one replica. `progress_at`: time of its last byte for a client, or of its start."""

    requests: int
    tokens: int
    progress_at: float


class Routes:
    """The current table; the requests in flight per replica id, which outlive their table; and the
    queues.

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
        self._is_scheduled = False
        self._table = table or RouteTable({})
        self.on_demand: Callable[[], object] = _ignore_demand
        """Called when the first request begins to wait for a model without a replica."""

    @property
    def table(self) -> RouteTable:
        return self._table

    @table.setter
    def table(self, table: RouteTable) -> None:
        ids = {replica.id for route in table.models.values() for replica in route.replicas}
        self._last_pick = {id_: turn for id_, turn in self._last_pick.items() if id_ in ids}
        for queue in self._queues.values():
            for waiter in queue.waits_by_request:
                waiter.avoid = waiter.avoid if waiter.avoid in ids else None
        self._table = table
        self._schedule()

    # --- choosing ---

    def pick(self, route: ModelRoute, call: Call, avoid: str | None = None) -> RoutedReplica | None:
        """The replica for a call, but not `avoid`; None: the call has to `wait`. Raises NotReady,
        Overloaded.

        A call that continues a response goes to the replica that made it: no other replica knows
        it.
        """
        if (
            len(route.replicas) == 1
            and avoid is None
            and not self._queues
            and self._has_free_place(route.replicas[0], call.priority)
        ):
            return route.replicas[0]
        queue = self._queues.get(call.model)
        can_begin = queue is None or call.is_light or queue.may_overtake(call.priority)
        replica = self._choose(route, call, avoid) if can_begin else None
        if queue is not None and replica is not None and not call.is_light:
            queue.record_overtaking()
        if replica is None:
            is_ready = any(replica.id != avoid for replica in route.replicas)
            if not is_ready and not route.wait_s:
                raise route.not_ready_error()
            if (len(queue.waits_by_request) if queue is not None else 0) >= self._places(route):
                self._make_place(route, call, is_ready=is_ready)
        return replica

    def _make_place(self, route: ModelRoute, call: Call, *, is_ready: bool) -> None:
        """Refuse a waiting request of a later class for the call. Raises NotReady, Overloaded
        without one."""
        queue = self._queues.get(call.model)
        last_wait = queue.find_last_after(call.priority) if queue is not None else None
        error = (
            self.queue_error(route, "their queue is full") if is_ready else route.not_ready_error()
        )
        if last_wait is None:
            raise error
        last_wait.reject(error)

    def _places(self, route: ModelRoute) -> int:
        """The number of requests that may wait for a model."""
        return places(route, self._queue_per_model)

    def _choose(
        self, route: ModelRoute, call: Call, avoid: str | None, *, fills_reserve: bool = False
    ) -> RoutedReplica | None:
        """The replica that can take the call now. `fills_reserve`: also a place that others than
        the call's class use."""
        priority = 0 if fills_reserve else call.priority
        maker = self._maker(route, call)
        if maker is not None and maker.id != avoid:
            return maker if call.is_light or self._has_free_place(maker, priority) else None
        free_replicas = [
            replica
            for replica in route.replicas
            if (self._has_free_place(replica, priority) or call.is_light) and replica.id != avoid
        ]
        if len(free_replicas) < 2:
            return free_replicas[0] if free_replicas else None
        loads = [
            load.tokens if (load := self._loads.get(replica.id)) is not None else 0
            for replica in free_replicas
        ]
        if call.prefix is not None:
            chosen_replica = free_replicas[
                balance.pick_by_prefix(
                    loads, [replica.seed for replica in free_replicas], call.tokens, call.prefix
                )
            ]
        else:
            chosen_replica = free_replicas[
                balance.least_loaded_position(
                    loads, [self._last_pick.get(replica.id, 0) for replica in free_replicas]
                )
            ]
        self._picks += 1
        self._last_pick[chosen_replica.id] = self._picks
        return chosen_replica

    def _has_free_place(self, replica: RoutedReplica, priority: int) -> bool:
        return replica.capacity is None or self.in_flight(replica.id) < (
            capacity_for(priority, replica.capacity) if priority else replica.capacity
        )

    def _maker(self, route: ModelRoute, call: Call) -> RoutedReplica | None:
        """The replica that made the response that the call continues."""
        if call.maker is None:
            return None
        return next((replica for replica in route.replicas if replica.seed == call.maker), None)

    # --- waiting ---

    def wait(self, waiter: QueueWait) -> None:
        """Queue a call that got no replica from `pick`. Later `waiter.go` is called with a
        replica."""
        name = waiter.call.model
        queue = self._queues.setdefault(name, Queue())
        queue.add(waiter)
        if len(queue.waits_by_request) == 1:
            route = self._table.models.get(name)
            if route is not None and not route.replicas:
                self.on_demand()
        else:
            # earlier requests may wait for one particular replica while another has room
            self._schedule()

    def forget(self, waiter: QueueWait) -> None:
        """Remove a request from its queue."""
        queue = self._queues.get(waiter.call.model)
        if queue is not None:
            queue.remove(waiter)
            if not queue.waits_by_request:
                del self._queues[waiter.call.model]

    def waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return len(queue.waits_by_request) if queue is not None else 0

    def demand(self) -> dict[str, float]:
        """Models with waiting requests, and the seconds that the oldest of each has waited."""
        now = time.monotonic()
        return {
            name: now - next(iter(queue.waits_by_request.values()))
            for name, queue in self._queues.items()
        }

    def queue_error(self, route: ModelRoute, reason: str) -> FitserveError:
        """The error for a request that finds all replicas busy."""
        queue = self._queues.get(route.name)
        return overload_error(route, queue.retry_after_s() if queue is not None else 1, reason)

    def _schedule(self) -> None:
        """Have the queues checked soon, after the current call."""
        if self._queues and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve_queues)

    def _serve_queues(self) -> None:
        self._is_scheduled = False
        for name, queue in list(self._queues.items()):
            for waiter in queue.waits_in_turn():
                try:
                    route = self._table.find(name)
                    if not route.replicas and not route.wait_s:
                        raise route.not_ready_error()
                except FitserveError as error:
                    self.forget(waiter)
                    waiter.reject(error)
                    continue
                is_due = waiter is queue.oldest_in_turn
                replica = self._choose(route, waiter.call, waiter.avoid, fills_reserve=is_due)
                if replica is not None:
                    queue.admit(waiter)
                    self.forget(waiter)
                    waiter.go(replica)
                elif waiter.avoid is None and self._maker(route, waiter.call) is None:
                    break

    def model_of(self, response: str, maker: int) -> str:
        """The model of the replica that made the response. Raises NotFound if the replica is
        gone."""
        for route in self._table.models.values():
            if any(replica.seed == maker for replica in route.replicas):
                return route.name
        raise missing_response_error(response)

    # --- in flight ---

    def start_request(self, replica: RoutedReplica, tokens: int = 1) -> None:
        """Count a request to `replica`. Every begin must have an end."""
        load = self._loads.get(replica.id)
        if load is None:
            self._loads[replica.id] = _Load(1, tokens, time.monotonic())
        else:
            load.requests += 1
            load.tokens += tokens

    def finish_request(self, replica: RoutedReplica, tokens: int = 1) -> None:
        load = self._loads[replica.id]
        if load.requests == 1:
            del self._loads[replica.id]
        else:
            load.requests -= 1
            load.tokens -= tokens
        if self._queues:
            self._schedule()

    def progress(self, replica: RoutedReplica) -> None:
        """Note that the engine gave a client bytes of its answer."""
        load = self._loads.get(replica.id)
        if load is not None:
            load.progress_at = time.monotonic()

    def silent_s(self, replica_id: str) -> float | None:
        """Seconds since the replica gave any client a byte; None while no client waits."""
        load = self._loads.get(replica_id)
        return time.monotonic() - load.progress_at if load is not None else None

    def is_working(self, name: str) -> bool:
        """Whether an engine of the model works for a client."""
        route = self.table.models.get(name)
        return route is not None and any(
            self.silent_s(replica.id) is not None for replica in route.replicas
        )

    def in_flight(self, replica_id: str) -> int:
        load = self._loads.get(replica_id)
        return load.requests if load is not None else 0

    def load_of(self, replica_id: str) -> int:
        """The requests at a replica, those of other workers by their last reports included."""
        return self.in_flight(replica_id)

    def has_drained(self, replica_id: str) -> bool:
        """Whether a replica has no request in flight and is in no table, so gets none."""
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


def _ignore_demand() -> None:
    """No models are loaded on request."""
