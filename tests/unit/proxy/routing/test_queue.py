"""The order of waiting requests by class and caller, and their places at replicas."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from gateway.errors import Overloaded
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.class_places import TURN
from gateway.proxy.routing.model_route import RoutedReplica
from gateway.proxy.routing.queue import Queue
from gateway.proxy.routing.routes import Routes
from tests.support.waiting_requests import REPLICA, Waiting, routes_with

pytestmark = pytest.mark.anyio


def queue_of(*waits: Waiting) -> Queue:
    queue = Queue()
    for wait in waits:
        queue.add(wait)
    return queue


def holds_no_share(priority: int) -> bool:
    return False


def admit_callers(queue: Queue, count: int) -> list[str]:
    """The callers of the next `count` places."""
    callers = []
    for _ in range(count):
        wait = next(queue.waits_in_turn(holds_no_share))
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


def test_a_later_class_gets_one_of_eight_places() -> None:
    queue = queue_of(Waiting("batch", 100))
    admitted_callers: list[str] = []
    while "batch" not in admitted_callers:
        queue.add(Waiting("chat"))
        admitted_callers += admit_callers(queue, 1)
    assert len(admitted_callers) == TURN


def test_a_later_class_keeps_its_turn_where_places_come_in_pairs() -> None:
    queue = queue_of(Waiting("batch", 100))
    admitted_callers: list[str] = []
    while "batch" not in admitted_callers:
        queue.add(Waiting("chat"))
        queue.add(Waiting("chat"))
        for wait, _ in zip(queue.waits_in_turn(holds_no_share), range(2), strict=False):
            admitted_callers.append(wait.caller)
            queue.admit(wait)
    assert len(admitted_callers) == TURN


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
    for _ in range(TURN - 1):
        assert routes.pick(routes.table.find("m"), Call("chat", "m")) is replica
    assert routes.pick(routes.table.find("m"), Call("chat", "m")) is None
    routes.finish_request(replica)
    routes.start_request(replica)
    await asyncio.sleep(0)
    assert batch.replica is replica


def test_a_request_that_left_gets_no_turn() -> None:
    waits = [Waiting("a"), Waiting("b"), Waiting("c")]
    queue = queue_of(*waits)
    turns = queue.waits_in_turn(holds_no_share)
    assert next(turns) is waits[0]
    queue.remove(waits[1])
    assert next(turns) is waits[2]


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
    callers = await serve_callers(routes_with(replica, 8), replica, TURN)
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
