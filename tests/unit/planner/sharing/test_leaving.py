"""The ways in which models leave their GPUs, and the models that leave before a sleeping one wakes
up."""

from __future__ import annotations

from typing import Any

from hypothesis import given as draw
from hypothesis import strategies as st

from gateway.diagnosis.facts.sleep import expected_bytes
from gateway.domain import Attempt, Hardware, Offer, SleepState
from gateway.planner.sharing.leaving import (
    EvictionCandidate,
    bytes_occupied,
    bytes_promised_away,
    leave_offers,
    offers_to_wake,
    sleep_refusal,
)
from gateway.planner.sharing.offers import bytes_given
from tests.support.makers import GIB, attempt, machine, plan

GPU = machine("3090").gpus[0]
PLAN = plan("3090").evolve(gpus=(GPU.uuid,))


def offer(model: str, gibs: int, gpu: str = GPU.uuid) -> Offer:
    return Offer(model=model, kind="stop", bytes_by_gpu={gpu: gibs * GIB}, words=model)


def with_free(free: int) -> Hardware:
    hardware = machine("3090")
    return hardware.evolve(gpus=tuple(gpu.evolve(free_bytes=free) for gpu in hardware.gpus))


def asleep(gave: int) -> Attempt:
    return attempt(
        1, "ready", plan=PLAN, asleep=SleepState(since=1.0, freed_bytes={GPU.uuid: gave})
    )


def test_weights_go_into_ram_where_there_is_room_and_else_the_engine_stops() -> None:
    hardware = machine("3090").evolve(ram_total_bytes=64 * GIB)
    weights = PLAN.memory.weights_bytes
    assert sleep_refusal(PLAN, hardware.evolve(ram_available_bytes=weights + 4 * GIB)) == ""
    assert "of 64.00 GiB are free" in sleep_refusal(
        PLAN, hardware.evolve(ram_available_bytes=weights + 3 * GIB)
    )


def test_an_older_record_of_a_sleeping_engine_is_read() -> None:
    value = SleepState.model_validate_json('{"level": 1, "since": 1.0, "gave": {"GPU-1": 5}}')
    assert value == SleepState(since=1.0, freed_bytes={"GPU-1": 5})


def test_each_leaves_by_the_better_means_and_to_end_altogether_comes_last() -> None:
    awake = attempt(1, "ready", plan=PLAN)
    claims = {GPU.uuid: PLAN.memory.promised_bytes}
    possible_offers = [
        EvictionCandidate("a", 0, 1, claims, awake),
        EvictionCandidate("b", 0, 1, claims),
        EvictionCandidate("c", 0, 1, claims, awake),
    ]
    offers = leave_offers(possible_offers, [EvictionCandidate("s", 0, 1, {GPU.uuid: GIB})])
    ways = [(each_offer.model, each_offer.kind) for each_offer in offers]
    assert ways == [
        ("a", "sleep"),
        ("b", "stop"),
        ("c", "sleep"),
        ("s", "stop"),
        ("a", "stop"),
        ("c", "stop"),
    ]
    assert (
        0.9 * expected_bytes(PLAN)
        < offers[0].bytes_by_gpu[GPU.uuid]
        < offers[4].bytes_by_gpu[GPU.uuid]
        == PLAN.memory.promised_bytes
    )


def test_a_copy_of_a_model_leaves_by_itself_and_says_which_one_it_is() -> None:
    other_plan = PLAN.evolve(gpus=("GPU-other",))
    engines = [attempt(1, "ready", plan=PLAN), attempt(2, "ready", plan=other_plan)]
    offers = leave_offers(
        [
            EvictionCandidate("a", index, 2, {start.plan.gpus[0]: 9}, start)
            for index, start in enumerate(engines)
        ],
        [],
    )
    assert [
        (each_offer.replica, each_offer.kind, *each_offer.bytes_by_gpu) for each_offer in offers
    ] == [
        (0, "sleep", GPU.uuid),
        (1, "sleep", "GPU-other"),
        (0, "stop", GPU.uuid),
        (1, "stop", "GPU-other"),
    ]
    assert offers[1].words == "a (copy 2) sleeps, until there is room again"


def test_a_sleeping_engine_lacks_memory_that_others_were_promised_or_have() -> None:
    total = GPU.total_bytes or 0
    sleeper = asleep(4 * GIB)
    room = total - PLAN.memory.promised_bytes
    assert bytes_promised_away(sleeper, {}, with_free(total)) == {}
    assert (
        bytes_promised_away(sleeper, {GPU.uuid: room + 2 * GIB}, with_free(total))[GPU.uuid]
        >= 2 * GIB
    )
    assert bytes_occupied(sleeper, with_free(4 * GIB)) == {}
    assert 0 < bytes_occupied(sleeper, with_free(3 * GIB))[GPU.uuid] < GIB
    assert bytes_occupied(attempt(1, "ready", plan=PLAN), with_free(0)) == {}


def test_the_fewest_models_leave_for_one_that_wakes() -> None:
    offers = [offer("a", 2), offer("x", 9, "GPU-other"), offer("b", 5), offer("c", 8)]
    assert offers_to_wake({}, offers) == ()
    assert [offer.model for offer in offers_to_wake({GPU.uuid: 2 * GIB}, offers) or ()] == ["a"]
    assert [offer.model for offer in offers_to_wake({GPU.uuid: 5 * GIB}, offers) or ()] == ["b"]
    assert [offer.model for offer in offers_to_wake({GPU.uuid: 7 * GIB}, offers) or ()] == [
        "a",
        "b",
    ]
    assert offers_to_wake({GPU.uuid: 16 * GIB}, offers) is None


@draw(st.lists(st.integers(1, 20), max_size=8), st.integers(0, 60))
def test_the_offers_that_leave_are_enough_and_none_is_too_much(sizes: list[int], lack: int) -> None:
    offers = [offer(str(number), size) for number, size in enumerate(sizes)]
    smallest_offers = offers_to_wake({GPU.uuid: lack * GIB}, offers)

    def give(offers: Any) -> int:
        return bytes_given(offers).get(GPU.uuid, 0)

    if smallest_offers is None:
        assert sum(sizes) < lack
        return
    assert give(smallest_offers) >= lack * GIB
    assert all(
        give([offer for offer in smallest_offers if offer is not omission]) < lack * GIB
        for omission in smallest_offers
    )
