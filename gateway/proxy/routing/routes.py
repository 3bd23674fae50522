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
from gateway.proxy.routing.class_places import ClassLoad
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.queue import Queue, overload_error, places
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
        # Empty until a request has a priority.
        self._class_loads: dict[str, ClassLoad] = {}
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
        self._class_loads = {
            id_: load for id_, load in self._class_loads.items() if id_ in ids or not load.is_empty
        }
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
        # The engine that an overdue request was sent to before is not the one of a retry.
        call.engine_priority = None
        if (
            len(route.replicas) == 1
            and avoid is None
            and not self._queues
            and self._has_free_place(route.replicas[0], call.priority)
        ):
            return route.replicas[0]
        queue = self._queues.get(call.model)
        can_begin = (
            queue is None
            or call.is_light
            or queue.may_overtake(call.priority, self._share_test(route.replicas))
        )
        replica = self._choose(route, call, avoid) if can_begin else None
        if queue is not None and replica is not None and not call.is_light:
            queue.record_place(call.priority)
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
        self, route: ModelRoute, call: Call, avoid: str | None, *, is_overdue: bool = False
    ) -> RoutedReplica | None:
        """The replica that can take the call now. `is_overdue`: also in a place that earlier
        classes use."""
        has_place = self._has_overdue_place if is_overdue else self._has_free_place
        maker = self._maker(route, call)
        if maker is not None and maker.id != avoid:
            return maker if call.is_light or has_place(maker, call.priority) else None
        free_replicas = [
            replica
            for replica in route.replicas
            if (has_place(replica, call.priority) or call.is_light) and replica.id != avoid
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

    def _has_free_place(
        self, replica: RoutedReplica, priority: int, *, ignores_classes: bool = False
    ) -> bool:
        """Whether a request of that class may begin. `ignores_classes`: as one of the first
        class."""
        capacity = replica.capacity
        if capacity is None:
            return True
        if (priority or self._class_loads) and not ignores_classes:
            capacity = self._class_limit(replica.id, priority, capacity)
        load = self._loads.get(replica.id)
        return (load.requests if load is not None else 0) < capacity

    def _has_overdue_place(self, replica: RoutedReplica, priority: int) -> bool:
        return not self._has_share(replica, priority) and self._has_free_place(
            replica, priority, ignores_classes=True
        )

    def _raise_priority(self, call: Call, replica: RoutedReplica) -> None:
        """Have the engine order a request like the earlier ones that it has. In its own queue
        these would overtake the request again."""
        load = self._class_loads.get(replica.id)
        requests = self.in_flight(replica.id)
        first_class = load.first_class(requests) if load is not None else 0
        call.engine_priority = min(call.priority, first_class)

    def _class_limit(self, replica_id: str, priority: int, capacity: int) -> int:
        """The requests at a replica below which one of that class may begin."""
        load = self._class_loads.get(replica_id)
        if load is None:
            load = self._class_loads[replica_id] = ClassLoad()
        return load.limit(priority, capacity, self.in_flight(replica_id), self.clock_s())

    def _has_share(self, replica: RoutedReplica, priority: int) -> bool:
        """Whether that class and later ones hold the share of a class at a replica."""
        load = self._class_loads.get(replica.id)
        return replica.capacity is None or (
            load is not None
            and load.has_share(
                priority, self._own_capacity(replica.capacity), self.in_flight(replica.id)
            )
        )

    def _share_test(self, replicas: tuple[RoutedReplica, ...]) -> Callable[[int], bool]:
        """The question whether a class holds its share at each of the replicas."""
        return lambda priority: all(self._has_share(replica, priority) for replica in replicas)

    def _own_capacity(self, capacity: int) -> int:
        """The part of a replica's capacity that is for the requests of these routes."""
        return capacity

    def clock_s(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

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

    def sweep(self) -> None:
        """Have the queues checked where reserves fall with time. Called twice a second."""
        if self._class_loads:
            self._schedule()

    def _schedule(self) -> None:
        """Have the queues checked soon, after the current call."""
        if self._queues and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve_queues)

    def _serve_queues(self) -> None:
        """Send waiting requests to replicas with room, and refuse those without hope."""
        self._is_scheduled = False
        for name, queue in list(self._queues.items()):
            route = self._table.models.get(name)
            has_share = self._share_test(route.replicas if route is not None else ())
            for waiter in queue.waits_in_turn(has_share):
                try:
                    route = self._table.find(name)
                    if not route.replicas and not route.wait_s:
                        raise route.not_ready_error()
                except FitserveError as error:
                    self.forget(waiter)
                    waiter.reject(error)
                    continue
                is_overdue = waiter is queue.find_overdue(has_share)
                replica = self._choose(route, waiter.call, waiter.avoid, is_overdue=is_overdue)
                if replica is not None:
                    if is_overdue:
                        self._raise_priority(waiter.call, replica)
                    queue.admit(waiter)
                    self.forget(waiter)
                    waiter.go(replica)
                elif (
                    not is_overdue
                    and waiter.avoid is None
                    and self._maker(route, waiter.call) is None
                ):
                    break

    def model_of(self, response: str, maker: int) -> str:
        """The model of the replica that made the response. Raises NotFound if the replica is
        gone."""
        for route in self._table.models.values():
            if any(replica.seed == maker for replica in route.replicas):
                return route.name
        raise missing_response_error(response)

    # --- in flight ---

    def start_request(self, replica: RoutedReplica, tokens: int = 1, priority: int = 0) -> None:
        """Count a request to `replica`. Each start must have a finish."""
        load = self._loads.get(replica.id)
        if load is None:
            load = self._loads[replica.id] = _Load(1, tokens, time.monotonic())
        else:
            load.requests += 1
            load.tokens += tokens
        if priority or self._class_loads:
            self._start_in_class(replica.id, priority, load.requests)

    def finish_request(self, replica: RoutedReplica, tokens: int = 1, priority: int = 0) -> None:
        load = self._loads[replica.id]
        if load.requests == 1:
            del self._loads[replica.id]
        else:
            load.requests -= 1
            load.tokens -= tokens
        if priority and (class_load := self._class_loads.get(replica.id)) is not None:
            class_load.finish_request(priority)
        if self._queues:
            self._schedule()

    def _start_in_class(self, replica_id: str, priority: int, requests: int) -> None:
        load = self._class_loads.get(replica_id)
        if load is None and priority:
            load = self._class_loads[replica_id] = ClassLoad()
        if load is not None:
            load.start_request(priority, requests, self.clock_s())

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
