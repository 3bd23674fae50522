"""The places of a class: a reserve by the recent peak of earlier classes, and a bounded wait."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys import PRIORITIES
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.class_places import (
    HALF_LIFE_S,
    MAX_CLASSES,
    TURN,
    ClassLoad,
    Overtakings,
    capacity_for,
    class_share,
    running_requests,
)
from gateway.proxy.routing.model_route import RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes
from tests.support.waiting_requests import REPLICA, Waiting, routes_with

BATCH = PRIORITIES["batch"]
CLASSES = tuple(PRIORITIES.values())


class ClockedRoutes(Routes):
    """Routes whose clock is set."""

    now_s = 0.0

    def clock_s(self) -> float:
        return self.now_s


def clocked_routes(capacity: int) -> ClockedRoutes:
    table = routes_with(dataclasses.replace(REPLICA, capacity=capacity), 0).table
    return ClockedRoutes(RouteTable(dict(table.models)), 1000)


class Crowd:
    """Requests of one model at its only replica, which end on demand.

    overtakings: the requests of earlier classes that began since each class waits for its share.
    """

    def __init__(self, capacity: int) -> None:
        self.routes = clocked_routes(capacity)
        self.route = self.routes.table.find("m")
        self.running_classes: list[int] = []
        self.waiting_classes: list[int] = []
        self.overtakings = dict.fromkeys(CLASSES, 0)

    def ask(self, priority: int) -> bool:
        """Whether a request of that class begins immediately. If not, it waits."""
        replica = self.routes.pick(self.route, Call("chat", "m", priority=priority))
        if replica is None:
            self.waiting_classes.append(priority)
            self.routes.wait(CrowdWait(self, priority))
        else:
            self.begin(priority)
        return replica is not None

    def begin(self, priority: int) -> None:
        self.running_classes.append(priority)
        self.routes.start_request(self.route.replicas[0], priority=priority)
        for class_ in CLASSES:
            if class_ == priority or class_ not in self.waiting_classes:
                self.overtakings[class_] = 0
            elif class_ > priority and not self.has_share(class_):
                self.overtakings[class_] += 1

    async def end(self, position: int) -> None:
        """End a running request, and begin those that find its place."""
        priority = self.running_classes.pop(position % len(self.running_classes))
        self.routes.finish_request(self.route.replicas[0], priority=priority)
        await asyncio.sleep(0)

    async def end_all(self, priority: int) -> None:
        while priority in self.running_classes:
            await self.end(self.running_classes.index(priority))

    def has_share(self, priority: int) -> bool:
        capacity = self.route.replicas[0].capacity or 0
        count = sum(class_ >= priority for class_ in self.running_classes)
        return count >= class_share(capacity)


class CrowdWait(Waiting):
    """A waiting request of a crowd."""

    def __init__(self, crowd: Crowd, priority: int) -> None:
        super().__init__(str(priority), priority)
        self._crowd = crowd

    def go(self, replica: RoutedReplica) -> None:
        self._crowd.waiting_classes.remove(self.call.priority)
        self._crowd.begin(self.call.priority)


@pytest.mark.parametrize(
    ("priority", "capacity", "places"),
    [(0, 8, 8), (-100, 8, 8), (100, 10, 7), (1, 320, 231), (100, 3, 1), (100, 2, 1), (100, 1, 1)],
)
def test_later_classes_leave_places_free(priority: int, capacity: int, places: int) -> None:
    assert capacity_for(priority, capacity) == places


@given(capacity=st.integers(1, 400))
def test_a_batch_alone_loses_at_most_a_tenth_of_an_engine_or_one_place(capacity: int) -> None:
    running_count = running_requests(capacity)
    limit = ClassLoad().limit(BATCH, capacity, 0, 0.0)
    assert limit >= min(running_count - 1, 0.9 * running_count) or limit == running_count == 1


def test_a_peak_halves_in_its_time_and_a_new_peak_counts_immediately() -> None:
    load = ClassLoad()
    assert load.peak_before(BATCH, 0, 0.0) == 0
    for requests in range(1, 17):
        load.start_request(0, requests, 0.0)
    peaks = [load.peak_before(BATCH, 0, turn * HALF_LIFE_S) for turn in range(6)]
    assert peaks == [16, 8, 4, 2, 1, 0]
    load.start_request(0, 5, 6 * HALF_LIFE_S)
    assert load.peak_before(BATCH, 0, 6 * HALF_LIFE_S) == 5


def test_a_class_observes_the_classes_before_it_alone() -> None:
    load = ClassLoad()
    for priority in CLASSES:
        load.peak_before(priority, 0, 0.0)
    for requests, priority in enumerate((-100, -100, 0, 100, 100, 100), start=1):
        load.start_request(priority, requests, 0.0)
    assert [load.count_before(priority, 6) for priority in CLASSES] == [0, 2, 3]
    assert [load.peak_before(priority, 6, 0.0) for priority in CLASSES] == [0, 2, 3]


def test_the_observed_classes_are_bounded() -> None:
    load = ClassLoad()
    for priority in range(1, 500):
        load.limit(priority, 40, 0, 0.0)
    assert len(load._peaks) == MAX_CLASSES


def test_a_normal_request_leaves_the_peak_of_interactive_ones_free() -> None:
    load = ClassLoad()
    assert load.limit(0, 40, 0, 0.0) == 40
    for requests in range(1, 5):
        load.start_request(-100, requests, 0.0)
    for _ in range(4):
        load.finish_request(-100)
    assert load.limit(0, 40, 0, 0.0) == 28
    assert load.limit(-100, 40, 0, 0.0) == 40


def test_a_batch_takes_no_place_that_normal_requests_leave_to_interactive_ones() -> None:
    load = ClassLoad()
    for priority in CLASSES:
        load.peak_before(priority, 0, 0.0)
    for requests in range(1, 11):
        load.start_request(-100, requests, 0.0)
    for _ in range(10):
        load.finish_request(-100)
    for requests in range(1, 21):
        load.start_request(0, requests, 0.0)
    assert [load.limit(priority, 40, 20, 0.0) for priority in CLASSES] == [40, 22, 22]


@given(capacity=st.integers(3, 120), data=st.data())
def test_chats_up_to_their_recent_peak_find_places_next_to_a_batch(
    capacity: int, data: st.DataObject
) -> None:
    most_chats = running_requests(capacity) - class_share(capacity)
    chats = data.draw(st.integers(0, most_chats))

    async def run() -> None:
        crowd = Crowd(capacity)
        crowd.ask(BATCH)
        for _ in range(chats):
            assert crowd.ask(0)
        await crowd.end_all(0)
        for _ in range(2 * capacity):
            crowd.ask(BATCH)
        assert len(crowd.running_classes) <= running_requests(capacity)
        assert all(crowd.ask(0) for _ in range(chats))

    asyncio.run(run())


def test_a_batch_gets_places_back_when_chats_stay_away() -> None:
    async def run() -> None:
        crowd = Crowd(40)
        crowd.ask(BATCH)
        for _ in range(16):
            crowd.ask(0)
        await crowd.end_all(0)
        counts = []
        for _ in range(60):
            crowd.ask(BATCH)
        for turn in range(7):
            crowd.routes.now_s = turn * HALF_LIFE_S
            await crowd.end(0)
            counts.append(len(crowd.running_classes))
        assert counts == [16, 24, 28, 29, 29, 29, 29]

    asyncio.run(run())


def test_a_waiting_batch_gets_places_back_though_no_request_ends() -> None:
    async def run() -> None:
        crowd = Crowd(10)
        for priority in (*[0] * 8, *[BATCH] * 12):
            crowd.ask(priority)
        await crowd.end_all(0)
        assert len(crowd.running_classes) == class_share(10)
        crowd.routes.now_s = 10 * HALF_LIFE_S
        crowd.routes.sweep()
        await asyncio.sleep(0)
        assert len(crowd.running_classes) == capacity_for(BATCH, 10)

    asyncio.run(run())


@given(
    capacity=st.integers(1, 24),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from(CLASSES)),
            st.tuples(st.just("end"), st.integers(0, 40)),
        ),
        max_size=200,
    ),
)
def test_a_waiting_class_without_its_share_is_overtaken_a_bounded_number_of_times(
    capacity: int, events: list[tuple[str, int]]
) -> None:
    """The bound is TURN - 1 places, and one of each other class that was overtaken too."""

    async def run() -> None:
        crowd = Crowd(capacity)
        for kind, value in events:
            if kind == "ask":
                crowd.ask(value)
            elif crowd.running_classes:
                await crowd.end(value)
            assert max(crowd.overtakings.values()) <= TURN - 1 + len(CLASSES) - 1

    asyncio.run(run())


@given(capacity=st.integers(2, 40), batches=st.integers(1, 40))
def test_each_batch_is_served_while_chats_come_for_ever(capacity: int, batches: int) -> None:
    """Each request waits at most TURN places for each batch request before it, once the batch
    lacks its share."""

    async def run() -> None:
        crowd = Crowd(capacity)
        for _ in range(capacity + 3):
            crowd.ask(-100)
        for _ in range(batches):
            crowd.ask(BATCH)
        ended_count = 0
        while BATCH in crowd.waiting_classes:
            crowd.ask(-100)
            await crowd.end(0)  # the oldest one
            ended_count += 1
            assert ended_count <= (batches + 1) * (TURN + capacity)

    asyncio.run(run())


def test_the_class_overtaken_most_often_gets_the_turn() -> None:
    overtakings = Overtakings()
    for _ in range(TURN):
        overtakings.record(-100, {100, 0})
    overtakings.record(0, {100, 0})
    assert overtakings.class_in_turn({100, 0}, lambda _: False) == 100
    assert overtakings.class_in_turn({0}, lambda _: False) is None
    assert overtakings.class_in_turn({100, 0}, lambda _: True) is None
