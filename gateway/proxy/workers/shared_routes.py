"""The routes of a worker, which shares the capacity of replicas with other workers."""

from __future__ import annotations

import time

from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
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
        self._other_kept: dict[str, int] = {}

    def set_other_loads(
        self, in_flight: dict[str, int] | None, kept_places: dict[str, int] | None = None
    ) -> None:
        """Take the requests in flight at other workers, by replica id; None: unknown.

        kept_places: free places that they keep for earlier classes.
        """
        self._other_loads = in_flight
        self._other_kept = kept_places or {}
        self._schedule()

    def _places(self, route: ModelRoute) -> int:
        return -(-super()._places(route) // self._workers)

    def _has_free_place(
        self, replica: RoutedReplica, priority: int, *, ignores_classes: bool = False
    ) -> bool:
        capacity = replica.capacity
        if capacity is None:
            return True
        own_capacity = capacity // self._workers
        if (priority or self._class_loads) and not ignores_classes:
            capacity = self._class_limit(replica.id, priority, capacity)
            own_capacity = self._class_limit(replica.id, priority, max(1, own_capacity))
            if priority > 0:
                capacity -= self._other_kept.get(replica.id, 0)
        free_places = (
            0 if self._other_loads is None else capacity - self._other_loads.get(replica.id, 0)
        )
        return self.in_flight(replica.id) < max(own_capacity, free_places, 1)

    def _own_capacity(self, capacity: int) -> int:
        return max(1, capacity // self._workers)

    def load_of(self, replica_id: str) -> int:
        return self.in_flight(replica_id) + (self._other_loads or {}).get(replica_id, 0)

    def loads(self) -> dict[str, ReplicaLoad]:
        now = time.monotonic()
        return {
            id_: ReplicaLoad(load.requests, now - load.progress_at)
            for id_, load in self._loads.items()
        }

    def kept_places(self) -> dict[str, int]:
        """The free places of replicas that are kept for earlier classes."""
        now = self.clock_s()
        places = {
            id_: load.kept_places(self.in_flight(id_), now)
            for id_, load in self._class_loads.items()
        }
        return {id_: count for id_, count in places.items() if count}


def table_from(table: RouteTableMessage) -> RouteTable:
    """The table in a message of the control process."""
    return RouteTable({route.name: route for route in table.models})
