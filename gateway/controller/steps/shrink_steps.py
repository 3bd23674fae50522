"""Restarts a replica by its own plan with less KV cache, to give memory to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.replica_planner import CurrentContext, ReplicaPlanner
from gateway.domain import Offer
from gateway.errors import FitserveError, NoPlan
from gateway.logging import Logger
from gateway.proxy.routing.drains import Drains

log = Logger("fitserve.loop")

# Seconds before a model is asked again whose KV cache could not be cut.
_RETRY_S = 600.0


class ShrinkSteps:
    """Restarts replicas with less KV cache. Each gateway has one object of this class."""

    def __init__(self, replica_planner: ReplicaPlanner, attempts: Attempts, drains: Drains) -> None:
        self._replica_planner = replica_planner
        self._attempts = attempts
        self._drains = drains

    async def shrink(
        self,
        model: ManagedModel,
        offer: Offer,
        requesters: Collection[str],
        context: CurrentContext,
        held_bytes: Callable[[ManagedModel, ReplicaState], dict[str, int]],
    ) -> None:
        """Restart a replica with less KV cache, after its requests are answered.

        Nothing changes if no such plan exists.
        """
        replica = model.replicas[offer.replica]
        old_attempt = model.replicas[offer.replica].attempt
        if old_attempt is None:
            return
        log.warning("gives KV cache", model=replica.model, to=sorted(requesters), words=offer.words)
        try:
            async with self._replica_planner.turns.turn():
                new_plan = await self._replica_planner.shrunk_plan(
                    model=model,
                    old_attempt=old_attempt,
                    offer=offer,
                    requesters=requesters,
                    context=context(),
                    held_bytes=held_bytes(model, replica),
                )
            if new_plan is None or new_plan.memory.promised_bytes > offer.keeps:
                raise NoPlan("no smaller plan was found")
            replica.succession.unrouted_at = time.monotonic()
            await self._drains.wait_until_drained(old_attempt.instance_name)
            attempt = await self._attempts.start(replica, new_plan)
            current_attempt = replica.attempt
            if current_attempt is None or current_attempt.id != old_attempt.id:
                await self._attempts.drop(attempt)
                return
            replica.attempt = attempt
            replica.succession.awaits_successor = True
            replica.cache_receivers = frozenset(requesters)
            # The old attempt may have become ready meanwhile.
            await self._attempts.finish(replica, current_attempt)
        except FitserveError as error:
            model.no_giving_until_s = time.monotonic() + _RETRY_S
            log.warning("gives no KV cache", model=replica.model, reason=str(error))
        finally:
            replica.succession.unrouted_at = None
