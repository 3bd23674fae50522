"""The routes of a worker, which shares the capacity of replicas with other workers."""

from __future__ import annotations

import time

from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.queue import capacity_for
from gateway.proxy.routing.responses import Responses
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes
from gateway.proxy.shared_memory import SharedMemory
from gateway.proxy.workers.channel import ReplicaLoad, RouteTableMessage, WorkerSetup


class SharedRoutes(Routes):
    """Routes shared with other workers.

    Each worker always has its share of a replica's capacity. Beyond it, a worker uses capacity that
    the others leave free by their last reports. So a replica is overloaded only for a moment, and
    no worker waits for another.
    """

    def __init__(self, begin: WorkerSetup, memory: SharedMemory) -> None:
        super().__init__(
            table_from(begin.routes), begin.queue_per_model, Responses(memory.responses)
        )
        self._workers = begin.workers
        self._other_loads: dict[str, int] | None = None

    def set_other_loads(self, in_flight: dict[str, int] | None) -> None:
        """Take the requests in flight at other workers, by replica id; None: unknown."""
        self._other_loads = in_flight
        self._schedule()

    def _places(self, route: ModelRoute) -> int:
        return -(-super()._places(route) // self._workers)

    def _has_free_place(self, replica: RoutedReplica, priority: int) -> bool:
        if replica.capacity is None:
            return True
        capacity = capacity_for(priority, replica.capacity)
        free_places = (
            0 if self._other_loads is None else capacity - self._other_loads.get(replica.id, 0)
        )
        return self.in_flight(replica.id) < max(capacity // self._workers, free_places, 1)

    def load_of(self, replica_id: str) -> int:
        return self.in_flight(replica_id) + (self._other_loads or {}).get(replica_id, 0)

    def loads(self) -> dict[str, ReplicaLoad]:
        now = time.monotonic()
        return {
            id_: ReplicaLoad(load.requests, now - load.progress_at)
            for id_, load in self._loads.items()
        }


def table_from(table: RouteTableMessage) -> RouteTable:
    """The table in a message of the control process."""
    return RouteTable({route.name: route for route in table.models})
