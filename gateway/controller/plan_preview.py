"""What would be done now: for a wish, for a changed wish, for what serves. Nothing of it is
recorded."""

from __future__ import annotations

import asyncio

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steps.planner_port import PlannerPort
from gateway.domain import Hardware, Plan, Planned, RunningPlan, Served, Wish
from gateway.domain.plan import ALONE
from gateway.store.store import Store


class PlanPreview:
    def __init__(self, store: Store, planner: PlannerPort, fleet: Fleet) -> None:
        self._store = store
        self._planner = planner
        self._fleet = fleet

    async def named(self, wish: Wish) -> Wish:
        """As the planner's."""
        return await self._planner.named(wish)

    async def plan(
        self, wish: Wish, hardware: str | None = None, *, others: bool = False
    ) -> Planned:
        """What would be done for this wish now; nothing is recorded. others: and what engines would
        give that are not here."""
        facts = await asyncio.to_thread(self._store.fact_texts)
        beside = wish if hardware else self._fleet.wish_beside_others(wish)
        sharing = ALONE if hardware else self._fleet.sharing(None, wish)
        return await self._planner.decide(
            beside, facts, self._fleet.claims(None), hardware, others=others, sharing=sharing
        )

    async def plan_change(self, model: ManagedModel, wish: Wish) -> Planned:
        """What would be done for this wish in the place of what the model has now; nothing is
        recorded."""
        facts, held = await asyncio.to_thread(self._store.fact_texts), self._fleet.held_bytes(model)
        claims = {uuid: size - held.get(uuid, 0) for uuid, size in self._fleet.claims(None).items()}
        known = facts, claims, None, model.answers, model.pins
        sharing = self._fleet.sharing(model, wish)
        return await self._planner.decide(
            self._fleet.wish_beside_others(wish), *known, others=True, sharing=sharing
        )

    async def compared(
        self,
        model: ManagedModel,
        plan: Plan,
        replica: ReplicaState | None = None,
        *,
        beside: bool = False,
        seen: tuple[Served, ...] = (),
        against: Plan | None = None,
    ) -> Planned:
        """With a plan that should be better than this one, which serves, once something is known of
        that; `beside`: that can run while it
        serves. replica: for this one alone; the others stay. seen, against: as in RunningPlan.
        Raises BadModel and its kin.
        """
        facts, held = (
            await asyncio.to_thread(self._store.fact_texts),
            {} if beside else self._fleet.held_bytes(model, replica),
        )
        claims = {uuid: size - held.get(uuid, 0) for uuid, size in self._fleet.claims(None).items()}
        wish = (
            self._fleet.planning_context(model, replica).wish
            if replica is not None
            else self._fleet.wish_beside_others(model.wish)
        )
        running, sharing = (
            RunningPlan(plan, held, seen, against),
            self._fleet.sharing(model, wish)._replace(offers=()),
        )
        return await self._planner.decide(
            wish, facts, claims, None, model.answers, model.pins, running, sharing=sharing
        )

    async def hardware(self) -> Hardware:
        """What is in this machine now; GPUs that are lost say so."""
        return await self._planner.hardware()
