"""Models that are loaded, stay or give way: the table of gateway/controller/decisions/eviction.py,
and laws that hold for all models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.controller.decisions.eviction import (
    MAX_S,
    MIN_S,
    Copy,
    Eviction,
    EvictionDecision,
    LoadedModel,
    State,
    decide_evictions,
    eviction_order,
    is_loadable,
    load_order,
)

NOW = 10_000.0


def resident(
    name: str, *states: State, since: float = NOW - 1000, load_s: float = 0.0, **fields: Any
) -> LoadedModel:
    return LoadedModel(
        name,
        tuple(Copy(index, state, since, load_s) for index, state in enumerate(states)),
        **fields,
    )


def unloaded_model(name: str, **fields: Any) -> LoadedModel:
    return resident(name, "out", **fields)


def serves(name: str, copies: int = 1, **fields: Any) -> LoadedModel:
    states: list[State] = ["serves"] * copies
    return resident(name, *states, **{"used_at": NOW - 10, **fields})


def moves(*models: LoadedModel) -> EvictionDecision:
    return decide_evictions(models, NOW)


def test_a_model_without_limits_stays_and_an_unloaded_one_loads() -> None:
    assert moves(serves("a"), unloaded_model("b")) == EvictionDecision()


def test_a_model_idle_for_longer_than_its_keep_alive_leaves() -> None:
    assert moves(serves("a", keep_alive_s=11)) == EvictionDecision()
    assert moves(serves("a", keep_alive_s=10)).evictions == {
        ("a", 0): Eviction("idle", "no request for 10s")
    }
    fields: list[dict[str, Any]] = [
        {"requests": 1},
        {"waited_s": 0.1},
        {"is_pinned": True},
        {"since": NOW - 9},
    ]
    for field in fields:
        assert moves(serves("a", **{"keep_alive_s": 10, **field})) == EvictionDecision()
    assert moves(serves("a", keep_alive_s=0)).evictions


def test_a_stopped_model_leaves_and_rests_though_it_is_asked() -> None:
    assert moves(serves("a", is_stopped=True, is_pinned=True)).evictions["a", 0].cause == "owner"
    assert moves(resident("a", "loads", is_stopped=True)).evictions["a", 0].cause == "owner"
    assert moves(unloaded_model("a", is_stopped=True, waited_s=5)) == EvictionDecision(
        hold_reasons={"a": "its owner stopped it"}
    )


def test_an_unloaded_model_leaves_and_loads_at_its_next_request() -> None:
    assert moves(serves("a", is_unloaded=True, requests=1)).evictions == {
        ("a", 0): Eviction("owner", "its owner unloads it", stops_engine=True)
    }
    assert moves(resident("a", "asleep", is_unloaded=True)).evictions["a", 0].stops_engine
    assert moves(unloaded_model("a", is_unloaded=True)).hold_reasons == {
        "a": "the next request loads it"
    }
    assert (
        moves(unloaded_model("a"))
        == moves(unloaded_model("a", is_unloaded=True, waited_s=1))
        == EvictionDecision()
    )


def test_a_model_without_a_request_loads_only_if_it_is_to_be_kept() -> None:
    assert not moves(unloaded_model("a", keep_alive_s=60, used_at=NOW - 59)).hold_reasons
    assert moves(unloaded_model("a", keep_alive_s=60, used_at=NOW - 60)).hold_reasons
    assert moves(
        unloaded_model("a", keep_alive_s=60, used_at=NOW - 1, was_evicted=True)
    ).hold_reasons
    assert not moves(unloaded_model("a", keep_alive_s=-1, was_evicted=True)).hold_reasons
    assert not moves(unloaded_model("a", keep_alive_s=0, was_never_loaded=True)).hold_reasons


def test_the_models_that_a_requested_one_without_room_needs_to_go_leave() -> None:
    asking = unloaded_model(
        "x", waited_s=1, has_plan=False, must_evict=(("a", 0), ("b", 0)), is_promised_memory=True
    )
    a, b, c = (serves(name) for name in "abc")
    assert moves(asking, a, b, c).evictions == dict.fromkeys(
        [("a", 0), ("b", 0)], Eviction("room", "it makes room for x")
    )
    assert moves(asking, a, b, c).hold_reasons == {"x": "it waits for a, b to be unloaded"}
    # No model leaves where there is room, or where others give enough without leaving.
    assert moves(unloaded_model("x", waited_s=1), a, b) == EvictionDecision()
    assert (
        moves(unloaded_model("x", waited_s=1, has_plan=False, is_promised_memory=True), a, b)
        == EvictionDecision()
    )


def test_an_evicted_model_has_had_its_residence() -> None:
    asking = unloaded_model(
        "x", waited_s=1, has_plan=False, must_evict=(("a", 0),), is_promised_memory=True
    )
    assert moves(asking, serves("a", requests=3)).evictions
    assert not moves(asking, serves("a", since=NOW - MIN_S + 0.1)).evictions
    assert moves(asking, serves("a", since=NOW - MIN_S + 0.1)).hold_reasons
    # A model that took long to load stays as long.
    assert not moves(asking, serves("a", since=NOW - 19, load_s=20)).evictions
    assert moves(asking, serves("a", since=NOW - 20, load_s=20)).evictions
    assert moves(asking, serves("a", since=NOW - MAX_S, load_s=900)).evictions


def test_the_model_that_loads_next_is_named() -> None:
    first, second = unloaded_model("b", waited_s=9), unloaded_model("a", waited_s=3)
    assert moves(second, first).next_to_load == "b"
    waits = unloaded_model(
        "b", waited_s=9, has_plan=False, must_evict=(("s", 0),), is_promised_memory=True
    )
    young = serves("s", since=NOW - 1, load_s=50, requests=1)
    assert moves(second, waits, young).next_to_load == "b", "it is prepared while the other stays"
    assert moves(unloaded_model("a")).next_to_load == ""


def test_the_cheaper_of_equal_models_leaves() -> None:
    wakes = serves("wakes", used_at=NOW - 20, load_s=0.5, since=NOW - 900)
    starts = serves("starts", used_at=NOW - 60, load_s=60, since=NOW - 900)
    assert eviction_order([starts, wakes], NOW) == [("wakes", 0), ("starts", 0)]
    # A model that nobody has used for long goes first, whatever it costs.
    idle = replace(starts, used_at=NOW - 6000)
    assert eviction_order([wakes, idle], NOW) == [("starts", 0), ("wakes", 0)]
    equal_models = [
        serves(name, used_at=NOW - age, load_s=30) for name, age in (("a", 5), ("b", 90))
    ]
    assert eviction_order(equal_models, NOW) == [("b", 0), ("a", 0)]


def test_a_model_loaded_for_no_request_leaves_for_one_at_once() -> None:
    needs = (("a", 0), ("b", 0))
    asking = unloaded_model(
        "x", waited_s=1, has_plan=False, must_evict=needs, is_promised_memory=True
    )
    young: dict[str, Any] = {"since": NOW - 1, "load_s": 90}
    a = serves("a", is_without_requests=True, **young)
    b = serves("b", is_without_requests=True, **young)
    assert set(moves(asking, a, b).evictions) == {*needs}
    # Half of the room is of no use to the waiting model.
    assert not moves(asking, a, serves("b", **young)).evictions
    assert not moves(unloaded_model("x", has_plan=False, must_evict=needs), a, b).evictions
    assert not moves(
        asking, a, serves("b", is_without_requests=True, is_pinned=True, **young)
    ).evictions.get(("b", 0))
    model_in_use = serves("used", used_at=NOW - 99, **young)
    assert eviction_order(
        [model_in_use, serves("a", is_without_requests=True, used_at=NOW - 1, **young)], NOW
    ) == [
        ("a", 0),
        ("used", 0),
    ]


def test_models_leave_in_order_of_priority_and_use() -> None:
    models = [
        serves("busy", requests=1, priority=-5),
        serves("young", since=NOW - 1),
        serves("new", used_at=NOW - 1),
        serves("old", used_at=NOW - 99),
        serves("cheap", priority=-1),
        serves("kept", is_pinned=True),
        unloaded_model("out"),
    ]
    assert [name for name, _ in eviction_order(models, NOW)] == [
        "cheap",
        "old",
        "new",
        "young",
        "busy",
    ]


def test_no_model_leaves_while_another_one_leaves() -> None:
    decision = moves(
        unloaded_model("x", waited_s=1, has_plan=False, must_evict=(("a", 0),)),
        serves("a"),
        resident("b", "leaves"),
    )
    assert decision == EvictionDecision(
        hold_reasons={"x": "it waits until another model is unloaded"}
    )


def test_the_turn_is_of_the_longest_wait_and_an_evicted_model_comes_last() -> None:
    first, second = unloaded_model("b", waited_s=9), unloaded_model("a", waited_s=3)
    assert moves(second, first).hold_reasons == {"a": "it waits for its turn after b"}
    # Its oldest request has waited for longer, but it has just served.
    assert moves(second, unloaded_model("b", waited_s=9, since=NOW - 1)).hold_reasons == {
        "b": "it waits for its turn after a"
    }
    # A model that could not be started anyway has no turn.
    assert moves(second, unloaded_model("b", waited_s=9, can_start=False)) == EvictionDecision()


def test_a_model_without_requests_waits_for_the_requested_ones() -> None:
    assert moves(unloaded_model("a", waited_s=1), unloaded_model("b")).hold_reasons == {
        "b": "other models load first"
    }


def test_a_pinned_model_asks_for_itself_and_gives_nothing() -> None:
    assert (
        moves(
            unloaded_model("p", is_pinned=True, has_plan=False, must_evict=(("a", 0),)), serves("a")
        )
        .evictions["a", 0]
        .reason
        == "it makes room for p"
    )
    assert not moves(
        unloaded_model("x", waited_s=1, has_plan=False, must_evict=(("p", 0),)),
        serves("p", is_pinned=True),
    ).evictions


def test_a_request_brings_back_only_loadable_models() -> None:
    idle_model = unloaded_model("x", has_plan=False)
    requested_model = unloaded_model("x", has_plan=False, waited_s=1)
    assert is_loadable(unloaded_model("x"), ())
    # It was planned with all that others could give, and found nothing.
    assert not is_loadable(idle_model, ())
    assert not is_loadable(requested_model, {requested_model.name})
    # They could, and not all of them now.
    could = unloaded_model("x", has_plan=False, waited_s=1, waits_for_request=True)
    assert is_loadable(could, ())
    assert is_loadable(requested_model, {"a"})
    assert not is_loadable(unloaded_model("x", is_stopped=True), ())


def test_pinned_and_dear_models_load_first_at_a_boot() -> None:
    models = [
        unloaded_model("old"),
        unloaded_model("new", used_at=NOW),
        unloaded_model("dear", priority=1),
        unloaded_model("kept", is_pinned=True),
    ]
    assert [model.name for model in sorted(models, key=load_order)] == [
        "kept",
        "dear",
        "new",
        "old",
    ]


places = st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 2))
STATES: tuple[State, ...] = ("out", "asleep", "loads", "serves", "leaves")
copies = st.lists(
    st.builds(Copy, st.just(0), st.sampled_from(STATES), st.floats(0, NOW), st.floats(0, 1000)),
    min_size=1,
    max_size=3,
)
residents = st.lists(
    st.builds(
        LoadedModel,
        st.sampled_from("abcdefgh"),
        copies.map(
            lambda copies: tuple(replace(copy, index=index) for index, copy in enumerate(copies))
        ),
        is_stopped=st.booleans(),
        keep_alive_s=st.sampled_from((-1.0, 0.0, 60.0)),
        is_pinned=st.booleans(),
        priority=st.integers(-2, 2),
        used_at=st.floats(0, NOW),
        requests=st.integers(0, 3),
        waited_s=st.none() | st.floats(0, 1000),
        has_plan=st.booleans(),
        must_evict=st.lists(places, max_size=3, unique=True).map(tuple),
        is_promised_memory=st.booleans(),
        can_start=st.booleans(),
        was_evicted=st.booleans(),
        was_never_loaded=st.booleans(),
        is_without_requests=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda model: model.name,
)


@given(residents)
def test_evictions_and_holds_are_allowed_for_any_models(models: list[LoadedModel]) -> None:
    decision, by_name = decide_evictions(models, NOW), {model.name: model for model in models}
    for name in decision.hold_reasons:
        assert (
            by_name[name].is_stopped
            or by_name[name].lacks_copies
            or by_name[name].state in ("out", "asleep")
        )
    for (name, index), eviction in decision.evictions.items():
        model = by_name[name]
        copy = model.copies[index]
        assert copy.state in ("serves", "loads", "asleep")
        assert eviction.cause == "owner" or not model.is_pinned
        assert eviction.cause != "idle" or not model.is_requested
        if eviction.cause == "room":
            assert copy.state == "serves"
            assert model.is_without_requests or NOW - copy.entered_at >= copy.residence_s
            (other_copy,) = [
                other_copy
                for other_copy in models
                if (name, index) in other_copy.must_evict
                and f"room for {other_copy.name}" in eviction.reason
            ]
            assert other_copy.name in decision.hold_reasons
            assert other_copy.state != "serves" or not model.is_requested
    # One of those that are asked has its turn, or all of them say themselves why they cannot be
    # loaded.
    waiting_models = [
        model
        for model in models
        if model.state in ("out", "asleep")
        and model.waited_s is not None
        and model.can_start
        and not model.is_stopped
    ]
    turns = [
        model
        for model in waiting_models
        if not decision.hold_reasons.get(model.name, "").startswith("it waits for its turn")
    ]
    assert bool(turns) == bool(waiting_models) or any(model.is_pinned for model in models)


def asleep(name: str, **fields: Any) -> LoadedModel:
    return resident(name, "asleep", **fields)


def test_a_sleeping_model_rests_until_a_request_wakes_it() -> None:
    assert moves(asleep("a"), serves("b")) == EvictionDecision()
    assert moves(asleep("a", keep_alive_s=0, used_at=NOW - 9999), serves("b")) == EvictionDecision()
    # It takes its turn as any other that is out.
    assert moves(asleep("a", waited_s=1), unloaded_model("b", waited_s=2)).hold_reasons == {
        "a": "it waits for its turn after b"
    }
    asking = asleep(
        "a", waited_s=1, has_plan=False, must_evict=(("b", 0),), is_promised_memory=True
    )
    assert moves(asking, serves("b")).evictions == {
        ("b", 0): Eviction("room", "it makes room for a")
    }


def test_a_sleeping_model_ends_only_if_that_is_needed() -> None:
    waiting_model = unloaded_model(
        "x", waited_s=1, has_plan=False, must_evict=(("a", 0), ("b", 0)), is_promised_memory=True
    )
    assert moves(waiting_model, asleep("a"), serves("b")).evictions == {
        ("b", 0): Eviction("room", "it makes room for x")
    }
    first_moves = moves(
        unloaded_model(
            "x",
            waited_s=1,
            has_plan=False,
            must_evict=(("a", 0), ("b", 0)),
            must_stop=(("a", 0), ("b", 0)),
            is_promised_memory=True,
        ),
        asleep("a"),
        serves("b"),
    )
    assert first_moves.evictions == dict.fromkeys(
        [("a", 0), ("b", 0)], Eviction("room", "it makes room for x", stops_engine=True)
    )
    assert moves(asleep("a", is_stopped=True)).evictions == {
        ("a", 0): Eviction("owner", "its owner stops it", stops_engine=True)
    }
    assert eviction_order([asleep("a"), serves("b")], NOW) == [("b", 0)]


def test_only_the_needed_ones_of_several_copies_leave_and_the_others_serve() -> None:
    asking = unloaded_model(
        "x", waited_s=1, has_plan=False, must_evict=(("pair", 1),), is_promised_memory=True
    )
    assert moves(asking, serves("pair", 2, requests=9)).evictions == {
        ("pair", 1): Eviction("room", "it makes room for x")
    }
    assert set(moves(serves("pair", 2, is_stopped=True)).evictions) == {("pair", 0), ("pair", 1)}
    assert set(moves(serves("pair", 2, keep_alive_s=1)).evictions) == {("pair", 0), ("pair", 1)}
    assert not moves(asking, serves("pair", 2, is_pinned=True)).evictions


def test_each_copy_has_its_own_residence() -> None:
    pair = LoadedModel(
        "pair", (Copy(0, "serves", NOW - 1000), Copy(1, "serves", NOW - 1)), requests=1
    )
    assert not moves(
        unloaded_model("x", waited_s=1, has_plan=False, must_evict=(("pair", 1),)), pair
    ).evictions
    assert moves(
        unloaded_model("x", waited_s=1, has_plan=False, must_evict=(("pair", 0),)), pair
    ).evictions
    assert eviction_order([pair], NOW) == [("pair", 0), ("pair", 1)]


def test_the_copy_without_which_its_model_serves_leaves_before_the_only_one() -> None:
    assert eviction_order([serves("old", used_at=NOW - 99), serves("pair", 2)], NOW) == [
        ("pair", 1),
        ("old", 0),
        ("pair", 0),
    ]
    # Not before an idle model, while it is asked itself; a model of high priority comes later.
    assert eviction_order([serves("old"), serves("pair", 2, requests=1)], NOW)[0] == ("old", 0)
    assert eviction_order([serves("old"), serves("pair", 2, priority=1)], NOW)[0] == ("old", 0)


def short(name: str, state: State = "out", **fields: Any) -> LoadedModel:
    return resident(name, "serves", state, used_at=NOW - 10, **fields)


def test_a_copy_that_left_comes_back_where_nobody_waits() -> None:
    assert moves(short("pair"), serves("x")) == EvictionDecision()
    assert moves(short("pair"), unloaded_model("x", waited_s=1)).hold_reasons == {
        "pair": "other models load first"
    }
    assert moves(short("pair"), resident("x", "leaves")).hold_reasons == {
        "pair": "other models load first"
    }


def test_a_model_without_requests_leaves_for_requests_that_wait_at_another_copy() -> None:
    fields: dict[str, Any] = {
        "waited_s": 1,
        "has_plan": False,
        "must_evict": (("x", 0),),
        "is_promised_memory": True,
    }
    for state in ("out", "asleep"):
        pair = short("pair", state, **fields)
        assert moves(pair, serves("x")).evictions == {
            ("x", 0): Eviction("room", "it makes room for pair")
        }
        assert not moves(pair, serves("x", requests=1)).evictions
        assert not moves(pair, serves("x", since=NOW - 1)).evictions
        # A model that is out comes first, however long the others have waited.
        assert moves(pair, serves("x"), unloaded_model("y", waited_s=0.1)).hold_reasons == {
            "pair": "it waits for its turn after y"
        }
    assert moves(short("pair", is_pinned=True), serves("x")) == EvictionDecision()


def test_nobody_gives_memory_back_while_an_engine_measures_its_own() -> None:
    copies = [Copy(0, "serves", NOW - 90, is_watched=True)]
    asking = unloaded_model(
        "x",
        waited_s=1,
        has_plan=False,
        must_evict=(("a", 0), ("b", 0)),
        must_stop=(("b", 0),),
        is_promised_memory=True,
    )
    sleeper = LoadedModel("b", (Copy(0, "asleep", NOW - 90),))
    assert set(moves(asking, serves("a"), sleeper).evictions) == {("a", 0), ("b", 0)}
    busy = moves(asking, LoadedModel("a", tuple(copies)), sleeper)
    assert not busy.evictions
    assert busy.hold_reasons == {"x": "it waits for a, b to be unloaded"}
    assert not moves(
        asking, serves("a"), LoadedModel("b", (Copy(0, "asleep", NOW - 90, is_watched=True),))
    ).evictions
    # Nor for being idle; its owner's word is obeyed at once.
    assert not moves(LoadedModel("a", tuple(copies), keep_alive_s=10, used_at=NOW - 90)).evictions
    assert moves(LoadedModel("a", tuple(copies), is_stopped=True)).evictions
