"""The next step of one replica: reads records and observation, calls `next_action`, and acts.

Slow effects run as one task per replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, NamedTuple

from gateway.controller.decisions import reconcile
from gateway.controller.decisions.reconcile import Rest, next_action
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
from gateway.controller.watch.watcher import Watcher
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Attempt, Instance, Observation, Offer
from gateway.errors import StoreError
from gateway.machine.gpu_watch import GpuWatch
from gateway.proxy.routing.drains import Drains

# Seconds before a replica without a plan is planned again: memory may have become free.
_REPLAN_S = 30.0
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


class ReplicaSteps:
    """Takes the steps of all replicas. The knowledge of each is in its `ReplicaState`."""

    def __init__(
        self,
        effects: Effects,
        fleet: Fleet,
        launcher: Launcher,
        gpus: GpuWatch,
        signatures: Callable[[], Signatures],
        client: EngineClient,
        wake: Callable[[], None],
        silent_s: Callable[[str], float | None],
        drains: Drains,
    ) -> None:
        """`wake` starts a pass. `silent_s`: see `Watcher`."""
        self._effects = effects
        self._fleet = fleet
        self._launcher = launcher
        self._settings = launcher.settings
        self._failpoint = Failpoint(launcher.settings.failpoint)
        self._gpus = gpus
        self._signatures = signatures
        self._client = client
        self._wake = wake
        self._silent_s = silent_s
        self._drains = drains

    async def attend(
        self, model: ManagedModel, replica: ReplicaState, instances: list[Instance]
    ) -> None:
        """Take the next steps of the replica. An unexpected error stays with the replica. Raises
        StoreError."""
        if replica.setback.rest_s:
            return
        try:
            # Several steps may follow one another in one pass: fail, stop, plan.
            while await self._step(model, replica, instances):
                pass
        except StoreError:
            raise
        except Exception as error:
            replica.setback.broke(error)

    def shrink(self, model: ManagedModel, take: Offer, requester: Collection[str]) -> None:
        """Have a serving model give its offer to the requesters, if nothing else is under way."""
        replica = model.replicas[take.replica]
        if not replica.busy:
            room = partial(self._fleet.planning_context, model, replica)
            effect = self._effects.shrinks.shrink(
                model, take, requester, room, self._fleet.held_bytes
            )
            self._start(replica, "Shrink", effect)

    async def _step(
        self, model: ManagedModel, replica: ReplicaState, instances: list[Instance]
    ) -> bool:
        """Perform the next action. Returns whether to look for another action at once."""
        if replica.task is not None and replica.task.done():
            self._finish(replica, replica.task)
            # The list of instances is older than the effect, so the next step needs a new one.
            self._wake()
            return False
        if model.deleting and replica.task is not None and not replica.stopping:
            replica.task.cancel()
        instance = replica.instance_among(instances)
        if (
            replica.blocked is not None
            and not replica.takes
            and time.monotonic() - replica.blocked_at > _REPLAN_S
        ):
            replica.blocked, replica.looks_again = None, True
        watched = instance is not None and instance.state != "created" and not model.deleting
        own = (
            replica.attempt is not None
            and instance is not None
            and instance.fingerprint == replica.attempt.fingerprint
        )
        if (
            replica.attempt is not None
            and instance is not None
            and own
            and watched
            and replica.watcher is None
        ):
            replica.watcher = self._watcher(replica.attempt, instance)
        observation = (
            replica.watcher.observation if replica.watcher else Observation(phase=replica.phase)
        )
        if (
            replica.attempt is not None
            and (loss := self._gpus.failure(replica.attempt.plan.gpus)) is not None
        ):
            observation = observation.evolve(proof=observation.proof or loss)
        # A trial is not started again, unless it tries a changed wish.
        wanted = not model.deleting and (
            replica.attempt is not None or replica is not model.trial or replica.seeks
        )
        history = [one for one in replica.history if one.generation == replica.generation]
        leaving = replica.leaving.reason if replica.leaving is not None else ""
        spare = any(
            one is not replica and one.leaving is None
            for one in model.replicas
            if one.attempt and one.attempt.serves
        )
        action = next_action(
            reconcile.ReplicaSnapshot(
                is_wanted=wanted,
                policy=model.wish_of(replica).policy,
                attempt=replica.attempt,
                history=reconcile.attempts_that_count(history, model.forgiven_at, time.time()),
                instance=instance,
                observation=observation,
                tail=tuple(replica.watcher.tail) if replica.watcher else (),
                blocked=replica.blocked,
                promised=bool(replica.takes),
                on_request=replica.on_request,
                busy=replica.busy,
                hold=model.hold,
                stopped=model.stopped,
                is_requested=model.asks,
                spare=spare,
                leaving=leaving,
                spent=replica.attempt is not None and replica.spent == replica.attempt.id,
                sleeps=replica.leaving is not None
                and not replica.leaving.ends
                and _sleeps(model, replica),
                drained=bool(
                    leaving and replica.attempt and self._drains.over(replica.attempt.instance_name)
                ),
            ),
            time.time(),
            backoff_s=self._settings.backoff_s,
            backoff_max_s=self._settings.backoff_max_s,
        )
        effects, name, room = (
            self._effects,
            type(action).__name__,
            partial(self._fleet.planning_context, model, replica),
        )
        instead = partial(self._fleet.planning_context, model, replica, instead=True)
        # A look for room without a waiting request is not shown as a start.
        replica.looks_again = replica.looks_again and replica.attempt is None and not model.asks
        match action:
            case Rest():
                if not (replica.looks_again and action.state == "starting"):
                    replica.status, replica.looks_again = action, False
                if not replica.busy:
                    replica.setback.over()
            case reconcile.MakePlan():
                if not replica.looks_again:
                    replica.status = Rest("starting", "planning")
                self._start(replica, name, effects.plans.plan(model, replica, room, instead))
            case reconcile.Launch(attempt):
                replica.status = Rest("starting", "launching")
                self._start(replica, name, effects.starts.launch(model, replica, attempt, room))
            case reconcile.Verify(attempt):
                replica.status = Rest("verifying", "proving that it generates")
                self._start(
                    replica, name, effects.proofs.verify(replica, attempt, model.forgiven_at)
                )
            case reconcile.Publish(attempt):
                await self._performed(name, effects.attempts.publish(replica, attempt))
                replica.status = Rest("ready")
            case reconcile.Fail(attempt, failure):
                await self._performed(name, effects.attempts.fail(replica, attempt, failure))
                return True
            case reconcile.Retire(attempt):
                await self._performed(name, effects.attempts.retire(replica, attempt))
                return True
            case reconcile.Sleep(attempt):
                replica.status = Rest("stopping", leaving)
                self._start(replica, name, effects.sleeps.sleep(replica, attempt))
            case reconcile.Wake(attempt):
                replica.status = Rest("starting", "waking up")
                claims, sharing = (
                    partial(self._fleet.claims, replica),
                    partial(self._fleet.sharing, model, model.wish),
                )
                effect = effects.sleeps.wake(
                    replica, attempt, claims, lambda: sharing().offers, spare=spare
                )
                self._start(replica, name, effect)
            case reconcile.Stop(instance_to_stop, why):
                replica.status = Rest(
                    "starting" if wanted and not leaving else "stopping", leaving or why
                )
                served = any(one.ready_at is not None for one in replica.attempts[-1:]) and (
                    bool(leaving) or not wanted
                )
                grace = self._settings.stop_grace_s if served else _SHORT_GRACE_S
                replica.stopping = True
                hurry = (lambda: model.deleting) if served else None
                self._start(replica, name, self._stop(instance_to_stop, grace, hurry))
        return False

    def _start(self, replica: ReplicaState, name: str, effect: Coroutine[Any, Any, None]) -> None:
        replica.task = asyncio.create_task(self._performed(name, effect))
        replica.task.add_done_callback(lambda _: self._wake())

    async def _stop(self, name: str, grace_s: float, hurry: Callable[[], bool] | None) -> None:
        """Stop an engine. With `hurry`, an engine that has left the routes first answers its
        requests (`Drains.ended`)."""
        if hurry is not None:
            await self._drains.ended(name, hurry)
        await self._launcher.stop(name, grace_s)

    async def _performed(self, name: str, effect: Coroutine[Any, Any, None]) -> None:
        self._failpoint.reach(name, "before")
        await effect
        self._failpoint.reach(name, "after")

    def _finish(self, replica: ReplicaState, task: asyncio.Task[None]) -> None:
        replica.task, replica.stopping, replica.progress = None, False, ""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            raise error
        replica.setback.over()

    def _watcher(self, attempt: Attempt, instance: Instance) -> Watcher:
        watched = (
            self._launcher.host,
            self._signatures(),
            self._settings,
            self._client.with_key(instance.key),
            self._wake,
            self._silent_s,
        )
        return Watcher(attempt, instance.name, instance.url or "", *watched)


def _sleeps(model: ManagedModel, replica: ReplicaState) -> bool:
    """Whether the engine may sleep instead of stopping."""
    attempt = replica.attempt
    own = attempt is not None and attempt.plan.sleep_mode.value
    return own and replica is not model.trial and not model.unsettled and not model.deleting
