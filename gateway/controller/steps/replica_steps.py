"""The next step of one replica: reads records and observation, calls `next_action`, and acts.

Slow effects run as one task per replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

from gateway.controller.decisions import reconcile
from gateway.controller.decisions.reconcile import (
    Demand,
    NoAction,
    PendingEviction,
    PlanState,
    ReplicaSnapshot,
    next_action,
)
from gateway.controller.failpoint import Failpoint
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.plan_steps import PlanSteps
from gateway.controller.steps.proof_steps import ProofSteps
from gateway.controller.steps.shrink_steps import ShrinkSteps
from gateway.controller.steps.sleep_steps import SleepSteps
from gateway.controller.steps.start_steps import StartSteps
from gateway.controller.watch.engine_client import EngineClient
from gateway.controller.watch.watcher import WatchContext, Watcher
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Instance, Observation, Offer, StartConditions
from gateway.errors import StoreError
from gateway.machine.gpu_watch import GpuWatch
from gateway.proxy.routing.drains import Drains

# Seconds for an engine that failed or never served: only its workers have to end.
_SHORT_GRACE_S = 1.0


class Effects(NamedTuple):
    """The effects on a replica.

    None decides the next step, and each may be cut off anywhere: the next pass finds the result.
    """

    plans: PlanSteps
    starts: StartSteps
    proofs: ProofSteps
    attempts: Attempts
    shrinks: ShrinkSteps
    sleeps: SleepSteps


class WatchSources(NamedTuple):
    """The sources of watchers. `silent_s`: see `WatchContext`."""

    signatures: Callable[[], Signatures]
    client: EngineClient
    silent_s: Callable[[str], float | None]


class ReplicaSteps:
    """Takes the steps of all replicas. The knowledge of each is in its `ReplicaState`."""

    def __init__(
        self,
        effects: Effects,
        fleet: Fleet,
        launcher: Launcher,
        gpus: GpuWatch,
        sources: WatchSources,
        drains: Drains,
        wake: Callable[[], None],
    ) -> None:
        """`wake` starts a pass."""
        self._effects = effects
        self._fleet = fleet
        self._launcher = launcher
        self._settings = launcher.settings
        self._failpoint = Failpoint(launcher.settings.failpoint)
        self._gpus = gpus
        self._sources = sources
        self._wake = wake
        self._drains = drains

    async def step(
        self, model: ManagedModel, replica: ReplicaState, instances: Mapping[str, Instance]
    ) -> None:
        """Take the next steps of the replica. An unexpected error stays with the replica. Raises
        StoreError.

        instances: the instances by name.
        """
        if replica.setback.rest_s:
            return
        try:
            # Several steps may follow one another in one pass: fail, stop, plan.
            while await self._step(model, replica, instances):
                pass
        except StoreError:
            raise
        except Exception as error:
            replica.setback.record_failure(error)

    def shrink(self, model: ManagedModel, offer: Offer, requesters: Collection[str]) -> None:
        """Have a serving model give its offer to the requesters, if nothing else is under way."""
        replica = model.replicas[offer.replica]
        if not replica.is_busy:
            context = partial(self._fleet.planning_context, model, replica)
            effect = self._effects.shrinks.shrink(
                model, offer, requesters, context, self._fleet.held_bytes
            )
            self._start_effect(replica, "Shrink", effect)

    async def _step(
        self, model: ManagedModel, replica: ReplicaState, instances: Mapping[str, Instance]
    ) -> bool:
        """Perform the next action. Returns whether to look for another action immediately."""
        if replica.task is not None and replica.task.done():
            self._finish_effect(replica, replica.task)
            # The list of instances is older than the effect, so the next step needs a new one.
            self._wake()
            return False
        if model.is_deleting and replica.task is not None and not replica.is_stopping:
            replica.task.cancel()
        if model.is_deleting:
            replica.cancel_inquiry()
        instance = replica.instance_among(instances)
        self._schedule_replanning(replica)
        self._prepare(model, replica)
        await self._watch(model, replica, instance)
        snapshot = self._snapshot(model, replica, instance)
        action = next_action(
            snapshot,
            time.time(),
            backoff_s=self._settings.backoff_s,
            backoff_max_s=self._settings.backoff_max_s,
        )
        # A look for room without a waiting request is not shown as a start.
        replica.planning.looks_again = (
            replica.planning.looks_again and replica.attempt is None and not model.needs_evictions
        )
        match action:
            case NoAction():
                if not (replica.planning.looks_again and action.state == "starting"):
                    replica.status = action
                    replica.planning.looks_again = False
                if not replica.is_busy:
                    replica.setback.clear()
            case reconcile.Stop():
                self._start_stop(model, replica, action, snapshot)
            case (
                reconcile.RouteAction()
                | reconcile.NoteAbilities()
                | reconcile.Fail()
                | reconcile.EndAttemptAction()
            ):
                return await self._record(replica, action)
            case _:
                self._run_effect(model, replica, action, snapshot)
        return False

    @staticmethod
    def _schedule_replanning(replica: ReplicaState) -> None:
        waited_s = time.monotonic() - replica.planning.blocked_at
        if (
            replica.planning.blocked_reason is not None
            and not replica.planning.awaited_offers
            and waited_s > replica.planning.replan_s
        ):
            replica.planning.blocked_reason = None
            replica.planning.looks_again = True
            replica.planning.failed_planning = None
            replica.planning.failure_count += 1

    def _prepare(self, model: ManagedModel, replica: ReplicaState) -> None:
        """Prepare the next start while others leave for it, and end preparations that no start
        needs."""
        if not _is_prepared(model, replica):
            replica.cancel_preparation()
        elif (
            replica.planning.awaited_offers
            and model.is_first_in_line
            and replica.preparation is None
            and replica.planning.intended_plan is not None
        ):
            self._effects.starts.prepare(model, replica, replica.planning.intended_plan)

    async def _watch(
        self, model: ManagedModel, replica: ReplicaState, instance: Instance | None
    ) -> None:
        """Watch the instance of the live attempt, if it runs or has run."""
        attempt = replica.attempt
        if replica.watcher is not None or attempt is None or instance is None or model.is_deleting:
            return
        if instance.state == "created" or instance.fingerprint != attempt.fingerprint:
            return
        # A new gateway reads their files for seconds, while adopted engines serve.
        signatures = await asyncio.to_thread(self._sources.signatures)
        if replica.attempt is attempt:
            context = WatchContext(
                host=self._launcher.host,
                signatures=signatures,
                settings=self._settings,
                client=self._sources.client.keyed_client(instance.key),
                wake=self._wake,
                silent_s=self._sources.silent_s,
            )
            replica.watcher = Watcher(attempt, instance.name, instance.url or "", context)

    def _snapshot(
        self, model: ManagedModel, replica: ReplicaState, instance: Instance | None
    ) -> ReplicaSnapshot:
        """The state of a replica on which the next step is decided."""
        attempt = replica.attempt
        eviction = replica.eviction
        watcher = replica.watcher
        observation = watcher.observation if watcher else Observation(phase=replica.phase)
        if attempt is not None and (loss := self._gpus.failure(attempt.plan.gpus)) is not None:
            observation = observation.evolve(proof=observation.proof or loss)
        history = [past for past in replica.history if past.generation == replica.generation]
        return ReplicaSnapshot(
            is_wanted=not model.is_deleting and (attempt is not None or _may_start(model, replica)),
            policy=model.wish_of(replica).policy,
            attempt=attempt,
            history=reconcile.attempts_that_count(history, model.forgiven_at, time.time()),
            instance=instance,
            observation=observation,
            last_log_lines=tuple(watcher.tail) if watcher else (),
            planning=PlanState(
                replica.planning.blocked_reason,
                bool(replica.planning.awaited_offers),
                replica.planning.waits_for_request,
            ),
            demand=Demand(
                model.load_block_reason or model.pause_reason,
                model.is_stopped,
                model.needs_evictions,
                _has_spare(model, replica),
            ),
            leaving=PendingEviction()
            if eviction is None
            else PendingEviction(
                eviction.reason,
                is_drained=attempt is not None and self._drains.is_drained(attempt.instance_name),
                may_sleep=not eviction.stops_engine and _sleeps(model, replica),
            ),
            is_busy=replica.is_busy,
            is_spent=attempt is not None and replica.unsleepable_attempt == attempt.id,
        )

    def _run_effect(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        action: reconcile.Action,
        snapshot: ReplicaSnapshot,
    ) -> None:
        """Start a slow action as the replica's task."""
        effects = self._effects
        name = type(action).__name__
        context = partial(self._fleet.planning_context, model, replica)
        match action:
            case reconcile.MakePlan():
                if not replica.planning.looks_again:
                    replica.status = NoAction("starting", "planning")
                context_in_place = partial(context, is_in_place=True)
                self._start_effect(
                    replica, name, effects.plans.plan(model, replica, context, context_in_place)
                )
            case reconcile.Launch(attempt):
                replica.status = NoAction("starting", "launching")
                replica.launched_attempt, replica.conditions = attempt.id, StartConditions()
                self._start_effect(
                    replica, name, effects.starts.launch(model, replica, attempt, context)
                )
            case reconcile.VerifyAction(attempt):
                replica.status = NoAction("verifying", "proving that it generates")
                effect = effects.proofs.verify(replica, attempt, model.forgiven_at)
                self._start_effect(replica, name, effect)
            case reconcile.SleepAction(attempt):
                replica.status = NoAction("stopping", snapshot.leaving.reason)
                self._start_effect(replica, name, effects.sleeps.sleep(replica, attempt))
            case reconcile.WakeAction(attempt):
                replica.status = NoAction("starting", "waking up")
                effect = effects.sleeps.wake(
                    replica,
                    attempt,
                    partial(self._fleet.bytes_promised_to_others, replica),
                    lambda: self._fleet.sharing(model, model.wish).offers,
                    is_spare=snapshot.demand.is_spare,
                )
                self._start_effect(replica, name, effect)

    async def _record(
        self,
        replica: ReplicaState,
        action: reconcile.RouteAction
        | reconcile.NoteAbilities
        | reconcile.Fail
        | reconcile.EndAttemptAction,
    ) -> bool:
        """Record a change of the attempt. Returns whether to look for another action
        immediately."""
        attempts = self._effects.attempts
        name = type(action).__name__
        match action:
            case reconcile.RouteAction(attempt):
                await self._perform_effect(name, attempts.publish(replica, attempt))
                replica.status = NoAction("ready")
                return False
            case reconcile.NoteAbilities(attempt, abilities):
                await self._perform_effect(
                    name, attempts.record_abilities(replica, attempt, abilities)
                )
            case reconcile.Fail(attempt, failure):
                # The record may be refused for as long as the disk is full.
                replica.status = NoAction("starting", f"its engine failed: {failure.message}")
                await self._perform_effect(name, attempts.fail(replica, attempt, failure))
            case reconcile.EndAttemptAction(attempt):
                await self._perform_effect(name, attempts.retire(replica, attempt))
        return True

    def _start_stop(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        action: reconcile.Stop,
        snapshot: ReplicaSnapshot,
    ) -> None:
        leave_reason = snapshot.leaving.reason
        goes_on = snapshot.is_wanted and not leave_reason and not model.is_stopped
        replica.status = NoAction(
            "starting" if goes_on else "stopping", leave_reason or action.reason
        )
        has_served = (
            any(past.ready_at is not None for past in replica.attempts[-1:]) and not goes_on
        )
        grace_s = self._settings.stop_grace_s if has_served else _SHORT_GRACE_S
        replica.is_stopping = True
        hurry = (lambda: model.is_deleting) if has_served else None
        self._start_effect(replica, "Stop", self._stop(action.name, grace_s, hurry))

    def _start_effect(
        self, replica: ReplicaState, name: str, effect: Coroutine[Any, Any, None]
    ) -> None:
        replica.task = asyncio.create_task(self._perform_effect(name, effect))
        replica.task.add_done_callback(lambda _: self._wake())
        # A task that is cancelled before its first step never awaits the effect.
        replica.task.add_done_callback(lambda _: effect.close())

    async def _stop(self, name: str, grace_s: float, hurry: Callable[[], bool] | None) -> None:
        """Stop an engine. With `hurry`, an engine that has left the routes first answers its
        requests (`Drains.wait_until_drained`)."""
        if hurry is not None:
            await self._drains.wait_until_drained(name, hurry)
        await self._launcher.stop(name, grace_s)

    async def _perform_effect(self, name: str, effect: Coroutine[Any, Any, None]) -> None:
        self._failpoint.reach(name, "before")
        await effect
        self._failpoint.reach(name, "after")

    def _finish_effect(self, replica: ReplicaState, task: asyncio.Task[None]) -> None:
        replica.task = None
        replica.is_stopping = False
        replica.progress = ""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            raise error
        replica.setback.clear()


