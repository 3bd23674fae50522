"""The route table and the choice of a replica."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from gateway.errors import ModelNotFound, NotReady
from gateway.serve.routes import Call, ModelRoute, Replica, Routes, RouteTable

pytestmark = pytest.mark.unit

A, B, C = (Replica(f"http://127.0.0.1:{port}", id_, "m") for port, id_ in ((9001, "a"), (9002, "b"), (9003, "c")))


def route(*replicas: Replica, name: str = "m", state: str = "ready", detail: str = "") -> ModelRoute:
    return ModelRoute(name, state, detail, 1700000000, replicas, "generate")


def test_pick_takes_the_replica_with_the_least_in_flight() -> None:
    routes = Routes()
    for replica, count in ((A, 2), (B, 1), (C, 3)):
        for _ in range(count):
            routes.begin(replica)
    assert routes.pick(route(A, B, C)) is B
    routes.begin(B)
    routes.end(A)
    assert routes.pick(route(A, B, C)) is A


def test_pick_goes_round_among_equals() -> None:
    routes = Routes()
    assert [routes.pick(route(A, B, C)).id for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_two_models_asked_in_turn_both_use_all_their_replicas() -> None:
    routes = Routes()
    first, second = route(A, B), route(C, Replica("http://127.0.0.1:9004", "d", "n"), name="n")
    picked = Counter(routes.pick(first if turn % 2 else second).id for turn in range(40))
    assert picked == {"a": 10, "b": 10, "c": 10, "d": 10}


def test_requests_held_open_spread_evenly() -> None:
    routes = Routes()
    for _ in range(30):
        routes.begin(routes.pick(route(A, B, C)))
    assert [routes.in_flight(replica.id) for replica in (A, B, C)] == [10, 10, 10]
    assert routes.total_in_flight == 30


def test_in_flight_of_a_replica_outlives_its_table_and_then_leaves_nothing() -> None:
    routes = Routes(RouteTable({"m": route(A)}))
    routes.begin(routes.pick(routes.table.find("m")))
    routes.table = RouteTable({})
    assert routes.in_flight("a") == 1
    routes.end(A)
    assert (routes.in_flight("a"), routes.total_in_flight) == (0, 0)
    assert routes._in_flight == {}


def test_swapping_tables_forgets_replicas_that_left() -> None:
    routes = Routes()
    for generation in range(50):
        table = RouteTable({"m": route(Replica("http://127.0.0.1:9001", f"r{generation}", "m"))})
        routes.table = table
        routes.pick(table.find("m"))
    assert list(routes._last_pick) == ["r49"]


def test_an_end_without_begin_is_an_error_and_not_a_negative_count() -> None:
    routes = Routes()
    with pytest.raises(KeyError):
        routes.end(A)
    assert routes.total_in_flight == 0


def test_a_model_without_replicas_is_not_ready_and_says_its_state() -> None:
    waiting = dataclasses.replace(route(state="starting", detail="loading weights."), retry_after_s=7)
    with pytest.raises(NotReady) as caught:
        Routes().pick(waiting)
    assert caught.value.message == "The model 'm' cannot answer now, it is starting: loading weights."
    assert caught.value.retry_after_s == 7
    assert caught.value.param == "model"


def test_an_unknown_model_is_named_and_a_huge_name_is_cut() -> None:
    table = RouteTable({"m": route(A)})
    with pytest.raises(ModelNotFound, match=r"'nope' does not exist.*GET /v1/models"):
        table.find("nope")
    with pytest.raises(ModelNotFound) as caught:
        table.find("x" * 1_000_000)
    assert len(str(caught.value)) < 400


def test_only_models_with_replicas_are_routed() -> None:
    table = RouteTable({"m": route(A), "n": route(name="n", state="starting")})
    assert [model.name for model in table.routed()] == ["m"]


def test_the_table_cannot_be_changed_through_what_it_was_made_from() -> None:
    models = {"m": route(A)}
    table = RouteTable(models)
    models.clear()
    assert table.find("m").name == "m"
    with pytest.raises(TypeError):
        table.models["n"] = route(B)  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.models = {}  # type: ignore[misc]
