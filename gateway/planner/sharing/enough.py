"""What offers give together, and which of them are enough. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.domain import Offer


def given(offers: Iterable[Offer]) -> dict[str, int]:
    """Bytes that come back in all, by UUID. Of several offers of a copy the largest has what the
    others have."""
    most: dict[tuple[str, int, str], int] = {}
    for offer in offers:
        for uuid, count in offer.gives.items():
            place = offer.model, offer.replica, uuid
            most[place] = max(count, most.get(place, 0))
    total: dict[str, int] = {}
    for (_, _, uuid), count in most.items():
        total[uuid] = total.get(uuid, 0) + count
    return total


def reserved(offers: Iterable[Offer]) -> dict[str, int]:
    """Bytes by UUID that stay for whoever takes these: KV cache that was given for it alone, and
    what it counted on beside that. Who leaves gives all
    that it has, which is for all that wait for it."""
    taken = [one for one in offers if one.how == "surplus"]
    return {
        uuid: count + max(one.beside for one in taken if uuid in one.gives)
        for uuid, count in given(taken).items()
    }


def least(offers: Sequence[Offer], enough: Callable[[Sequence[Offer]], bool]) -> tuple[Offer, ...]:
    """Of offers that are enough those without which they are not; the last are given up first."""
    needed = list(offers)
    for offer in reversed(offers):
        without = [one for one in needed if one is not offer]
        if enough(without):
            needed = without
    return tuple(needed)
