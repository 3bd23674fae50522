"""The route table, the choice of a replica, and the requests that wait for one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import FitserveError, ModelNotFound, NotFound, NotReady, Overloaded
from gateway.keys import SCOPES
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key
from gateway.proxy.queue_wait import QueueWait
from gateway.proxy.routing.call import Call
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.queue import DequeueRate
from gateway.proxy.routing.responses import Responses
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.routing.routes import Routes

A, B, C = (
    RoutedReplica(f"http://127.0.0.1:{port}", id_, "m")
    for port, id_ in ((9001, "a"), (9002, "b"), (9003, "c"))
)


def route(
    *replicas: RoutedReplica, name: str = "m", state: str = "ready", detail: str = ""
) -> ModelRoute:
    return ModelRoute(name, state, detail, 1700000000, replicas, "generate")


def pick(routes: Routes, route: ModelRoute, **fields: Any) -> RoutedReplica:
    """For a call that need not wait."""
    replica = routes.pick(route, Call("chat", route.name, **fields))
    assert replica is not None
    return replica


def test_pick_takes_the_replica_with_the_least_in_flight() -> None:
    routes = Routes()
    for replica, count in ((A, 2), (B, 1), (C, 3)):
        for _ in range(count):
            routes.start_request(replica)
    assert pick(routes, route(A, B, C)) is B
    routes.start_request(B)
    routes.finish_request(A)
    assert pick(routes, route(A, B, C)) is A


def test_pick_takes_the_replica_with_the_least_outstanding_tokens() -> None:
    routes = Routes()
    routes.start_request(A, 5000)
    for _ in range(3):
        routes.start_request(B, 1000)
    assert pick(routes, route(A, B), tokens=100) is B
    routes.finish_request(A, 5000)
    assert pick(routes, route(A, B), tokens=100) is A


def test_a_prompt_goes_where_it_went_before_until_that_one_has_too_much_to_do() -> None:
    routes = Routes()
    home = pick(routes, route(A, B, C), tokens=100, prefix=77)
    for replica in {A, B, C} - {home}:
        routes.start_request(replica, 1000)
    routes.start_request(home, 1200)
    assert pick(routes, route(A, B, C), tokens=100, prefix=77) is home
    routes.start_request(home, 1000)
    assert pick(routes, route(A, B, C), tokens=100, prefix=77) is not home


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000)), max_size=30),
    st.sets(st.sampled_from("abc")),
    st.none() | st.integers(0, 2**32 - 1),
    st.sampled_from(["a", "b", "c", None]),
    st.sampled_from([None, 3]),
)
def test_a_pick_is_in_the_route_has_room_and_is_not_avoided(
    load: list[tuple[str, int]],
    names: set[str],
    prefix: int | None,
    avoid: str | None,
    capacity: int | None,
) -> None:
    replicas = {name: RoutedReplica("http://127.0.0.1:9001", name, "m", capacity) for name in "abc"}
    routes = Routes()
    for name, tokens in load:
        routes.start_request(replicas[name], tokens)
    possible = {
        name for name in names - {avoid} if capacity is None or routes.in_flight(name) < capacity
    }
    among = route(*(replicas[name] for name in sorted(names)))
    call = Call("chat", "m", tokens=100, prefix=prefix)
    if not names - {avoid}:
        with pytest.raises(NotReady):
            routes.pick(among, call, avoid)
        return
    replica = routes.pick(among, call, avoid)
    assert (replica is None) == (not possible)
    assert replica is None or replica.id in possible
    for name, tokens in load:
        routes.finish_request(replicas[name], tokens)
    assert routes._loads == {}


def test_a_follow_up_goes_to_the_maker_of_its_response_while_that_lives() -> None:
    routes = Routes()
    routes.responses.record(b"resp_1", ANONYMOUS_KEY, B.seed)
    routes.start_request(B, 10_000)
    maker = routes.responses.maker_of("resp_1", ANONYMOUS_KEY)
    assert pick(routes, route(A, B, C), tokens=100, maker=maker) is B
    assert pick(routes, route(A, C), tokens=100, maker=maker) in (A, C)
    assert pick(routes, route(A, B), tokens=100) is A
    routes.table = RouteTable({"m": route(A, B)})
    assert routes.model_of("resp_1", maker) == "m"
    routes.table = RouteTable({"m": route(A)})
    with pytest.raises(NotFound):
        routes.model_of("resp_1", maker)


def test_a_response_is_known_to_the_key_that_made_it_alone() -> None:
    responses = Responses()
    first_key, another = (Key(name, name.encode() * 32, SCOPES) for name in "ab")
    responses.record(b"resp_1", first_key, B.seed)
    assert responses.maker_of("resp_1", first_key) == B.seed
    for key, response in (
        (another, "resp_1"),
        (ANONYMOUS_KEY, "resp_1"),
        (first_key, "resp_2"),
        (first_key, "\ud800"),
    ):
        with pytest.raises(NotFound, match=f"The response {response} does not exist."):
            responses.maker_of(response, key)


@pytest.mark.parametrize("replicas", [(B,), (B, C)], ids=["one", "several"])
def test_a_retry_elsewhere_has_the_priority_of_its_own_class(
    replicas: tuple[RoutedReplica, ...],
) -> None:
    """An overdue request is raised among the requests of the engine that it goes to."""
    routes = Routes()
    call = Call("chat", "m", priority=100)
    routes._raise_priority(call, A)
    assert call.engine_priority == 0
    assert routes.pick(route(*replicas), call, "a") in replicas
    assert call.engine_priority is None


def test_pick_goes_round_among_equals() -> None:
    routes = Routes()
    assert [pick(routes, route(A, B, C)).id for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_two_models_asked_in_turn_both_use_all_their_replicas() -> None:
    routes = Routes()
    first_route = route(A, B)
    second = route(C, RoutedReplica("http://127.0.0.1:9004", "d", "n"), name="n")
    counts = Counter(pick(routes, first_route if turn % 2 else second).id for turn in range(40))
    assert counts == {"a": 10, "b": 10, "c": 10, "d": 10}


def test_requests_held_open_spread_evenly() -> None:
    routes = Routes()
    for _ in range(30):
        routes.start_request(pick(routes, route(A, B, C)))
    assert [routes.in_flight(replica.id) for replica in (A, B, C)] == [10, 10, 10]
    assert routes.total_in_flight == 30


def test_the_in_flight_count_of_a_replica_outlives_its_table_and_then_leaves_nothing() -> None:
    routes = Routes(RouteTable({"m": route(A)}))
    routes.start_request(pick(routes, routes.table.find("m")))
    routes.table = RouteTable({})
    assert routes.in_flight("a") == 1
    routes.finish_request(A)
    assert (routes.in_flight("a"), routes.total_in_flight) == (0, 0)
    assert routes._loads == {}


def test_swapping_tables_forgets_replicas_that_left() -> None:
    routes = Routes()
    for generation in range(50):
        replicas = (
            RoutedReplica("http://127.0.0.1:9001", f"{side}{generation}", "m") for side in "rs"
        )
        table = RouteTable({"m": route(*replicas)})
        routes.table = table
        pick(routes, table.find("m"))
    assert list(routes._last_pick) == ["r49"]


def test_an_end_without_begin_is_an_error_and_not_a_negative_count() -> None:
    routes = Routes()
    with pytest.raises(KeyError):
        routes.finish_request(A)
    assert routes.total_in_flight == 0


def test_a_model_without_replicas_is_not_ready_and_says_its_state() -> None:
    waiting = dataclasses.replace(
        route(state="starting", detail="loading weights."), retry_after_s=7
    )
    with pytest.raises(NotReady) as error:
        pick(Routes(), waiting)
    assert (
        error.value.message == "The model 'm' cannot answer now, it is starting: loading weights."
    )
    assert error.value.retry_after_s == 7
    assert error.value.param == "model"


def test_a_client_is_not_told_to_retry_in_vain() -> None:
    lines = "no kernel takes this layer" + " and so on" * 100
    with pytest.raises(NotReady) as error:
        pick(Routes(), route(state="no_plan", detail=lines + "\nanother reason"))
    assert error.value.retry_after_s is None
    assert "Try again" not in str(error.value)
    assert len(str(error.value)) < 600
    # Another model may leave for it.
    with pytest.raises(NotReady) as error:
        raise dataclasses.replace(
            route(state="no_plan", detail="no memory"), wait_s=5.0
        ).not_ready_error()
    assert error.value.retry_after_s == 10


def test_an_unknown_model_is_named_and_a_huge_name_is_cut() -> None:
    table = RouteTable({"m": route(A)})
    with pytest.raises(ModelNotFound, match=r"'nope' does not exist.*GET /v1/models"):
        table.find("nope")
    with pytest.raises(ModelNotFound) as error:
        table.find("x" * 1_000_000)
    assert len(str(error.value)) < 400


def test_a_table_is_independent_of_its_source() -> None:
    models = {"m": route(A)}
    table = RouteTable(models)
    models.clear()
    assert table.find("m").name == "m"
    with pytest.raises(TypeError):
        table.models["n"] = route(B)  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.models = {}  # type: ignore[misc]


# --- waiting ---


class Waiting(QueueWait):
    """A waiting request, and its outcome."""

    def __init__(self, routes: Routes, caller: str = "", **fields: Any) -> None:
        self._routes = routes
        self.caller = caller
        self.call = Call("chat", "m", **fields)
        self.avoid: str | None = None
        self.replica: RoutedReplica | None = None
        self.error: FitserveError | None = None

    def go(self, replica: RoutedReplica) -> None:
        self._routes.start_request(replica)
        self.replica = replica

    def reject(self, error: FitserveError) -> None:
        self.error = error


SMALL = dataclasses.replace(A, capacity=1)
OTHER = dataclasses.replace(B, capacity=1)


def full(*replicas: RoutedReplica, queue: int | None = None, **fields: Any) -> Routes:
    """Every replica has one request."""
    among = dataclasses.replace(route(*replicas), **fields)
    routes = Routes(RouteTable({"m": among}), queue)
    for replica in replicas:
        routes.start_request(replica)
    return routes


def arrive(routes: Routes, *waiters: Waiting) -> None:
    for waiter in waiters:
        assert routes.pick(routes.table.find("m"), waiter.call) is None
        routes.wait(waiter)


def settle(change: Any) -> None:
    """Makes a change in an event loop, and lets that go round once."""

    async def run() -> None:
        change()
        await asyncio.sleep(0)

    asyncio.run(run())


def test_waiting_requests_go_in_order_of_coming() -> None:
    routes = full(SMALL)
    waiters = [Waiting(routes) for _ in range(3)]
    settle(lambda: arrive(routes, *waiters))
    for turn in range(3):
        assert routes.waiting("m") == 3 - turn
        settle(lambda: routes.finish_request(SMALL))
        assert [waiter.replica for waiter in waiters] == [SMALL] * (turn + 1) + [None] * (2 - turn)
    assert routes._queues == {}


def test_nobody_overtakes_waiting_requests() -> None:
    routes = full(SMALL)
    first = Waiting(routes)
    arrive(routes, first)

    def swap_replicas() -> None:
        routes.finish_request(SMALL)
        assert routes.pick(routes.table.find("m"), Waiting(routes).call) is None

    settle(swap_replicas)
    assert first.replica is SMALL


def test_a_request_bound_to_the_maker_of_a_response_keeps_nobody_from_another_replica() -> None:
    routes = full(SMALL, OTHER)
    bound_request, free = Waiting(routes, maker=SMALL.seed, body=b"{}"), Waiting(routes)
    settle(lambda: arrive(routes, bound_request, free))
    settle(lambda: routes.finish_request(OTHER))
    assert (bound_request.replica, free.replica) == (None, OTHER)
    settle(lambda: routes.finish_request(SMALL))
    assert bound_request.replica is SMALL


@pytest.mark.parametrize(
    "call", [Call("tokenize", "m", b"{}"), Call("responses", "m", maker=SMALL.seed)]
)
def test_a_call_that_takes_no_place_does_not_wait(call: Call) -> None:
    routes = full(SMALL)
    arrive(routes, Waiting(routes))
    assert routes.pick(routes.table.find("m"), call) is SMALL


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    routes = full(SMALL, queue=2)
    settle(lambda: arrive(routes, Waiting(routes), Waiting(routes)))
    with pytest.raises(Overloaded, match=r"'m' are busy.*Try again in 1 s") as error:
        routes.pick(routes.table.find("m"), Waiting(routes).call)
    assert (error.value.status, error.value.retry_after_s) == (429, 1)


def test_nobody_waits_without_a_queue() -> None:
    with pytest.raises(Overloaded):
        full(SMALL, queue=0).pick(route(SMALL), Call("chat", "m"))


def test_a_replica_of_unknown_capacity_is_never_full() -> None:
    routes = full(*[A] * 500)
    assert routes.pick(route(A), Waiting(routes).call) is A


def test_a_request_that_leaves_the_queue_is_forgotten() -> None:
    routes = full(SMALL)
    leaver, stays = Waiting(routes), Waiting(routes)
    settle(lambda: arrive(routes, leaver, stays))
    routes.forget(leaver)
    routes.forget(leaver)
    settle(lambda: routes.finish_request(SMALL))
    assert (leaver.replica, stays.replica) == (None, SMALL)
    routes.forget(stays)
    assert routes._queues == {}


def test_a_loaded_model_takes_its_waiting_requests() -> None:
    starting = dataclasses.replace(route(state="starting"), wait_s=60)
    routes = Routes(RouteTable({"m": starting}))
    waiters = [Waiting(routes), Waiting(routes)]
    settle(lambda: arrive(routes, *waiters))
    settle(lambda: setattr(routes, "table", RouteTable({"m": starting})))
    assert routes.waiting("m") == 2
    settle(lambda: setattr(routes, "table", RouteTable({"m": route(A)})))
    assert [waiter.replica for waiter in waiters] == [A, A]


@pytest.mark.parametrize(("table", "status"), [({}, 404), ({"m": route(state="quarantined")}, 503)])
def test_a_request_that_waits_for_a_lost_model_is_told(
    table: dict[str, ModelRoute], status: int
) -> None:
    routes = Routes(RouteTable({"m": dataclasses.replace(route(state="starting"), wait_s=60)}))
    waiter = Waiting(routes)
    settle(lambda: arrive(routes, waiter))
    settle(lambda: setattr(routes, "table", RouteTable(table)))
    assert waiter.error is not None
    assert waiter.error.status == status
    assert routes._queues == {}


def test_a_request_that_avoids_a_dead_replica_waits_for_its_follower_and_keeps_nobody_else() -> (
    None
):
    routes = Routes(RouteTable({"m": dataclasses.replace(route(A), wait_s=60)}))
    shy = Waiting(routes)
    shy.avoid = "a"
    assert routes.pick(routes.table.find("m"), shy.call, "a") is None
    settle(lambda: routes.wait(shy))
    other_waiting = Waiting(routes)
    settle(lambda: arrive(routes, other_waiting))
    assert (shy.replica, other_waiting.replica) == (None, A)
    settle(lambda: setattr(routes, "table", RouteTable({"m": route(B)})))
    assert shy.replica is B


def test_the_pace_of_finished_requests_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    pace = DequeueRate()
    assert pace.seconds(1000) == 1
    for _ in range(400):
        clock[0] += 0.1
        pace.count()
    assert pace.seconds(100) == pytest.approx(10, abs=1)
    assert pace.seconds(1) == 1
    assert pace.seconds(10**6) == 60


@given(
    st.lists(
        st.tuples(st.sampled_from(["come", "end", "leave", "swap"]), st.integers(0, 7)), max_size=60
    )
)
def test_no_request_is_lost_and_no_replica_has_more_than_it_takes(
    events: list[tuple[str, int]],
) -> None:
    pair = (dataclasses.replace(A, capacity=2), dataclasses.replace(B, capacity=1))
    routes = Routes(RouteTable({"m": dataclasses.replace(route(*pair), wait_s=60)}), 5)
    came: list[Waiting] = []
    ended_waiters: list[Waiting] = []

    async def run() -> None:
        for action, number in events:
            flying = [
                waiter
                for waiter in came
                if waiter.replica is not None and waiter not in ended_waiters
            ]
            waiting = [
                waiter for waiter in came if waiter.replica is None and waiter not in ended_waiters
            ]
            if action == "come":
                waiter = Waiting(routes)
                try:
                    replica = routes.pick(routes.table.find("m"), waiter.call)
                except (Overloaded, NotReady):
                    assert len(waiting) >= 5
                    continue
                came.append(waiter)
                routes.wait(waiter) if replica is None else waiter.go(replica)
            elif action == "end" and flying:
                waiter_of_event = flying[number % len(flying)]
                assert waiter_of_event.replica is not None
                routes.finish_request(waiter_of_event.replica)
                ended_waiters.append(waiter_of_event)
            elif action == "leave" and waiting:
                waiter_of_event = waiting[number % len(waiting)]
                routes.forget(waiter_of_event)
                ended_waiters.append(waiter_of_event)
            elif action == "swap":
                replicas = [replica for bit, replica in enumerate(pair) if number >> bit & 1]
                routes.table = RouteTable({"m": dataclasses.replace(route(*replicas), wait_s=60)})
            await asyncio.sleep(0)
            assert all(routes.in_flight(replica.id) <= (replica.capacity or 0) for replica in pair)
            waits = [
                waiter for waiter in came if waiter.replica is None and waiter not in ended_waiters
            ]
            assert routes.waiting("m") == len(waits)
            went = [waiter.replica is not None for waiter in came if waiter not in ended_waiters]
            assert went == sorted(went, reverse=True)
            if waits:
                ready = routes.table.find("m").replicas
                assert all(routes.in_flight(replica.id) == replica.capacity for replica in ready)

    asyncio.run(run())
    assert all(waiter.error is None for waiter in came)


class Waits(QueueWait):
    """A request that waits, and does nothing else."""

    avoid: str | None = None
    caller = ""

    def __init__(self) -> None:
        self.call = Call("chat", "m")

    def go(self, replica: RoutedReplica) -> None: ...

    def reject(self, error: FitserveError) -> None: ...


def test_the_first_request_that_waits_for_an_unrouted_model_is_told_once() -> None:
    words: list[str] = []

    async def wait() -> None:
        routes = Routes(RouteTable({"m": dataclasses.replace(route(state="stopped"), wait_s=9)}))
        routes.on_demand = lambda: words.extend(routes.demand())
        first, second = Waits(), Waits()
        for waiter in (first, second):
            assert routes.pick(routes.table.models["m"], waiter.call) is None
            routes.wait(waiter)
        assert words == ["m"]
        assert list(routes.demand()) == ["m"]
        routes.forget(first)
        assert list(routes.demand()) == ["m"]
        # A client that leaves is forgotten.
        routes.forget(second)
        assert not routes.demand()
        # A request that waits for a place at a serving engine asks for nothing to be loaded.
        routes.table = RouteTable({"m": route(dataclasses.replace(A, capacity=0))})
        routes.wait(first)
        assert words == ["m"]

    asyncio.run(wait())


def test_a_replica_is_drained_once_no_table_has_it_and_nothing_is_in_flight() -> None:
    routes = Routes(RouteTable({"m": route(A)}))
    assert not routes.has_drained("a")
    routes.start_request(A)
    routes.table = RouteTable({"m": route()})
    assert not routes.has_drained("a")
    routes.finish_request(A)
    assert routes.has_drained("a")


def test_an_unknown_model_is_answered_with_the_near_name_that_the_key_may_use() -> None:
    table = RouteTable({name: route(A, name=name) for name in ("qwen3-8b", "secret-8b")})
    with pytest.raises(ModelNotFound, match="does not exist") as unknown:
        table.find("qwen3-8", ANONYMOUS_KEY)
    assert unknown.value.hint.startswith("Did you mean 'qwen3-8b'? ")
    limited = dataclasses.replace(ANONYMOUS_KEY, models=frozenset({"qwen3-8b"}))
    with pytest.raises(ModelNotFound) as hidden:
        table.find("secret-8", limited)
    assert "secret-8b" not in hidden.value.hint


def test_long_names_are_never_compared() -> None:
    """The comparison takes time by the square of the length, and requests wait meanwhile."""
    names = ("a" * 64, "a" * 66)
    table = RouteTable({name: route(A, name=name) for name in names})
    for name, hint in (("a" * 65, ""), ("a" * 63, f"Did you mean '{'a' * 64}'? ")):
        with pytest.raises(ModelNotFound) as unknown:
            table.find(name, ANONYMOUS_KEY)
        assert unknown.value.hint == f"{hint}GET /v1/models lists the served models."
