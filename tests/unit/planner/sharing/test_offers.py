"""Of the offers of other models, the fewest are taken that fill a plan's need."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given as draw
from hypothesis import strategies as st

from gateway.domain import Decision, IntChoice, Offer
from gateway.planner.sharing.offers import bytes_given, decide_with_offers, gift_bytes
from tests.support.makers import GIB, plan

WANTED = 32768
BASE = plan("3090")


def offer(model: str, means: str, gibs: int, gpu: str = "GPU-0") -> Offer:
    return Offer.model_validate(
        {
            "model": model,
            "kind": means,
            "bytes_by_gpu": {gpu: gibs * GIB},
            "words": f"{model} {means}",
        }
    )


def planner_for_need(gibs: int, partial_gibs: int = 0) -> Callable[[dict[str, int]], Decision]:
    """A plan with the wanted context where so many GiB are given on GPU-0, with 8,192 tokens where
    `partial_gibs` are, else none."""

    def decide(free: dict[str, int]) -> Decision:
        given_gibs = free.get("GPU-0", 0) // GIB
        context = WANTED if given_gibs >= gibs else 8192 if given_gibs >= partial_gibs else 0
        plan_of_context = BASE.evolve(
            gpus=("GPU-0",), max_model_len=IntChoice(value=context, reason="", source="")
        )
        return Decision(model="m", hardware="h", plans=(plan_of_context,) if context else ())

    return decide


def takes(offers: list[Offer], decide: Callable[[dict[str, int]], Decision]) -> list[str]:
    return [take.words for take in decide_with_offers(offers, decide, WANTED).taken_offers]


def test_a_plan_that_fits_takes_nothing() -> None:
    assert takes([offer("a", "surplus", 9)], planner_for_need(0)) == []


def test_surplus_comes_before_sleep_and_stop_and_needless_offers_are_dropped() -> None:
    offers = [
        offer("a", "surplus", 2),
        offer("b", "surplus", 4),
        offer("a", "sleep", 8),
        offer("b", "stop", 9),
    ]
    assert takes(offers, planner_for_need(3, 3)) == ["b surplus"]
    assert takes(offers, planner_for_need(6, 6)) == ["a surplus", "b surplus"]
    assert takes(offers, planner_for_need(7, 7)) == ["a sleep"]
    assert takes(offers, planner_for_need(17, 17)) == ["a sleep", "b stop"]
    assert takes(offers, planner_for_need(18, 18)) == []


def test_one_leaving_copy_costs_less_than_a_leaving_and_a_shrinking_one() -> None:
    offers = [
        offer("a", "surplus", 2),
        offer("b", "sleep", 6),
        offer("a", "sleep", 8),
    ]
    assert takes(offers, planner_for_need(8, 8)) == ["a sleep"]
    assert takes(offers, planner_for_need(6, 6)) == ["b sleep"]
    assert takes(offers, planner_for_need(14, 14)) == ["b sleep", "a sleep"]
    # The surplus of `a` and the memory of `b` suffice, and all that `a` has does not.
    offers[2] = offer("a", "sleep", 7)
    assert takes(offers, planner_for_need(8, 8)) == ["a surplus", "b sleep"]


def test_nobody_is_stopped_for_a_longer_context() -> None:
    offers = [offer("a", "surplus", 2), offer("a", "stop", 8)]
    assert takes(offers, planner_for_need(5)) == []
    assert takes(offers, planner_for_need(2)) == ["a surplus"]


def test_the_largest_offer_of_a_model_counts_on_its_gpus() -> None:
    offers = [
        offer("a", "surplus", 1),
        offer("c", "surplus", 20, "GPU-1"),
        offer("a", "surplus", 5),
        offer("b", "surplus", 1),
    ]
    assert bytes_given(offers) == {"GPU-0": 6 * GIB, "GPU-1": 20 * GIB}
    assert [
        take.bytes_by_gpu["GPU-0"] // GIB
        for take in decide_with_offers(offers, planner_for_need(5, 5), WANTED).taken_offers
    ] == [5]


OFFERS = st.lists(
    st.builds(
        offer,
        st.sampled_from("abcd"),
        st.sampled_from(["surplus", "sleep", "stop"]),
        st.integers(1, 9),
    ),
    max_size=6,
)


@draw(OFFERS, st.integers(0, 20))
def test_the_memory_taken_is_enough_and_would_not_be_without_any_part(
    offers: list[Offer], need: int
) -> None:
    decide = planner_for_need(need, need)
    decision = decide_with_offers(offers, decide, WANTED)
    whole = bytes_given(offers).get("GPU-0", 0) >= need * GIB
    assert bool(decision.plans) == whole
    for take in decision.taken_offers:
        assert not decide(
            bytes_given(offer for offer in decision.taken_offers if offer is not take)
        ).plans


def test_given_memory_stays_for_its_model_and_an_evicted_model_gives_to_all_waiting() -> None:
    offers = [
        offer("a", "surplus", 3).evolve(free_bytes_without_offer=2 * GIB),
        offer("b", "surplus", 1),
        offer("c", "sleep", 9),
    ]
    assert gift_bytes(offers) == {"GPU-0": 6 * GIB}
    assert gift_bytes(offers[2:]) == {}
