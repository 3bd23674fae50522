"""Steps that plan a replica, ask its engine where the rules refuse, and record the result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.controller.decisions.changes import diff_plans, is_as_good
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.replica_planner import CurrentContext, ReplicaPlanner
from gateway.domain import Attempt, Plan
from gateway.domain.plan_request import PlanResult
from gateway.errors import FitserveError, HostError, NoPlan
from gateway.logging import Logger
from gateway.machine.gpu_watch import GpuWatch

log = Logger("fitserve.loop")


class PlanSteps:
    """Shared by all replicas of a gateway."""

    def __init__(
        self,
        replica_planner: ReplicaPlanner,
        attempts: Attempts,
        launcher: Launcher,
        gpus: GpuWatch,
    ) -> None:
        self._replica_planner = replica_planner
        self._attempts = attempts
        self._launcher = launcher
        self._gpus = gpus

    async def plan(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        room: CurrentContext,
        in_place: CurrentContext,
    ) -> None:
        """Plan the replica, or note why there is no plan now.

        in_place: the room in the place of what serves; what is tried beside has to be as good as a
        plan for that.
        """
        replica.outdated = False
        try:
            # One at a time: two plans made side by side would count on the same free memory.
            async with self._replica_planner.planning:
                planned = await self._replica_planner.decide(model, room)
                if replica is model.trial and not await self._fits_beside(
                    model, planned, room, in_place
                ):
                    replica.no_room = True
                    replica.block("there is no room beside what serves")
                    return
                if planned.takes:
                    if replica.wait_for(planned.takes, planned.plan):
                        log.warning(
                            "others give",
                            model=replica.model,
                            takes=[take.words for take in planned.takes],
                        )
                    return
                if planned.plan is not None:
                    await self._record(model, replica, planned.plan, planned.template)
                    return
            checks = model.wish_of(replica).check
            if not checks or not set(planned.engines_to_ask) - model.failed_inquiries.keys():
                resting = await self._without_plan(model, replica, planned, room)
            else:
                # The engine's own code may allow a plan that the rules refuse.
                replica.progress = (
                    f"checking: {planned.engines_to_ask[0]} is asked about what its rules refuse"
                )
                async with self._replica_planner.checked(
                    model, room, planned.engines_to_ask[0], None
                ) as planned:
                    if planned.plan is not None:
                        await self._record(model, replica, planned.plan, planned.template)
                        return
                    resting = await self._without_plan(model, replica, planned, room)
            if checks and resting is not None:
                replica.begin_inquiry(self._ask_early(model, room, resting))
        except FitserveError as error:
            replica.block(str(error))
            log.warning("no plan", model=replica.model, replica=replica.index, reason=str(error))
        finally:
            if replica.outdated and replica.attempt is None and not replica.takes:
                replica.blocked, replica.looks_again = None, True

    async def _fits_beside(
        self,
        model: ManagedModel,
        planned: PlanResult,
        room: CurrentContext,
        in_place: CurrentContext,
    ) -> bool:
        if room().claims == in_place().claims:
            return True  # what serves holds nothing that plans are made of
        replacement = await self._replica_planner.decide(model, in_place)
        if replacement.takes or replacement.plan is None:
            # In its place others may give, or an engine may allow what the rules refuse.
            return not replacement.takes and not replacement.engines_to_ask
        return planned.plan is not None and is_as_good(planned.plan, replacement.plan)

    async def _without_plan(
        self, model: ManagedModel, replica: ReplicaState, planned: PlanResult, room: CurrentContext
    ) -> Plan | None:
        """Let the replica rest where others would leave for it at a request. Else raises NoPlan.

        Returns the plan that it would then have.
        """
        reason = "; ".join([planned.reason, *self._gpus.lost_messages()])
        if room().if_asked:
            later = await self._replica_planner.decide(model, room, "leave")
            if later.takes:
                replica.rest_until_asked(reason, later.takes, asks=model.asks)
                model.on_request = True
                return later.plan
        raise NoPlan(reason)

    async def _ask_early(self, model: ManagedModel, room: CurrentContext, plan: Plan) -> None:
        """Ask the engine of a resting model, so that its turn begins with the start itself."""
        if plan.question is None or str(plan.engine) in model.failed_inquiries:
            return
        try:
            await self._launcher.host.identity(plan.engine)
        except HostError:
            return  # The start fetches the engine first, and then asks it.
        await self._replica_planner.ask_early(model, room, plan)

    async def _record(
        self, model: ManagedModel, replica: ReplicaState, plan: Plan, template: str
    ) -> None:
        if template:
            await asyncio.to_thread(self._launcher.keep_template, template)
        if model.wish_of(replica).replicas is None and replica is not model.trial:
            model.replicas += [
                ReplicaState(replica.model, index, generation=replica.generation)
                for index in range(len(model.replicas), plan.replicas.value)
            ]
        replica.attempt, replica.requested_copies, replica.received_offers = (
            await self._attempts.begin(replica, plan),
            set(),
            (),
        )
        log.info(
            "planned",
            model=replica.model,
            replica=replica.index,
            engine=str(plan.engine),
            plan=plan.fingerprint,
            **_cause_fields(replica.history, plan),
        )


def _cause_fields(history: Sequence[Attempt], plan: Plan) -> dict[str, str]:
    """For the log: which failure a plan follows, and what is other in it."""
    if not history or (failure := history[-1].failure) is None:
        return {}
    return {
        "after": failure.kind,
        "differs": (
            ", ".join(difference.what for difference in diff_plans(history[-1].plan, plan))
            or "the same plan again"
        ),
    }
