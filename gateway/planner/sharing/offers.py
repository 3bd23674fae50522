"""Offers of memory by other models, and the fewest that a plan needs. Pure.

the best plan next to the others             offers that it takes
has everything that was wished for           none
has a short context or halved weights        surplus KV cache, if that helps
does not exist, even with all surplus        also sleep and stop, in the order of the offers

A plan takes no more of a surplus than it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.domain import Decision, Offer
from gateway.planner.sharing.promised_bytes import sum_promises
from gateway.planner.sharing.surplus import partial_offer
from gateway.planner.sizes import shortcomings

Decide = Callable[[dict[str, int]], Decision]
"""The decision if these bytes are freed, by GPU UUID."""

# Budgets are hundredths of a GPU, and two of them are rounded: of the free and of the given bytes.
_ROUNDED_HUNDREDTHS = 2


def bytes_given(offers: Iterable[Offer]) -> dict[str, int]:
    """Bytes that these offers free together, by GPU UUID.

    The largest of several offers of one copy includes its other offers.
    """
    largest_gifts: dict[tuple[str, int, str], int] = {}
    for offer in offers:
        for uuid, count in offer.bytes_by_gpu.items():
            key = offer.model, offer.replica, uuid
            largest_gifts[key] = max(count, largest_gifts.get(key, 0))
    return sum_promises((uuid, count) for (_, _, uuid), count in largest_gifts.items())


def gift_bytes(offers: Iterable[Offer]) -> dict[str, int]:
    """Bytes by GPU UUID that are reserved for the receiver of these offers.

    KV cache that was given only for the receiver, and the free memory that it counted on
    next to it. The memory of a model that is unloaded serves every waiting model, so it is not
    reserved.
    """
    surplus = [offer for offer in offers if offer.kind == "surplus"]
    return {
        uuid: count
        + max(offer.free_bytes_without_offer for offer in surplus if uuid in offer.bytes_by_gpu)
        for uuid, count in bytes_given(surplus).items()
    }


def minimal_offers(
    offers: Sequence[Offer], suffices: Callable[[Sequence[Offer]], bool]
) -> tuple[Offer, ...]:
    """A sufficient part of these offers without a superfluous one; the last are dropped first."""
    kept_offers = list(offers)
    for offer in reversed(offers):
        remaining_offers = [kept_offer for kept_offer in kept_offers if kept_offer is not offer]
        if suffices(remaining_offers):
            kept_offers = remaining_offers
    return tuple(kept_offers)


def decide_with_offers(
    offers: Sequence[Offer],
    decide: Decide,
    context: int,
    free_bytes: Mapping[str, int] | None = None,
) -> Decision:
    """The decision with the fewest offers that its best plan needs, in `takes`.

    context: tokens that were wished for. A plan that fits without offers takes none.
    free_bytes: bytes by GPU UUID that an engine may take before anything is given; None: each
    surplus is taken whole.
    """
    search = _OfferSearch(decide, context, free_bytes)
    best_offers: tuple[Offer, ...] = ()
    if any(search.losses(best_offers)):
        surplus = [offer for offer in offers if offer.kind == "surplus"]
        best_offers = search.improve(best_offers, surplus)
    # No model stops for a longer context, only for a plan at all.
    if all(search.losses(best_offers)):
        best_offers = search.improve(best_offers, offers)
    return search.decision(best_offers).evolve(taken_offers=best_offers)


class _OfferSearch:
    """Decisions by the bytes that were given for them; each decision takes a part of a second."""

    def __init__(self, decide: Decide, context: int, free_bytes: Mapping[str, int] | None) -> None:
        """The parameters are those of `decide_with_offers`."""
        self._decide = decide
        self._context = context
        self._free_bytes = free_bytes
        self._decisions: dict[tuple[tuple[str, int], ...], Decision] = {}

    def decision(self, offers: Iterable[Offer]) -> Decision:
        freed_bytes = bytes_given(offers)
        key = tuple(sorted(freed_bytes.items()))
        if key not in self._decisions:
            self._decisions[key] = self._decide(freed_bytes)
        return self._decisions[key]

    def losses(self, offers: Iterable[Offer]) -> tuple[bool, ...]:
        """The shortcomings of the best plan with these offers, worst first. All True: no plan."""
        plans = self.decision(offers).plans
        return (
            (False, *shortcomings(plans[0], self._context)) if plans else (True, True, True, True)
        )

    def improve(self, best_offers: tuple[Offer, ...], offers: Sequence[Offer]) -> tuple[Offer, ...]:
        """The fewest of `offers` that reach the best plan with all; else `best_offers`."""
        if not offers:
            return best_offers
        goal = self.losses(offers)
        if goal >= self.losses(best_offers):
            return best_offers
        fewest = self.fewest(offers, goal)
        if self._free_bytes is None or not fewest:
            return fewest
        return self.used_parts(fewest, self._free_bytes, self.losses(fewest))

    def fewest(self, offers: Sequence[Offer], goal: tuple[bool, ...]) -> tuple[Offer, ...]:
        """The first offers that reach the goal, without those that it does not need."""
        low = 1
        high = len(offers)
        while low < high:
            middle = (low + high) // 2
            reaches = self.losses(offers[:middle]) <= goal
            low, high = (low, middle) if reaches else (middle + 1, high)
        fewest_offers = list(offers[:low])
        # Offers on other GPUs than the plan's are dropped immediately.
        gpus = set(self.decision(fewest_offers).plans[0].devices)
        on_gpus = [offer for offer in fewest_offers if gpus & offer.bytes_by_gpu.keys()]
        fewest_offers = on_gpus if self.losses(on_gpus) <= goal else fewest_offers
        minimal = minimal_offers(fewest_offers, lambda offers: self.losses(offers) <= goal)
        if len(minimal) < 2:
            return minimal
        # A copy that shrinks would restart. Where its whole memory suffices, only this copy leaves.
        shrinking = {(offer.model, offer.replica) for offer in minimal if offer.kind == "surplus"}
        leaving_offers = (
            offer
            for offer in offers
            if offer.kind != "surplus" and (offer.model, offer.replica) in shrinking
        )
        return next(((offer,) for offer in leaving_offers if self.losses([offer]) <= goal), minimal)

    def used_parts(
        self, best_offers: tuple[Offer, ...], free_bytes: Mapping[str, int], goal: tuple[bool, ...]
    ) -> tuple[Offer, ...]:
        """The part of each surplus that the plan uses; all of it if the plan would change."""
        plan = self.decision(best_offers).plans[0]
        need = plan.memory.promised_bytes + _ROUNDED_HUNDREDTHS * plan.memory.gpu_bytes // 100
        missing_bytes = {uuid: need - free_bytes.get(uuid, 0) for uuid in plan.gpus}
        parts: list[Offer] = []
        for offer in sorted(best_offers, key=lambda offer: offer.kind == "surplus"):
            count = max(
                (
                    min(size, missing_bytes.get(uuid, 0))
                    for uuid, size in offer.bytes_by_gpu.items()
                ),
                default=0,
            )
            if offer.kind != "surplus" or count > 0:
                beside_bytes = max(0, min(free_bytes.get(uuid, 0) for uuid in offer.bytes_by_gpu))
                parts.append(
                    partial_offer(offer, count).evolve(free_bytes_without_offer=beside_bytes)
                )
                missing_bytes = {
                    uuid: size - parts[-1].bytes_by_gpu.get(uuid, 0)
                    for uuid, size in missing_bytes.items()
                }
        plans = self.decision(parts).plans
        unchanged = (
            plans
            and plans[0].memory.kv_tokens >= plan.memory.kv_tokens
            and plans[0].gpus == plan.gpus
        )
        return tuple(parts) if unchanged and self.losses(parts) <= goal else best_offers
