"""Requests that wait without connections, and routes of one replica."""

from __future__ import annotations

from gateway.errors import FitserveError
from gateway.proxy.queue_wait import QueueWait
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes

REPLICA = RoutedReplica("http://127.0.0.1:9001", "a", "m", capacity=1)


class Waiting(QueueWait):
    """A waiting request, and its outcome."""

    def __init__(self, caller: str = "", priority: int = 0) -> None:
        self.call = Call("chat", "m", priority=priority)
        self.caller = caller
        self.avoid: str | None = None
        self.replica: RoutedReplica | None = None
        self.error: FitserveError | None = None

    def go(self, replica: RoutedReplica) -> None:
        self.replica = replica

    def reject(self, error: FitserveError) -> None:
        self.error = error


def routes_with(replica: RoutedReplica, requests: int, queue: int | None = None) -> Routes:
    """Routes of one replica that has so many requests."""
    route = ModelRoute("m", "ready", "", 1700000000, (replica,), "generate")
    routes = Routes(RouteTable({"m": route}), queue)
    for _ in range(requests):
        routes.start_request(replica)
    return routes
