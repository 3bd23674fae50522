"""Plans of a replica: from present knowledge, after an inquiry, or with a smaller cache."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Literal

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.fleet.planning_context import PlanningContext
from gateway.controller.steps.plan_turns import PlanTurns
from gateway.controller.steps.planner_port import PlannerPort
from gateway.domain import Attempt, InquiryResult, Offer, Plan, Sharing
from gateway.domain.image_name import exact
from gateway.domain.plan_request import PlanRequest, PlanResult, RunningPlan
from gateway.errors import FitserveError
from gateway.planner.sharing.surplus import cap_after_giving

CurrentContext = Callable[[], PlanningContext]
NeighbourRole = Literal["give", "stay", "leave"]
KeepCommits = Callable[[ManagedModel, Mapping[str, str]], Awaitable[None]]


class ReplicaPlanner:
    """Plans replicas, and asks engines about plans. Each gateway has one object of this class."""

    def __init__(self, planner: PlannerPort, asking_s: float, keep_commits: KeepCommits) -> None:
        """asking_s: seconds that engines may take to answer.
        keep_commits: see `WishChanges`.
        """
        self._planner = planner
        self._asking_s = asking_s
        self._keep_commits = keep_commits
        self.turns = PlanTurns()
        """The turns of every step that relies on free memory."""
        self._early_lock = asyncio.Lock()
        """Resting models ask one after the other: starts need the processor more."""

    async def decide(
        self,
        model: ManagedModel,
        context: CurrentContext,
        neighbours: NeighbourRole = "give",
    ) -> PlanResult:
        """The decision from present knowledge.

        neighbours: whether they give memory, stay as they are, or leave their GPUs. A decision with
        `leave` is not shown to users. Raises BadModel and its kin.
        """
        now = context()
        result = await self._planner.plan(
            _plan_request(model, now, _request_sharing(now, neighbours))
        )
        if model.decision is None or not (now.is_copy or neighbours == "leave"):
            model.decision = result.decision
        await self._keep_commits(model, result.commits)
        return (
            result._replace(plan=plan_for_images(result.plan, model.pins))
            if result.plan
            else result
        )

    @contextlib.asynccontextmanager
    async def plan_after_inquiry(
        self, model: ManagedModel, context: CurrentContext, engine: str, plan: Plan | None
    ) -> AsyncGenerator[PlanResult]:
        """The plan after an inquiry. The turn to plan is held until the caller is done.

        The turn is free during the inquiry, so the plan is made again if memory was promised to
        other models in between. plan: the plan of this engine if the inquiry gives none.
        """
        async with model.inquiry_lock:
            former_context = context()
            pins = model.pins
            result = await self._inquire(model, former_context, "stay", engine, plan)
        async with self.turns.turn():
            if context() != former_context:
                result = await self.decide(model, context, "stay")
            elif not former_context.is_copy:
                model.decision = result.decision
            yield (
                result._replace(plan=plan_for_images(result.plan, pins)) if result.plan else result
            )

    async def query_engine_early(
        self, model: ManagedModel, context: CurrentContext, plan: Plan
    ) -> None:
        """Ask the engine of the plan for which others would leave, before the model's turn.

        The answers are kept, so the start at its turn needs no inquiry.
        """
        async with self._early_lock, model.inquiry_lock:
            await self._inquire(model, context(), "leave", str(plan.engine), plan)

    async def _inquire(
        self,
        model: ManagedModel,
        context: PlanningContext,
        neighbours: NeighbourRole,
        engine: str,
        plan: Plan | None,
    ) -> PlanResult:
        """The plan after an inquiry, whose outcome the model remembers."""
        request = _plan_request(model, context, _request_sharing(context, neighbours))
        try:
            result = await self._planner.check(request, model.failed_inquiries, self._asking_s)
        except FitserveError as error:
            problems = InquiryResult({}, {engine: str(error)}, {})
            result = PlanResult(plan, str(error), model.decision or b"null", inquiry=problems)
        model.pins.update(result.inquiry.pins)
        model.remember_answers(result.inquiry)
        return result

    async def shrunk_plan(
        self,
        model: ManagedModel,
        old_attempt: Attempt,
        offer: Offer,
        requesters: Collection[str],
        context: PlanningContext,
        held_bytes: dict[str, int],
    ) -> Plan | None:
        """The running plan with less KV cache: the same engine on the same GPUs.

        Raises BadModel and its kin.
        """
        plan = old_attempt.plan
        former_cap = context.sharing.cap
        near_models = {
            holder.model
            for holder in context.sharing.promises
            if set(plan.gpus) & holder.bytes_by_gpu.keys()
        }
        cap = cap_after_giving(
            offer, plan, {*requesters, *near_models, *(former_cap.models if former_cap else ())}
        )
        fixed_choices = {
            "engines": (str(plan.engine),),
            "gpus": plan.gpus,
            "tensor_parallel": plan.tensor_parallel.value,
            "data_parallel": plan.data_parallel.value,
            "replicas": 1,
        }
        request = _plan_request(
            model, context, context.sharing._replace(cap=cap, offers=(), former_gpus=plan.gpus)
        )
        result = await self._planner.plan(
            replace(
                request,
                wish=context.wish.evolve(**fixed_choices),
                running=RunningPlan(plan, held_bytes),
            )
        )
        if result.plan is None or result.plan.cap != cap:
            return None
        fixed_plan = plan_for_images(result.plan, model.pins)
        actual_cap = cap.evolve(bytes=result.plan.memory.promised_bytes)
        return fixed_plan.evolve(question=None, cap=actual_cap)


def _plan_request(model: ManagedModel, context: PlanningContext, sharing: Sharing) -> PlanRequest:
    return PlanRequest(
        context.wish,
        promised_bytes=context.promised_bytes,
        answers=tuple(model.answers.items()),
        pins=model.pins,
        sharing=sharing,
    )


def _request_sharing(context: PlanningContext, neighbours: NeighbourRole) -> Sharing:
    offers = context.sharing.offers
    surplus = [offer for offer in offers if offer.kind == "surplus"]
    chosen_offers = {"give": offers, "stay": (), "leave": (*surplus, *context.offers_on_request)}[
        neighbours
    ]
    return context.sharing._replace(offers=chosen_offers)


def plan_for_images(plan: Plan, pins: Mapping[str, str]) -> Plan:
    """The plan for exactly these images, for which its facts hold."""
    engine = exact(plan.engine, pins)
    return (
        plan.evolve(engine=engine, software={**plan.software, "digest": engine.digest})
        if engine.digest
        else plan
    )
