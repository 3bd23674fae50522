"""When an engine that left the routes has drained: one rule for all that stop, sleep, or give
way."""

from __future__ import annotations

import asyncio

import pytest

from gateway.proxy.routing.drains import Drains
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes

A = RoutedReplica("http://127.0.0.1:9001", "a", "m")


def table(*replicas: RoutedReplica) -> RouteTable:
    return RouteTable({"m": ModelRoute("m", "ready", "", 0, replicas, "generate")})


def test_an_engine_has_drained_when_no_table_has_it_and_nothing_is_in_flight() -> None:
    routes = Routes()
    drains = Drains(routes, 300)
    routes.table = table(A)
    assert not drains.is_drained("a"), "a request may come"
    routes.start_request(A)
    routes.table = table()
    assert not drains.is_drained("a")
    routes.finish_request(A)
    assert drains.is_drained("a")


def test_the_drain_time_begins_after_the_routes_and_anew_when_the_replica_comes_back() -> None:
    routes = Routes()
    drains = Drains(routes, 0)
    routes.table = table(A)
    routes.start_request(A)
    assert not drains.is_drained("a")
    routes.table = table()
    assert drains.is_drained("a"), "nobody waits for its request any longer"
    late = Drains(routes, 300)
    assert not late.is_drained("a")
    late.forget_engines({"a"})
    assert late._drained_since
    routes.table = table(A)
    assert not late.is_drained("a")
    assert not late._drained_since
    late.is_drained("a")
    late.forget_engines(set())
    assert not late._drained_since


@pytest.mark.anyio
async def test_a_waiter_goes_on_when_the_drain_is_over_or_nobody_waits_for_the_requests() -> None:
    routes = Routes()
    drains = Drains(routes, 300)
    routes.start_request(A)
    waiting = asyncio.create_task(drains.wait_until_drained("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await drains.wait_until_drained("a", lambda: True)
    routes.finish_request(A)
    await waiting
