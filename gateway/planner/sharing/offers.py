"""Which of the offers of other models a plan needs. Pure.

shared(offers, decide, wanted) -> the decision, with the fewest offers that its best plan needs
(`takes`)

the best plan beside the others        is asked of them
has all that is wanted                 nothing
lacks something that nobody gives up   surplus, where that helps
is not there, with all surplus         sleep and stop too, in the order of the offers

Of a surplus no more is taken than the plan uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.domain import Decision, Offer
from gateway.planner.sharing.enough import given, least
from gateway.planner.sharing.surplus import part
from gateway.planner.sizes import lacks

Decide = Callable[[dict[str, int]], Decision]
"""The decision where so many bytes more are free, by the UUID of a GPU."""


# Budgets are told in hundredths of a GPU and rounded, of what is there and of what is given.
_STEPS, _STEP = 2, 100


def shared(
    offers: Sequence[Offer], decide: Decide, wanted: int, room: Mapping[str, int] | None = None
) -> Decision:
    """`wanted`: tokens of context that the user asked for, or would be content with. A plan that
        fits without takes nothing.
    room: bytes that an engine may take of each GPU, by UUID, before anything is given; without it
        each surplus is taken whole.
    """
    search = _Search(decide, wanted)
    takes: tuple[Offer, ...] = ()
    for asked, may in (([one for one in offers if one.how == "surplus"], any), (list(offers), all)):
        now = search.lack(takes)
        # For the wished context nobody is stopped: only for a plan at all, of which everything
        # lacks.
        if asked and may(now) and (goal := search.lack(asked)) < now:
            takes = search.fewest(asked, goal)
            if room is not None and takes:
                takes = search.used(takes, room, search.lack(takes))
    return search.decided(takes).evolve(takes=takes)


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
        """The fewest first offers that reach the goal, and of these only those without which it is
        not reached."""
        low, high = 1, len(offers)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.lack(offers[:middle]) <= goal else (middle + 1, high)
        needed = list(offers[:low])
        # What gives nothing to the GPUs of the plan is dropped at once.
        gpus = set(self.decided(needed).plans[0].devices)
        near = [one for one in needed if gpus & one.gives.keys()]
        needed = near if self.lack(near) <= goal else needed
        return least(needed, lambda some: self.lack(some) <= goal)

    def used(
        self, takes: tuple[Offer, ...], room: Mapping[str, int], goal: tuple[bool, ...]
    ) -> tuple[Offer, ...]:
        """Of each surplus what the plan uses of it; all of it where the plan would be another with
        less."""
        plan = self.decided(takes).plans[0]
        need = plan.memory.promised_bytes + _STEPS * plan.memory.gpu_bytes // _STEP
        missing = {uuid: need - room.get(uuid, 0) for uuid in plan.gpus}
        parts: list[Offer] = []
        for take in sorted(takes, key=lambda one: one.how == "surplus"):
            count = max(
                (min(most, missing.get(uuid, 0)) for uuid, most in take.gives.items()), default=0
            )
            if take.how != "surplus" or count > 0:
                beside = max(0, min(room.get(uuid, 0) for uuid in take.gives))
                parts.append(part(take, count).evolve(beside=beside))
                missing = {
                    uuid: left - parts[-1].gives.get(uuid, 0) for uuid, left in missing.items()
                }
        with_less = self.decided(parts).plans
        same = (
            with_less
            and with_less[0].memory.kv_tokens >= plan.memory.kv_tokens
            and with_less[0].gpus == plan.gpus
        )
        return tuple(parts) if same and self.lack(parts) <= goal else takes
