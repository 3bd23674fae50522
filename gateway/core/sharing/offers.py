"""Which of the offers of other models a plan needs. Pure.

shared(offers, decide, wanted) -> the decision, with the fewest offers that its best plan needs (`takes`)

the best plan beside the others        is asked of them
has all that is wanted                 nothing
lacks something that nobody gives up   surplus, where that helps
is not there, with all surplus         sleep and stop too, in the order of the offers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.core.planner.sizes import lacks
from gateway.domain import Decision, Offer

Decide = Callable[[dict[str, int]], Decision]
"""The decision where so many bytes more are free, by the UUID of a GPU."""


def shared(offers: Sequence[Offer], decide: Decide, wanted: int) -> Decision:
    """`wanted`: tokens of context that the user asked for, or would be content with. A plan that fits without takes nothing."""
    search = _Search(decide, wanted)
    takes: tuple[Offer, ...] = ()
    for asked, may in (([one for one in offers if one.how == "surplus"], any), (list(offers), all)):
        now = search.lack(takes)
        # For the wished context nobody is stopped: only for a plan at all, of which everything lacks.
        if asked and may(now) and (goal := search.lack(asked)) < now:
            takes = search.fewest(asked, goal)
    found: Decision = search.decided(takes).evolve(takes=takes)
    return found


def given(offers: Iterable[Offer]) -> dict[str, int]:
    """Bytes that come back in all, by UUID. Of several offers of a model the largest has what the others have."""
    most: dict[tuple[str, str], int] = {}
    for offer in offers:
        for uuid, count in offer.gives.items():
            most[offer.model, uuid] = max(count, most.get((offer.model, uuid), 0))
    total: dict[str, int] = {}
    for (_, uuid), count in most.items():
        total[uuid] = total.get(uuid, 0) + count
    return total


class _Search:
    """Decisions are remembered by what was given for them: each takes a part of a second."""

    def __init__(self, decide: Decide, wanted: int) -> None:
        self._decide, self._wanted = decide, wanted
        self._known: dict[tuple[tuple[str, int], ...], Decision] = {}

    def decided(self, offers: Iterable[Offer]) -> Decision:
        free = given(offers)
        key = tuple(sorted(free.items()))
        if key not in self._known:
            self._known[key] = self._decide(free)
        return self._known[key]

    def lack(self, offers: Iterable[Offer]) -> tuple[bool, ...]:
        """What is missing with these offers; less is better. All of it where there is no plan."""
        plans = self.decided(offers).plans
        return (False, *lacks(plans[0], self._wanted)) if plans else (True, True, True, True)

    def fewest(self, offers: Sequence[Offer], goal: tuple[bool, ...]) -> tuple[Offer, ...]:
        """The fewest first offers that reach the goal, and of these only those without which it is not reached."""
        low, high = 1, len(offers)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.lack(offers[:middle]) <= goal else (middle + 1, high)
        needed = list(offers[:low])
        # What gives nothing to the GPUs of the plan is dropped at once.
        gpus = set(self.decided(needed).plans[0].gpus)
        near = [one for one in needed if gpus & one.gives.keys()]
        needed = near if self.lack(near) <= goal else needed
        for offer in reversed(needed[:]):
            without = [one for one in needed if one is not offer]
            if self.lack(without) <= goal:
                needed = without
        return tuple(needed)
