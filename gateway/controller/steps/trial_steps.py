"""Trials: another plan of a model, measured only, or about to serve in place of a replica."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steps.attempts import Attempts
from gateway.domain import Failure, Plan
from gateway.domain.running import TRIAL_GENERATION
from gateway.proxy.routing.drains import Drains

_TRIAL_REASON = (
    "Other plans of the model are measured in its place. The model returns by this plan."
)
_TRIAL_END = Failure(
    kind="ended_for_trials", phase="serving", message=_TRIAL_REASON, proven_subject="nothing"
)


class TrialSteps:
    """Begins, adopts and ends the trials of a model. Each gateway has one object of this class."""

    def __init__(self, attempts: Attempts, drains: Drains, wake: Callable[[], None]) -> None:
        """`wake` starts a pass."""
        self._attempts = attempts
        self._drains = drains
        self._wake = wake

    async def start_measuring(self, model: ManagedModel, plan: Plan) -> ReplicaState:
        """Start a plan that is only measured, alongside the serving engines or while they are away.

        If the gateway dies, the next one ends it. Raises HostError, StoreError.
        """
        trial = ReplicaState(model.wish.name, 0, generation=TRIAL_GENERATION)
        # The trial is the check: an inquiry would take as long as a start.
        trial.attempt = await self._attempts.start(trial, plan.evolve(question=None))
        model.trial = trial
        self._wake()
        return trial

    async def leave(self, model: ManagedModel) -> None:
        """Stop the model's engines after their last answers, until `restart_predecessors`.

        The next gateway brings them back too. Raises StoreError.
        """
        model.pause_reason = _TRIAL_REASON
        for replica in model.replicas:
            replica.succession.unrouted_at = time.monotonic()
        self._wake()
        for replica in model.replicas:
            if replica.attempt is not None:
                await self._drains.wait_until_drained(replica.attempt.instance_name)
            # A step of the loop may have ended it meanwhile.
            attempt = replica.attempt
            replica.attempt = None
            if attempt is not None:
                await self._attempts.finish(replica, attempt, _TRIAL_END)
            replica.succession.unrouted_at = None
        self._wake()

    def restart_predecessors(self, model: ManagedModel) -> None:
        """Let engines that left start again, by the plans that they had."""
        if not model.pause_reason:
            return
        model.pause_reason = ""
        for replica in model.replicas:
            replica.succession.unrouted_at = None
        self._wake()

    async def adopt(self, model: ManagedModel) -> None:
        """Let the trial serve. The old engine stops after its last answers. Raises StoreError."""
        trial = model.trial
        if trial is None or trial.attempt is None or trial.is_busy:
            return
        replica = model.replicas[trial.index]
        if replica.task is not None:
            replica.task.cancel()  # a restart by the old plan is needless now
            return
        old_attempt = replica.attempt
        replica.swap_engines(trial)
        replica.status = trial.status
        replica.finish_change()
        trial.attempt = None
        trial.succession.seeks_plan = False
        if old_attempt is not None:
            await self._attempts.finish(trial, old_attempt)

    async def stop(self, model: ManagedModel) -> None:
        """Stop the trial. Raises StoreError."""
        trial = model.trial
        if trial is None:
            return
        trial.succession.seeks_plan = False
        if trial.task is not None and not trial.is_stopping:
            trial.task.cancel()
        if trial.attempt is not None:
            attempt = trial.attempt
            trial.attempt = None
            await self._attempts.finish(trial, attempt)