def _is_prepared(model: ManagedModel, replica: ReplicaState) -> bool:
    """Whether a start of the replica is under way, or waits for its turn."""
    if model.is_deleting or model.is_stopped or model.is_unloaded:
        return False
    if replica.attempt is not None:
        return replica.attempt.state == "starting"
    return (
        replica.is_busy
        or bool(replica.planning.awaited_offers)
        or (model.needs_evictions and replica.planning.blocked_reason is None)
    )


def _may_start(model: ManagedModel, replica: ReplicaState) -> bool:
    """Whether a replica without an engine gets one. A trial is not started again, unless it tries a
    changed wish."""
    if replica is model.trial:
        return replica.succession.seeks_plan
    return not model.is_surplus(replica)


def _has_spare(model: ManagedModel, replica: ReplicaState) -> bool:
    """Whether another copy of the model serves and stays."""
    return any(
        sibling is not replica and sibling.eviction is None
        for sibling in model.replicas
        if sibling.attempt and sibling.attempt.serves
    )


def _sleeps(model: ManagedModel, replica: ReplicaState) -> bool:
    """Whether the engine may sleep instead of stopping."""
    attempt = replica.attempt
    has_sleep_mode = attempt is not None and attempt.plan.sleep_mode.value
    return (
        has_sleep_mode
        and replica is not model.trial
        and not model.has_pending_changes
        and not model.is_deleting
    )
