"""Plans of several models that share one machine, as a gateway would add them one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.domain import Cap, Decision, Hardware, Offer, Wish
from gateway.domain.plan_request import PlanRequest
from gateway.domain.sharing import Sharing
from gateway.planner.sharing.promised_bytes import sum_promises
from gateway.planner.sharing.surplus import cap_after_giving, surplus_offers

# Contexts that advice names, the largest first.
_CONTEXTS = (32768, 16384, 8192, 4096, 2048)


@dataclass
class _PlannedModel:
    """A model with its plan.

    cap: the most bytes that it may take, for the sake of others.
    kept_bytes: bytes that the model keeps on each device after it gave memory away; None: the
        planned bytes.
    """

    wish: Wish
    decision: Decision
    cap: Cap | None = None
    kept_bytes: int | None = None

    @property
    def promises(self) -> Iterator[tuple[str, int]]:
        """Devices and the bytes of each that no other engine may use."""
        if not self.decision.plans:
            return iter(())
        plan = self.decision.plans[0]
        promised_bytes = plan.memory.promised_bytes if self.kept_bytes is None else self.kept_bytes
        return plan.promises(lambda _: promised_bytes)

    @property
    def offers(self) -> tuple[Offer, ...]:
        """KV cache that the model could give, smallest first."""
        plans = self.decision.plans
        return surplus_offers(plans[0], self.wish) if plans else ()


@dataclass
class JointPlanning:
    """A machine whose models are planned together.

    decide: the decision for a request.
    name: the name of another machine; "": this one.
    """

    decide: Callable[[PlanRequest], Decision]
    name: str
    machine: Hardware
    _seats: list[_PlannedModel] = field(default_factory=list)

    def plan(self, wishes: Sequence[Wish]) -> list[Decision]:
        """A decision for each wish, in their order.

        A later model takes free memory first, then KV cache that earlier ones can spare, whose
        plans shrink. Each takes few GPUs unless its wish names them.
        """
        self._seats.clear()
        for wish in make_names_unique(wishes):
            sharing_wish = wish.evolve(gpus="few") if wish.gpus is None else wish
            seat = _PlannedModel(sharing_wish, self._decide(sharing_wish))
            self._seats.append(seat)
            self._shrink(seat.decision.taken_offers, wish.name)
        return [seat.decision for seat in self._seats]

    def advice(self, wishes: Sequence[Wish], decisions: Sequence[Decision]) -> str:
        """The context with which all models have a plan, where one has none; "": no such one."""
        if all(decision.plans for decision in decisions):
            return ""
        for context in _CONTEXTS:
            shorter = [wish.evolve(context=context) for wish in wishes]
            if all(decision.plans for decision in self.plan(shorter)):
                return f"All of them fit with `--context {context}`."
        return "No context of the models gives all of them a plan together."

    def _shrink(self, offers: Sequence[Offer], taker: str) -> None:
        """Plan the givers of these offers again, without the bytes that they gave."""
        givers = {offer.model: offer for offer in offers}
        seats = [seat for seat in self._seats if seat.wish.name in givers]
        for seat in seats:
            offer = givers[seat.wish.name]
            seat.cap = cap_after_giving(offer, seat.decision.plans[0], [taker])
            seat.kept_bytes = offer.keeps
        for seat in seats:
            seat.decision = self._decide(seat.wish, seat)
            seat.kept_bytes = None

    def _decide(self, wish: Wish, seat: _PlannedModel | None = None) -> Decision:
        """The decision next to the other models. seat: the model's seat, if it has one."""
        neighbours = [neighbour for neighbour in self._seats if neighbour is not seat]
        promised_bytes = sum_promises(
            promise for neighbour in neighbours for promise in neighbour.promises
        )
        givers = () if seat else neighbours
        sharing = Sharing(
            cap=seat.cap if seat else None,
            offers=tuple(offer for giver in givers for offer in giver.offers),
            former_gpus=seat.decision.plans[0].gpus if seat else (),
        )
        request = PlanRequest(
            wish,
            self.machine,
            self.name,
            promised_bytes=promised_bytes,
            sharing=sharing,
            include_uninstalled=True,
        )
        return self.decide(request)


def make_names_unique(wishes: Iterable[Wish]) -> list[Wish]:
    """The wishes with names of their own, after their sources: `a`, `a-2`."""
    wish_by_name: dict[str, Wish] = {}
    for wish in wishes:
        base = (wish.source or "").rstrip("/").rpartition("/")[2] or wish.name
        name = next(
            name
            for number in range(1, len(wish_by_name) + 2)
            if (name := base if number == 1 else f"{base}-{number}") not in wish_by_name
        )
        wish_by_name[name] = wish.evolve(name=name)
    return list(wish_by_name.values())
