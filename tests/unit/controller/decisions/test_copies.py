"""Copies follow the load, within bounds, without flapping or bytes that are promised twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.controller.decisions.copies import (
    CopyChange,
    CopyDecision,
    CopyLoad,
    CopyRules,
    CopySize,
    Room,
    ScaledModel,
    decide_copies,
    has_place,
    has_spare_copy,
)
from gateway.domain.plan import RAM

RULES = CopyRules(wait_s=10, idle_s=300, pause_s=60)
GIB = 1 << 30
NOW = 10_000.0
FULL = CopyLoad("serves", requests=4, capacity=4, held_bytes={"a": 40 * GIB})
IDLE = CopyLoad("serves", requests=0, capacity=4, held_bytes={"b": 40 * GIB})
SIZE = CopySize(20 * GIB, devices=1)
QUEUED = ScaledModel("m", 1, 4, (FULL,), SIZE, waited_s=12.0, queue_length=7)
SPARE = ScaledModel("n", 1, 3, (IDLE, IDLE), SIZE, calm_since=NOW - 100)
FREE = Room({"a": 30 * GIB, "b": 0})
NONE = Room({"a": 5 * GIB, "b": 5 * GIB})


def decide(*models: ScaledModel, room: Room = FREE, now: float = NOW) -> CopyDecision:
    return decide_copies(models, room, now, RULES)


def change_of(model: ScaledModel, room: Room = FREE) -> CopyChange | None:
    return decide(model, room=room).changes.get(model.name)


def test_a_copy_is_added_once_the_queue_has_waited_for_long() -> None:
    change = change_of(QUEUED)
    assert change is not None
    assert (change.count, change.former_count, change.cause) == (2, 1, "queue")
    assert (change.waited_s, change.queue_length) == (12.0, 7)
    assert change.reason == ("its oldest request has waited for 12s, with 7 requests in the queue")


STEADY = {
    "a short queue": replace(QUEUED, waited_s=9.9),
    "no queue": replace(QUEUED, waited_s=None),
    "the most copies": replace(QUEUED, most_count=1),
    "a recent change": replace(QUEUED, changed_at=NOW - 59),
    "a recent failure": replace(QUEUED, barred_until=NOW + 1),
    "a copy that leaves": replace(QUEUED, is_leaving=True),
    "a copy that comes": replace(QUEUED, copies=(FULL, CopyLoad("comes", capacity=0))),
    "no copy at all": replace(QUEUED, copies=()),
    "copies that are not busy": replace(QUEUED, copies=(replace(FULL, requests=1),)),
    "a calm of less than the bound": replace(SPARE, copies=(IDLE, IDLE), calm_since=NOW - 299),
    "a calm that began before the last change": replace(
        SPARE, calm_since=NOW - 9000, changed_at=NOW - 299
    ),
    "the least copies": replace(SPARE, least_count=2, calm_since=NOW - 9000),
    "a residence": replace(
        SPARE, copies=(IDLE, replace(IDLE, is_settled=False)), calm_since=NOW - 9000
    ),
}


@pytest.mark.parametrize("model", STEADY.values(), ids=STEADY)
def test_copies_stay_where_no_rule_changes_them(model: ScaledModel) -> None:
    assert change_of(model) is None


def test_a_copy_is_taken_back_after_a_long_calm() -> None:
    change = change_of(replace(SPARE, calm_since=NOW - 300))
    assert change is not None
    assert (change.count, change.cause) == (1, "calm")


@pytest.mark.parametrize(("has_failed", "cause"), [(True, "failure"), (False, "eviction")])
def test_a_copy_that_is_out_is_given_up(has_failed: bool, cause: str) -> None:
    out = CopyLoad("out", reason="no room", has_failed=has_failed, capacity=0)
    change = change_of(replace(QUEUED, copies=(FULL, out)))
    assert change is not None
    assert (change.count, change.cause, change.reason) == (1, cause, "no room")


def test_an_idle_copy_of_another_model_makes_room() -> None:
    decision = decide(QUEUED, SPARE, room=NONE)
    assert decision.changes["n"].cause == "room"
    assert decision.changes["n"].count == 1
    assert decision.hold_reasons == {"m": "it waits for the memory of n"}


KEPT = {
    "at its least number": replace(SPARE, least_count=2),
    "busy": replace(SPARE, copies=(IDLE, replace(IDLE, requests=1))),
    "of a pinned model": replace(SPARE, is_pinned=True),
    "of a model with a queue": replace(SPARE, waited_s=1.0),
    "within its residence": replace(SPARE, copies=(IDLE, replace(IDLE, is_settled=False))),
    "of a model without calm": replace(SPARE, calm_since=NOW - 5),
    "too small": replace(SPARE, copies=(IDLE, replace(IDLE, held_bytes={"b": GIB}))),
}


@pytest.mark.parametrize("neighbour", KEPT.values(), ids=KEPT)
def test_a_copy_that_is_needed_makes_no_room(neighbour: ScaledModel) -> None:
    decision = decide(QUEUED, neighbour, room=NONE)
    assert decision.changes == {}
    assert decision.hold_reasons["m"].startswith("no room: one more copy needs 20.00 GiB on 1 GPU")


def test_two_copies_leave_for_one_that_spans_two_gpus() -> None:
    pair = replace(QUEUED, size=CopySize(20 * GIB, devices=2))
    second_giver = replace(
        SPARE, name="o", copies=(IDLE, replace(IDLE, held_bytes={"a": 40 * GIB}))
    )
    assert decide(pair, SPARE, second_giver, room=NONE).changes.keys() == {"n", "o"}
    assert decide(pair, SPARE, room=NONE).changes == {}


def test_memory_that_is_on_its_way_makes_no_further_copy_leave() -> None:
    leaving = replace(SPARE, is_leaving=True, leaving_bytes={"b": 40 * GIB})
    third = replace(SPARE, name="o")
    decision = decide(QUEUED, leaving, third, room=NONE)
    assert decision.changes == {}
    assert decision.hold_reasons["m"] == "it waits for the memory of a copy that leaves"


def test_a_model_without_any_copy_comes_first() -> None:
    decision = decide(QUEUED, room=replace(FREE, waiting_model="x"))
    assert decision.changes == {}
    assert decision.hold_reasons == {"m": "x has no copy, and comes first"}


def test_a_copy_in_ram_takes_no_gpu() -> None:
    on_cpu = replace(QUEUED, size=CopySize(20 * GIB))
    assert change_of(on_cpu, Room({RAM: 25 * GIB})) is not None
    assert change_of(on_cpu, Room({RAM: 15 * GIB, "a": 80 * GIB})) is None
    assert change_of(QUEUED, Room({RAM: 90 * GIB, "a": 0})) is None


def test_named_gpus_are_the_only_room() -> None:
    on_b = replace(QUEUED, size=replace(SIZE, allowed_gpus=frozenset("b")))
    assert change_of(on_b) is None
    assert change_of(on_b, Room({"a": 0, "b": 30 * GIB})) is not None


def test_a_copy_that_is_not_planned_yet_keeps_its_bytes() -> None:
    comes = replace(QUEUED, name="o", copies=(FULL, CopyLoad("comes", capacity=0)))
    assert decide(QUEUED, comes).changes == {}
    planned = CopyLoad("comes", capacity=0, held_bytes={"a": 20 * GIB})
    assert decide(QUEUED, replace(comes, copies=(FULL, planned))).changes.keys() == {"m"}


def test_unknown_room_is_the_planners_question() -> None:
    assert change_of(QUEUED, Room()) is not None


_copies = st.builds(
    CopyLoad,
    st.sampled_from(["serves", "serves", "serves", "comes", "leaves", "out"]),
    st.integers(0, 8),
    st.integers(1, 8),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 40), max_size=2),
    st.booleans(),
)
_times = st.none() | st.floats(0, 1000)


@st.composite
def _model(draw: st.DrawFn, name: str) -> ScaledModel:
    least = draw(st.integers(1, 3))
    most = draw(st.integers(least, 5))
    return ScaledModel(
        name,
        least,
        most,
        tuple(draw(st.lists(_copies, max_size=most))),
        CopySize(draw(st.integers(1, 40)), draw(st.integers(1, 2))),
        is_leaving=draw(st.booleans()),
        waited_s=draw(_times),
        calm_since=draw(_times),
        changed_at=draw(_times),
        barred_until=draw(st.floats(0, 1000)),
        is_pinned=draw(st.booleans()),
    )


_fleets = st.tuples(*(_model(name) for name in "mnop"))
_free = st.dictionaries(st.sampled_from("abc"), st.integers(0, 90), min_size=3)


@given(_fleets, _free, st.floats(0, 2000))
def test_no_decision_leaves_the_bounds_or_changes_a_model_under_way(
    models: tuple[ScaledModel, ...], free_bytes: dict[str, int], now: float
) -> None:
    decision = decide_copies(models, Room(free_bytes), now, RULES)
    for model in models:
        change = decision.changes.get(model.name)
        if change is None:
            continue
        assert model.least_count <= change.count <= model.most_count
        assert abs(change.count - len(model.copies)) == 1
        assert not model.is_leaving
        if change.cause in ("queue", "room"):
            assert all(copy.state in ("serves", "out") for copy in model.copies)
            assert model.changed_at is None or now - model.changed_at >= RULES.pause_s
        if change.cause == "room":
            assert model.copies[-1].requests == 0


@given(_fleets, _free, st.floats(0, 2000))
def test_added_copies_fit_into_free_bytes_together(
    models: tuple[ScaledModel, ...], free_bytes: dict[str, int], now: float
) -> None:
    decision = decide_copies(models, Room(free_bytes), now, RULES)
    added = [
        model.size
        for model in models
        if model.name in decision.changes and decision.changes[model.name].cause == "queue"
    ]
    assert sum(size.bytes * size.devices for size in added) <= sum(free_bytes.values())
    assert all(has_place(size, free_bytes) for size in added)


@given(
    st.integers(1, 3),
    st.integers(3, 6),
    st.integers(1, 8),
    st.integers(0, 60),
    st.integers(0, 8),
)
def test_a_steady_load_reaches_a_number_of_copies_and_keeps_it(
    least: int, most: int, capacity: int, load: int, start_count: int
) -> None:
    """Of a steady number of requests, those beyond the capacity wait for ever."""
    count = min(most, max(least, start_count))
    calm_since: float | None = None
    waiting_since: float | None = None
    changed_at: float | None = None
    counts = [count]
    for now in range(0, 20_000, 5):
        shares = [load // count + (number < load % count) for number in range(count)]
        copies = tuple(CopyLoad("serves", min(capacity, share), capacity) for share in shares)
        queued = max(0, load - count * capacity)
        waiting_since = (now if waiting_since is None else waiting_since) if queued else None
        is_calm = not queued and has_spare_copy(copies)
        calm_since = (now if calm_since is None else calm_since) if is_calm else None
        model = ScaledModel(
            "m",
            least,
            most,
            copies,
            waited_s=now - waiting_since if waiting_since is not None else None,
            queue_length=queued,
            calm_since=calm_since,
            changed_at=changed_at,
        )
        change = decide_copies([model], Room(), now, RULES).changes.get("m")
        if change is not None:
            count, changed_at = change.count, now
            counts.append(count)
    assert counts in (sorted(counts), sorted(counts, reverse=True))
    assert load <= count * capacity or count == most
