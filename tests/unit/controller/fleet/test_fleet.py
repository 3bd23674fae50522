"""What of the GPUs is whose, of all models together."""

from __future__ import annotations

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import Cap, Offer
from gateway.planner.sharing.surplus import partial_offer, surplus_offers
from tests.support.makers import GIB, attempt, plan, wish


def giving(fleet: Fleet, take: Offer, *asking: str) -> None:
    """The giver is planned with what it keeps, for these models."""
    giver = fleet.models[take.model].replicas[take.replica]
    giver.attempt = attempt(plan=plan().evolve(cap=Cap(bytes=take.keeps, models=asking)))
    giver.gave_to = frozenset(asking)


def admit(fleet: Fleet, *names: str) -> list[ReplicaState]:
    return [fleet.admit(ManagedModel(wish(name=name), 0.0)).replicas[0] for name in names]


def test_a_gift_is_claimed_for_its_taker_until_the_next_plan() -> None:
    fleet = Fleet()
    taker, other = admit(fleet, "taker", "other")
    admit(fleet, "giver")
    take = Offer(
        model="giver",
        how="surplus",
        gives={"GPU-x": 3 * GIB},
        keeps=9 * GIB,
        words="giver gives 3 GiB",
    )
    taker.wait_for((take,))
    assert fleet.claims(other) == {}, "it is not given yet"
    giving(fleet, take, "taker")
    has = fleet.claims(taker)
    assert fleet.claims(other) == {**has, "GPU-x": 3 * GIB}, (
        "it was given, though the taker has yet to hear of it"
    )
    taker.receive((take,))
    assert (taker.blocked, taker.takes) == (None, ())
    assert fleet.claims(other) == {**has, "GPU-x": 3 * GIB}
    taker.attempt = attempt()
    assert "GPU-x" not in fleet.claims(other), "its plan holds what it was given for"
    taker.attempt = None
    taker.block("no plan fits")
    assert fleet.claims(other) == has


def test_what_was_given_for_one_is_not_claimed_for_who_asked_for_the_same_meanwhile() -> None:
    fleet = Fleet()
    taker, late, other = admit(fleet, "taker", "late", "other")
    admit(fleet, "giver")
    take = Offer(
        model="giver",
        how="surplus",
        gives={"GPU-x": 3 * GIB},
        keeps=9 * GIB,
        words="giver gives 3 GiB",
    )
    for one in (taker, late):
        one.wait_for((take,))
    giving(fleet, take, "taker")
    assert [fleet.has_given(take, name) for name in ("taker", "late")] == [True, False]
    assert fleet.claims(other)["GPU-x"] == fleet.claims(late)["GPU-x"] == 3 * GIB
    assert "GPU-x" not in fleet.claims(taker)
    # What it asks for next is not given yet.
    assert not fleet.has_given(take.evolve(keeps=5 * GIB), "taker")
    giver = fleet.models["giver"].replicas[0]
    giver.attempt = None
    assert not fleet.has_given(take, "taker"), "its engine is gone, and with it what it gave"


def test_a_gift_goes_to_as_many_waiting_models_as_it_suffices_for() -> None:
    fleet = Fleet()
    first, second = admit(fleet, "first", "second")
    short = wish(name="giver", min_context=512, concurrency=1)
    giver = fleet.admit(ManagedModel(short, 0.0)).replicas[0]
    giver.attempt = attempt()
    (whole,) = surplus_offers(plan(), short)
    size = max(whole.gives.values())

    def offered_places(share: int, beside: int = 0) -> tuple[int, set[str]]:
        take = partial_offer(whole, share).evolve(beside=beside)
        for one in (first, second):
            one.wait_for((take,))
        offer, names = fleet.combined_offer(fleet.models["giver"], take, "second")
        return max(offer.gives.values()), names

    assert offered_places(size) == (size, {"second"}), "the other would have nothing of it"
    assert offered_places(size // 2) == (size // 2 * 2, {"first", "second"})
    assert offered_places(size // 3, size // 3) == (size // 3 * 3, {"first", "second"})
    assert offered_places(size // 2, size // 2) == (size // 2, {"second"}), (
        "free memory exists once"
    )
