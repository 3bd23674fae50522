"""Previews of plans, for a new wish, a changed wish or a running model. Nothing is recorded."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.steps.planner_port import PlannerPort
from gateway.domain import Hardware, Plan, TrafficSums, Wish
from gateway.domain.plan_request import PlanRequest, PlanResult, RunningPlan
from gateway.domain.sharing import NO_SHARING


class PlanPreview:
    def __init__(self, planner: PlannerPort, fleet: Fleet) -> None:
        self._planner = planner
        self._fleet = fleet

    async def resolve(self, wish: Wish) -> Wish:
        """The wish with its image and GPUs resolved, as `PlannerPort.resolve`."""
        return await self._planner.resolve(wish)

    async def plan(
        self,
        wish: Wish,
        hardware: str | None = None,
        *,
        include_uninstalled: bool = False,
        needs_weights: bool = True,
    ) -> PlanResult:
        """The plan for this wish now.

        include_uninstalled: whether to include plans of engines that are not installed.
        needs_weights: the field of PlanRequest.
        """
        request = PlanRequest(
            wish if hardware else self._fleet.wish_beside_others(wish),
            machine_name=hardware or "",
            promised_bytes=self._fleet.bytes_promised_to_others(None),
            sharing=NO_SHARING if hardware else self._fleet.sharing(None, wish),
            include_uninstalled=include_uninstalled,
            needs_weights=needs_weights,
        )
        return await self._planner.preview(request)

    async def plan_change(self, model: ManagedModel, wish: Wish) -> PlanResult:
        """The plan for this wish in place of the model's present one."""
        request = PlanRequest(
            self._fleet.wish_beside_others(wish),
            promised_bytes=self._promised_bytes_without(self._fleet.held_bytes(model)),
            answers=tuple(model.answers.items()),
            pins=model.pins,
            sharing=self._fleet.sharing(model, wish),
            include_uninstalled=True,
        )
        return await self._planner.preview(request)

    async def plan_trial(self, model: ManagedModel, wish: Wish, *, keeps_model: bool) -> PlanResult:
        """The plan for this wish next to the model's engines, or in place of all of them. Raises
        BadModel and its kin."""
        request = PlanRequest(
            self._fleet.wish_beside_others(wish),
            promised_bytes=self._fleet.bytes_promised_to_others(None)
            if keeps_model
            else self._fleet.bytes_promised_to_other_models(model),
            answers=tuple(model.answers.items()),
            pins=model.pins,
            sharing=self._fleet.sharing(model, wish)._replace(offers=()),
        )
        return await self._planner.preview(request)

    async def plan_against_running(
        self,
        model: ManagedModel,
        plan: Plan,
        traffic: tuple[TrafficSums, ...] = (),
    ) -> PlanResult:
        """The plans for the model, with a rival of its running `plan` if one should be better.

        traffic: the field of RunningPlan. Raises BadModel and its kin.
        """
        held_bytes = self._fleet.held_bytes(model)
        wish = self._fleet.wish_beside_others(model.wish)
        request = PlanRequest(
            wish,
            promised_bytes=self._promised_bytes_without(held_bytes),
            answers=tuple(model.answers.items()),
            pins=model.pins,
            sharing=self._fleet.sharing(model, wish)._replace(offers=()),
            running=RunningPlan(plan, held_bytes, traffic),
        )
        return await self._planner.preview(request)

    def _promised_bytes_without(self, held_bytes: Mapping[str, int]) -> dict[str, int]:
        """The bytes promised to all models, less these bytes by GPU UUID."""
        promised_bytes = self._fleet.bytes_promised_to_others(None).items()
        return {uuid: size - held_bytes.get(uuid, 0) for uuid, size in promised_bytes}

    async def hardware(self) -> Hardware:
        """The present hardware of this machine, lost GPUs marked."""
        return await self._planner.hardware()
