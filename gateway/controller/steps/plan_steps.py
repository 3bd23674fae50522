"""Steps that plan a replica, ask its engine where the rules refuse, and record the result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from gateway.controller.decisions.changes import diff_plans, is_as_good
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.plan_inputs import FailedPlanning, PlanBasis, context_state
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.plan_input_reader import PlanInputReader
from gateway.controller.steps.plan_turns import Urgency
from gateway.controller.steps.replica_planner import CurrentContext, ReplicaPlanner
from gateway.domain import Attempt, Plan
from gateway.domain.plan_request import PlanResult
from gateway.errors import FitserveError, HostError, NoPlan
from gateway.logging import Logger
from gateway.machine.gpu_watch import GpuWatch

log = Logger("fitserve.loop")


class PlanSteps:
    """Plans a replica and records the result. Each gateway has one object of this class."""

    def __init__(
        self,
        replica_planner: ReplicaPlanner,
        reader: PlanInputReader,
        attempts: Attempts,
        launcher: Launcher,
        gpus: GpuWatch,
    ) -> None:
        self._replica_planner = replica_planner
        self._reader = reader
        self._attempts = attempts
        self._launcher = launcher
        self._gpus = gpus

    async def plan(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        context: CurrentContext,
        context_in_place: CurrentContext,
    ) -> None:
        """Plan the replica, or note why there is no plan now.

        context_in_place: the context without the serving engine. A plan next to that engine has to
        be as good as one for this context.
        """
        basis: PlanBasis | None = None
        try:
            # One at a time: two plans made side by side would count on the same free memory.
            async with self._replica_planner.turns.turn(partial(_urgency, model, replica)):
                # Changes during the wait are part of this plan.
                replica.planning.is_outdated = False
                basis = await self._plan_basis(model, context)
                if self._rests(model, replica, basis):
                    return
                replica.planning.failed_planning = None
                result = await self._replica_planner.decide(model, context)
                if replica is model.trial and not await self._fits_beside(
                    model, result, context, context_in_place
                ):
                    replica.succession.lacks_memory = True
                    replica.planning.block_planning("no room is left next to the serving engines")
                    return
                if await self._start_plan(model, replica, result):
                    return
                engines = set(result.engines_to_ask) - model.failed_inquiries.keys()
                asks_engine = bool(engines) and model.wish_of(replica).check
                if not asks_engine:
                    await self._rest(model, replica, result, context)
            if asks_engine:
                await self._query_engine(model, replica, result.engines_to_ask[0], context)
        except FitserveError as error:
            replica.planning.block_planning(str(error))
            log.warning("no plan", model=replica.model, replica=replica.index, reason=str(error))
        finally:
            self._record_failed_planning(model, replica, basis, context)
            if (
                replica.planning.is_outdated
                and replica.attempt is None
                and not replica.planning.awaited_offers
            ):
                replica.planning.blocked_reason = None
                replica.planning.looks_again = True

    async def _plan_basis(self, model: ManagedModel, context: CurrentContext) -> PlanBasis:
        inputs = await self._reader.read([model])
        return PlanBasis(inputs[model.wish.name], context_state(context()), _answers(model))

    @staticmethod
    def _rests(model: ManagedModel, replica: ReplicaState, basis: PlanBasis) -> bool:
        """Whether planning is pointless, because no input that could give a plan has changed."""
        if (
            not replica.planning.looks_again
            or model.needs_evictions
            or replica.planning.failed_planning is None
        ):
            return False
        if basis.may_help(replica.planning.failed_planning.basis):
            replica.planning.failure_count = 0
            return False
        replica.planning.restore_block(replica.planning.failed_planning)
        return True

    @staticmethod
    def _record_failed_planning(
        model: ManagedModel,
        replica: ReplicaState,
        basis: PlanBasis | None,
        context: CurrentContext,
    ) -> None:
        """Note the basis of a plan that found nothing, until the next plan."""
        is_vain = (
            replica.planning.blocked_reason is not None
            and not replica.planning.awaited_offers
            and not replica.succession.lacks_memory
        )
        if basis is None or not is_vain or replica.planning.failed_planning is not None:
            return
        if context_state(context()) != basis.context_state:
            # An engine was asked meanwhile, and the last plan may be of either context.
            basis = basis._replace(context_state=basis.context_state._replace(inputs_digest=None))
        basis = basis._replace(answers=_answers(model))
        replica.planning.failed_planning = FailedPlanning(
            basis,
            replica.planning.blocked_reason or "",
            replica.planning.waits_for_request,
            replica.planning.blocked_at,
        )

    async def _start_plan(
        self, model: ManagedModel, replica: ReplicaState, result: PlanResult
    ) -> bool:
        """Begin the plan, or wait for the others that give. Returns whether there is one."""
        if result.needed_offers:
            if replica.planning.wait_for(result.needed_offers, result.plan):
                log.warning(
                    "others give",
                    model=replica.model,
                    takes=[offer.words for offer in result.needed_offers],
                )
            return True
        if result.plan is not None:
            await self._record_plan(model, replica, result.plan, result.template)
        return result.plan is not None

    async def _query_engine(
        self, model: ManagedModel, replica: ReplicaState, engine: str, context: CurrentContext
    ) -> None:
        """Ask the engine, as its own code may allow a plan that the rules refuse."""
        replica.progress = f"checking: {engine} is asked about what its rules refuse"
        async with self._replica_planner.plan_after_inquiry(model, context, engine, None) as result:
            if result.plan is not None:
                await self._record_plan(model, replica, result.plan, result.template)
            else:
                await self._rest(model, replica, result, context)

    async def _fits_beside(
        self,
        model: ManagedModel,
        result: PlanResult,
        context: CurrentContext,
        context_in_place: CurrentContext,
    ) -> bool:
        if context().promised_bytes == context_in_place().promised_bytes:
            return True  # the serving engine was promised no memory
        replacement = await self._replica_planner.decide(model, context_in_place)
        if replacement.needed_offers or replacement.plan is None:
            # Other models may give memory instead, or an engine may overrule a refusal of the
            # rules.
            return not replacement.needed_offers and not replacement.engines_to_ask
        return result.plan is not None and is_as_good(result.plan, replacement.plan)

    async def _rest(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        result: PlanResult,
        context: CurrentContext,
    ) -> None:
        """Let the replica rest where others would leave for it at a request. Else raises NoPlan."""
        reason = "; ".join([result.reason, *self._gpus.lost_messages()])
        if context().offers_on_request:
            later_result = await self._replica_planner.decide(model, context, "leave")
            if later_result.needed_offers:
                replica.planning.wait_for_request(
                    reason, later_result.needed_offers, needs_request=model.needs_evictions
                )
                model.waits_for_request = True
                if later_result.plan is not None and model.wish_of(replica).check:
                    # The engine is asked now, so that its turn begins with the start itself.
                    replica.start_inquiry(
                        self._query_engine_early(model, context, later_result.plan)
                    )
                return
        raise NoPlan(reason)

    async def _query_engine_early(
        self, model: ManagedModel, context: CurrentContext, plan: Plan
    ) -> None:
        """Ask the engine of a resting model."""
        if plan.question is None or str(plan.engine) in model.failed_inquiries:
            return
        try:
            await self._launcher.host.identity(plan.engine)
        except HostError:
            return  # The start fetches the engine first, and then asks it.
        await self._replica_planner.query_engine_early(model, context, plan)

    async def _record_plan(
        self, model: ManagedModel, replica: ReplicaState, plan: Plan, template: str
    ) -> None:
        if template:
            await asyncio.to_thread(self._launcher.store_template, template)
        if model.wish_of(replica).least_copies is None and replica is not model.trial:
            model.replicas += [
                ReplicaState(replica.model, index, generation=replica.generation)
                for index in range(len(model.replicas), plan.replicas.value)
            ]
        replica.planning.failure_count = 0
        replica.planning.failed_planning = None
        replica.attempt = await self._attempts.start(replica, plan)
        replica.planning.requested_copies = set()
        replica.planning.received_offers = ()
        log.info(
            "planned",
            model=replica.model,
            replica=replica.index,
            engine=str(plan.engine),
            plan=plan.fingerprint,
            **_cause_fields(replica.history, plan),
        )


def _urgency(model: ManagedModel, replica: ReplicaState) -> Urgency:
    if model.needs_evictions:
        return Urgency.REQUEST
    return Urgency.REPEATED if replica.planning.looks_again else Urgency.UNPLANNED


def _answers(model: ManagedModel) -> tuple[object, ...]:
    """The answers of engines that may change a plan."""
    return len(model.answers), *sorted(model.failed_inquiries), *sorted(model.pins.items())


def _cause_fields(history: Sequence[Attempt], plan: Plan) -> dict[str, str]:
    """The failure that a plan follows, and its differences, for the log."""
    if not history or (failure := history[-1].failure) is None:
        return {}
    return {
        "after": failure.kind,
        "differs": (
            ", ".join(difference.field for difference in diff_plans(history[-1].plan, plan))
            or "the same plan again"
        ),
    }
