"""The next step of a changed wish: reads the replicas, calls `next_step`, and acts.

No step takes long: plans and starts are steps of replicas.
"""

from __future__ import annotations

import time

from gateway.controller.decisions import changes
from gateway.controller.decisions.changes import ReplicaStatus, TrialState, TrialStatus, next_step
from gateway.controller.decisions.reconcile import attempts_that_count
from gateway.controller.failpoint import Failpoint
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.trial_steps import TrialSteps
from gateway.controller.steps.wish_changes import WishChanges
from gateway.domain import Failure
from gateway.proxy.routing.drains import Drains


class ChangeSteps:
    def __init__(
        self,
        wishes: WishChanges,
        trials: TrialSteps,
        attempts: Attempts,
        failpoint: Failpoint,
        drains: Drains,
    ) -> None:
        self._wishes = wishes
        self._trials = trials
        self._attempts = attempts
        self._failpoint = failpoint
        self._drains = drains

    async def step(self, model: ManagedModel) -> bool:
        """Take the next step of the model. Returns whether there was one. Raises StoreError."""
        if model.is_deleting or not (
            model.has_pending_changes
            or (model.trial is not None and model.trial.succession.seeks_plan)
        ):
            return False
        is_new = model.wanted_generation != model.generation
        replicas = [self._replica_status(model, replica) for replica in model.replicas]
        step = next_step(model.wanted_generation, is_new, replicas, _trial_status(model))
        if step is None:
            return False
        name = type(step).__name__
        self._failpoint.reach(name, "before")
        match step:
            case changes.StartTrial(index):
                model.trial = ReplicaState(
                    model.wish.name, index, generation=model.wanted_generation
                )
                model.trial.succession.seeks_plan = True
            case changes.Adopt():
                await self._trials.adopt(model)
            case changes.EndTrial():
                await self._trials.stop(model)
            case changes.ReplaceInPlace(index):
                model.replicas[index].succession.must_be_replaced = True
                await self._trials.stop(model)
            case changes.StopRouting(index):
                model.replicas[index].succession.unrouted_at = time.monotonic()
            case changes.RestartWithWish(index):
                if not await self._replace(model.replicas[index], model.wanted_generation):
                    return False
            case changes.AbandonChange(reason):
                await self._wishes.refuse(model, reason)
                await self._trials.stop(model)
            case changes.CompleteChange():
                await self._wishes.finish(model)
        self._failpoint.reach(name, "after")
        return True

    async def size(self, model: ManagedModel) -> None:
        """Add or remove replicas until the count of the wish is met.

        A removed replica leaves the routes, and stops after its last answer. Raises StoreError.
        """
        count = model.wanted_copies
        if (
            count is None
            or model.wish.source is None
            or model.has_pending_changes
            or model.trial is not None
            or model.is_deleting
        ):
            return
        indices = range(len(model.replicas), count)
        model.replicas += [
            ReplicaState(model.wish.name, index, generation=model.generation) for index in indices
        ]
        if model.wish.copies is not None:
            # Copies beyond the load leave as evictions do, so that their memory counts as theirs
            # until their engines are gone.
            while len(model.replicas) > count and model.replicas[-1].is_gone:
                await self._drop(model, model.replicas[-1])
            return
        for replica in model.replicas[count:]:
            if replica.succession.unrouted_at is None:
                replica.succession.unrouted_at = time.monotonic()
            elif not self._replica_status(model, replica).answers_requests:
                await self._drop(model, replica)

    async def _replace(self, replica: ReplicaState, generation: int) -> bool:
        """End the engine, and plan the next one by the wish of this generation.

        Returns False while a step under way has to end; its end wakes the loop. Raises StoreError.
        """
        if replica.task is not None and not replica.is_stopping:
            # Cancel once, as a second cancellation would stop the clean-up too.
            if not replica.task.cancelling():
                replica.task.cancel()
            return False
        attempt = replica.attempt
        replica.attempt = None
        replica.succession.awaits_successor |= attempt is not None and attempt.state == "ready"
        if attempt is not None:
            await self._attempts.finish(replica, attempt)
        replica.generation = generation
        replica.succession.must_be_replaced = False
        replica.succession.unrouted_at = None
        replica.planning.blocked_reason = None
        replica.setback.clear()
        return True

    async def _drop(self, model: ManagedModel, replica: ReplicaState) -> None:
        """Remove a replica. The engine of the replica is then stopped as an orphan. Raises
        StoreError."""
        if replica.task is not None:
            replica.task.cancel()
            return
        attempt = replica.attempt
        replica.attempt = None
        if attempt is not None:
            await self._attempts.finish(replica, attempt)
        replica.cancel_preparation()
        await replica.unwatch()
        model.replicas.remove(replica)

    def _replica_status(self, model: ManagedModel, replica: ReplicaState) -> ReplicaStatus:
        attempt = replica.attempt
        is_serving = attempt is not None and attempt.serves
        is_unrouted = replica.succession.unrouted_at is not None
        return ReplicaStatus(
            replica.index,
            replica.generation,
            is_serving=is_serving,
            is_starting=not is_serving
            and replica.status.state in ("starting", "verifying", "backing_off"),
            must_be_replaced=replica.succession.must_be_replaced,
            is_unrouted=is_unrouted,
            answers_requests=is_unrouted
            and attempt is not None
            and not self._drains.is_drained(attempt.instance_name),
            failure=_failure_reason(model, replica),
        )


def _failure_reason(model: ManagedModel, replica: ReplicaState) -> str:
    """Why no engine of the replica starts by its wish; "" where one did, or still may."""
    attempts = [attempt for attempt in replica.attempts if attempt.generation == replica.generation]
    if replica.attempt is not None or any(attempt.ready_at is not None for attempt in attempts):
        return ""
    failures = [
        attempt.failure
        for attempt in attempts_that_count(attempts, model.forgiven_at, time.time())
        if attempt.failure is not None
    ]
    if failures:
        return f"{failures[-1].kind}: {failures[-1].message}"
    return replica.planning.blocked_reason or ""


def _trial_status(model: ManagedModel) -> TrialStatus | None:
    trial = model.trial
    if trial is None:
        return None
    state, reason = _trial_state(model, trial)
    return TrialStatus(trial.index, trial.generation, state, reason)


def _trial_state(model: ManagedModel, trial: ReplicaState) -> tuple[TrialState, str]:
    """The state of the trial, and the reason of a failure."""
    attempt = trial.attempt
    if not trial.succession.seeks_plan:
        return ("stops", "") if attempt is None else ("unrelated", "")
    if attempt is not None:
        return ("ready", "") if attempt.state == "ready" else ("starts", "")
    if trial.succession.lacks_memory:
        # Its engines had room, and failed: no serving engine stops for another try.
        failure = _last_failure(model, trial)
        if failure is None:
            return "no_memory", ""
        return "failed", f"{failure.kind}: {failure.message}"
    if not trial.is_busy and trial.status.state in ("quarantined", "no_plan"):
        return "failed", trial.status.reason
    return "starts", ""


def _last_failure(model: ManagedModel, trial: ReplicaState) -> Failure | None:
    """The last failure of the trial's generation.

    After a restart of the gateway these attempts are in the replica's history.
    """
    for attempt in reversed([*model.replicas[trial.index].history, *trial.history]):
        if attempt.generation == trial.generation and attempt.failure is not None:
            return attempt.failure
    return None
