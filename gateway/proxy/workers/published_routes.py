"""The routes of the control process, whose workers answer the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes
from gateway.proxy.workers.channel import build_route_message

if TYPE_CHECKING:
    from gateway.proxy.workers.supervisor import Workers


class PublishedRoutes(Routes):
    """The routes of the control loop: a new table goes to all workers, and loads come from their
    reports."""

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self._workers = workers

    @property
    def table(self) -> RouteTable:
        return self._table

    @table.setter
    def table(self, table: RouteTable) -> None:
        self._table = table
        self._workers.broadcast(build_route_message(table))

    def silent_s(self, replica_id: str) -> float | None:
        return self._workers.silent_s(replica_id)

    def in_flight(self, replica_id: str) -> int:
        return self._workers.in_flight(replica_id)

    def demand(self) -> dict[str, float]:
        return self._workers.demand()

    def has_drained(self, replica_id: str) -> bool:
        return super().has_drained(replica_id) and self._workers.have_current_table
