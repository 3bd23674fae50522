"""The order of waiting requests, and the places that later classes leave free."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from gateway.errors import FitserveError, Overloaded
from gateway.proxy.queue_wait import QueueWait
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.queue import OLDEST_TURN, Queue, capacity_for
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes

pytestmark = pytest.mark.anyio

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


def queue_of(*waits: Waiting) -> Queue:
    queue = Queue()
    for wait in waits:
        queue.add(wait)
    return queue


def admit_callers(queue: Queue, count: int) -> list[str]:
    """The callers of the next `count` places."""
    callers = []
    for _ in range(count):
        wait = next(queue.waits_in_turn())
        callers.append(wait.caller)
        queue.admit(wait)
    return callers


def test_the_smallest_priority_goes_first() -> None:
    queue = queue_of(
        Waiting("batch", 100), Waiting("first", -100), Waiting("usual"), Waiting("number", 7)
    )
    assert admit_callers(queue, 4) == ["first", "usual", "number", "batch"]
    assert not queue.waits_by_request
    assert not queue._lines


def test_callers_of_one_class_take_turns() -> None:
    queue = queue_of(*(Waiting("crowd") for _ in range(4)), Waiting("one"), Waiting("other"))
    assert admit_callers(queue, 6) == ["crowd", "one", "other", "crowd", "crowd", "crowd"]


def test_a_caller_that_had_the_last_place_comes_after_others() -> None:
    queue = queue_of(*(Waiting("crowd") for _ in range(3)))
    assert admit_callers(queue, 1) == ["crowd"]
    queue.add(Waiting("one"))
    assert admit_callers(queue, 2) == ["one", "crowd"]


def test_the_oldest_request_waits_a_bounded_number_of_places() -> None:
    queue = queue_of(Waiting("batch", 100))
    admitted_callers: list[str] = []
    while "batch" not in admitted_callers:
        queue.add(Waiting("chat"))
        admitted_callers += admit_callers(queue, 1)
    assert len(admitted_callers) == OLDEST_TURN


def test_the_oldest_request_keeps_its_turn_where_places_come_in_pairs() -> None:
    queue = queue_of(Waiting("batch", 100))
    admitted_callers: list[str] = []
    while "batch" not in admitted_callers:
        queue.add(Waiting("chat"))
        queue.add(Waiting("chat"))
        for wait, _ in zip(queue.waits_in_turn(), range(2), strict=False):
            admitted_callers.append(wait.caller)
            queue.admit(wait)
    assert len(admitted_callers) == OLDEST_TURN


async def test_a_chat_overtakes_a_full_queue_of_batches_and_takes_none_of_their_places() -> None:
    replica = dataclasses.replace(REPLICA, capacity=10)
    routes = routes_with(replica, 7, queue=2)
    batches = [Waiting("a", 100), Waiting("b", 100)]
    for wait in batches:
        routes.wait(wait)
    assert routes.pick(routes.table.find("m"), Call("chat", "m")) is replica
    assert all(wait.error is None for wait in batches)


async def test_a_batch_gets_a_place_though_every_chat_overtakes_it() -> None:
    replica = dataclasses.replace(REPLICA, capacity=10)
    routes = routes_with(replica, 9)
    batch = Waiting("batch", 100)
    routes.wait(batch)
    for _ in range(OLDEST_TURN - 1):
        assert routes.pick(routes.table.find("m"), Call("chat", "m")) is replica
    assert routes.pick(routes.table.find("m"), Call("chat", "m")) is None
    routes.finish_request(replica)
    routes.start_request(replica)
    await asyncio.sleep(0)
    assert batch.replica is replica


def test_a_request_that_left_gets_no_turn() -> None:
    waits = [Waiting("a"), Waiting("b"), Waiting("c")]
    queue = queue_of(*waits)
    turns = queue.waits_in_turn()
    assert next(turns) is waits[0]
    queue.remove(waits[1])
    assert next(turns) is waits[2]


@pytest.mark.parametrize(
    ("priority", "capacity", "places"),
    [(0, 8, 8), (-100, 8, 8), (100, 10, 7), (1, 320, 231), (100, 3, 1), (100, 2, 1), (100, 1, 1)],
)
def test_later_classes_leave_places_free(priority: int, capacity: int, places: int) -> None:
    assert capacity_for(priority, capacity) == places


def test_a_chat_gets_the_place_that_a_batch_leaves_free() -> None:
    replica = dataclasses.replace(REPLICA, capacity=10)
    routes = routes_with(replica, 7)
    route = routes.table.find("m")
    assert routes.pick(route, Call("chat", "m", priority=100)) is None
    assert routes.pick(route, Call("chat", "m")) is replica


async def serve_callers(routes: Routes, replica: RoutedReplica, ends: int) -> list[str]:
    """Callers in the order of their places, while one request ends at a time and a chat waits
    always."""
    callers: list[str] = []
    batch = Waiting("batch", 100)
    routes.wait(batch)
    for _ in range(ends):
        chat = Waiting("chat")
        routes.wait(chat)
        routes.finish_request(replica)
        await asyncio.sleep(0)
        for wait in (batch, chat):
            if wait.replica is not None:
                callers.append(wait.caller)
                routes.start_request(replica)
                wait.replica = None
    return callers


async def test_a_batch_is_served_while_chats_fill_every_place() -> None:
    replica = dataclasses.replace(REPLICA, capacity=8)
    callers = await serve_callers(routes_with(replica, 8), replica, OLDEST_TURN)
    assert callers.count("batch") == 1


async def test_a_full_queue_gives_up_its_last_class_for_an_earlier_one() -> None:
    routes = routes_with(REPLICA, 1, queue=2)
    waits = [Waiting("a", 100), Waiting("b", 100)]
    for wait in waits:
        routes.wait(wait)
    assert routes.pick(routes.table.find("m"), Call("chat", "m")) is None
    assert waits[0].error is None
    assert isinstance(waits[1].error, Overloaded)
    with pytest.raises(Overloaded):
        routes.pick(routes.table.find("m"), Call("chat", "m", priority=100))
