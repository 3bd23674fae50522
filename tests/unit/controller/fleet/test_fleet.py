"""The owners of all memory of the GPUs."""

from __future__ import annotations

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import Cap, Offer
from gateway.domain.plan import RAM
from gateway.planner.sharing.surplus import partial_offer, surplus_offers
from tests.support.makers import GIB, attempt, plan, wish


def plan_giver(fleet: Fleet, offer: Offer, *asking: str) -> None:
    """The giver is planned with the memory that it keeps, for these models."""
    giver = fleet.models[offer.model].replicas[offer.replica]
    giver.attempt = attempt(plan=plan().evolve(cap=Cap(bytes=offer.keeps, models=asking)))
    giver.cache_receivers = frozenset(asking)


def admit(fleet: Fleet, *names: str) -> list[ReplicaState]:
    return [fleet.add_model(ManagedModel(wish(name=name), 0.0)).replicas[0] for name in names]


def test_a_gift_is_promised_to_its_receiver_until_the_next_plan() -> None:
    fleet = Fleet()
    receiver, other_model = admit(fleet, "receiver", "other")
    admit(fleet, "giver")
    offer = Offer(
        model="giver",
        kind="surplus",
        bytes_by_gpu={"GPU-x": 3 * GIB},
        keeps=9 * GIB,
        words="giver gives 3 GiB",
    )
    receiver.planning.wait_for((offer,))
    assert fleet.bytes_promised_to_others(other_model) == {}, "it is not given yet"
    plan_giver(fleet, offer, "receiver")
    has = fleet.bytes_promised_to_others(receiver)
    assert fleet.bytes_promised_to_others(other_model) == {**has, "GPU-x": 3 * GIB}, (
        "it was given, though the receiver has yet to hear of it"
    )
    receiver.planning.accept_offers((offer,))
    assert (receiver.planning.blocked_reason, receiver.planning.awaited_offers) == (None, ())
    assert fleet.bytes_promised_to_others(other_model) == {**has, "GPU-x": 3 * GIB}
    receiver.attempt = attempt()
    assert "GPU-x" not in fleet.bytes_promised_to_others(other_model), (
        "its plan holds what it was given for"
    )
    receiver.attempt = None
    receiver.planning.block_planning("no plan fits")
    assert fleet.bytes_promised_to_others(other_model) == has


def test_a_gift_for_one_model_is_not_promised_to_another_that_asked_meanwhile() -> None:
    fleet = Fleet()
    receiver, late, other_model = admit(fleet, "receiver", "late", "other")
    admit(fleet, "giver")
    offer = Offer(
        model="giver",
        kind="surplus",
        bytes_by_gpu={"GPU-x": 3 * GIB},
        keeps=9 * GIB,
        words="giver gives 3 GiB",
    )
    for replica in (receiver, late):
        replica.planning.wait_for((offer,))
    plan_giver(fleet, offer, "receiver")
    assert [fleet.has_given(offer, name) for name in ("receiver", "late")] == [True, False]
    assert (
        fleet.bytes_promised_to_others(other_model)["GPU-x"]
        == fleet.bytes_promised_to_others(late)["GPU-x"]
        == 3 * GIB
    )
    assert "GPU-x" not in fleet.bytes_promised_to_others(receiver)
    # Its next request is not given yet.
    assert not fleet.has_given(offer.evolve(keeps=5 * GIB), "receiver")
    giver = fleet.models["giver"].replicas[0]
    giver.attempt = None
    assert not fleet.has_given(offer, "receiver"), "its engine is gone, and with it what it gave"


def test_a_gift_goes_to_as_many_waiting_models_as_it_suffices_for() -> None:
    fleet = Fleet()
    first, second = admit(fleet, "first", "second")
    short = wish(name="giver", min_context=512, concurrency=1)
    giver = fleet.add_model(ManagedModel(short, 0.0)).replicas[0]
    giver.attempt = attempt()
    (whole,) = surplus_offers(plan(), short)
    size = max(whole.bytes_by_gpu.values())

    def offered_places(share: int, contexts: int = 0) -> tuple[int, set[str]]:
        offer = partial_offer(whole, share).evolve(free_bytes_without_offer=contexts)
        for model in (first, second):
            model.planning.wait_for((offer,))
        offer, names = fleet.combined_offer(fleet.models["giver"], offer, "second")
        return max(offer.bytes_by_gpu.values()), names

    assert offered_places(size) == (size, {"second"}), "the other would have nothing of it"
    assert offered_places(size // 2) == (size // 2 * 2, {"first", "second"})
    assert offered_places(size // 3, size // 3) == (size // 3 * 3, {"first", "second"})
    assert offered_places(size // 2, size // 2) == (size // 2, {"second"}), (
        "free memory exists once"
    )


def test_live_bytes_leave_out_bytes_that_no_engine_holds() -> None:
    """Such a GPU has room already: a search that frees the engines frees nothing more of it."""
    fleet = Fleet()
    server, receiver = admit(fleet, "server", "receiver")
    server.attempt = attempt()
    live_bytes = fleet.live_bytes()
    assert live_bytes == fleet.bytes_promised_to_others(None) != {}
    offer = Offer(
        model="server",
        kind="surplus",
        bytes_by_gpu={"GPU-x": 3 * GIB},
        keeps=9 * GIB,
        words="a gift",
    )
    receiver.planning.wait_for((offer,))
    receiver.planning.accept_offers((offer,))
    fleet.set_apart = frozenset({"GPU-y"})
    assert fleet.bytes_promised_to_others(None).keys() == {*live_bytes, "GPU-x", "GPU-y"}
    assert fleet.live_bytes() == live_bytes


def test_a_cache_in_ram_is_promised_to_its_engine() -> None:
    fleet = Fleet()
    server, neighbour = admit(fleet, "server", "neighbour")
    offload = plan().kv_offload_gib.evolve(value=24)
    server.attempt = attempt(plan=plan().evolve(kv_offload_gib=offload))
    assert fleet.bytes_promised_to_others(neighbour)[RAM] == 24 * GIB
    assert RAM not in fleet.bytes_promised_to_others(server)
