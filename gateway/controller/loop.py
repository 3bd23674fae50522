"""The loop: the only writer. It compares what is wanted with what is there, asks `next_action`, acts, records.

Level-triggered: events only wake it, and each pass works from what is true now, so a crash at any point costs one
more pass. Slow effects (planning, launching, verifying, stopping) run as one task per replica; the loop never waits
for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from gateway.controller.effects import Effects
from gateway.controller.engine_logs import remove_logs
from gateway.controller.failpoint import Failpoint
from gateway.controller.fleet import Fleet
from gateway.controller.launcher import Launcher
from gateway.controller.managed_model import ManagedModel, ReplicaState
from gateway.controller.planner import Planner
from gateway.controller.verify import alive
from gateway.controller.watcher import EndpointWatcher, Watcher
from gateway.core import reconcile
from gateway.core.failures.signatures import Signatures
from gateway.core.reconcile import Rest, next_action
from gateway.domain import Attempt, Decision, Hardware, Instance, Observation, Wish
from gateway.errors import HostError, NotFound, StoreError
from gateway.machine.gpu_watch import GpuWatch
from gateway.routing.routes import Routes
from gateway.store.running_engines import RunningEngines, restore_running
from gateway.store.store import Store

if TYPE_CHECKING:
    import httpx

log = structlog.get_logger("fitserve.loop")

# How long a "no plan" stands before the planner looks at the machine again: memory may have become free.
_REPLAN_S = 30.0
# An engine that failed to start has nothing to finish; it gets a moment to end its workers.
_FAILED_GRACE_S = 1.0


class Loop:
    """Owns the state. The API reads `models` and calls `add` and `remove`; everything else happens in `run`."""

    def __init__(
        self,
        store: Store,
        planner: Planner,
        launcher: Launcher,
        gpus: GpuWatch,
        signatures: Callable[[], Signatures],
        client: Callable[[], httpx.AsyncClient],
        routes: Routes,
    ) -> None:
        """signatures: gives what engines print when they fail. client: makes the control calls to engines."""
        self._fleet = Fleet()
        self.models = self._fleet.models
        self.host_problem: str | None = None
        self.store_problem: str | None = None
        self.last_pass = time.monotonic()
        self._store = store
        self._planner = planner
        self._host = launcher.host
        self._gpus = gpus
        self._signatures = signatures
        self._client = client
        self._routes = routes
        self._settings = launcher.settings
        self._running = RunningEngines(launcher.settings.data)
        self._effects = Effects(store, self._running, planner, launcher, gpus, client)
        self._failpoint = Failpoint(launcher.settings.failpoint)
        self._wake = asyncio.Event()
        self._lost = gpus.lost
        self._strays: set[asyncio.Task[None]] = set()

    # --- what the API calls ---

    async def add(self, wish: Wish) -> ManagedModel:
        """Record a new model durably, then start working on it. Raises Conflict, StoreError."""
        self._store.changeable()
        now = time.time()
        await asyncio.to_thread(self._store.add_model, wish, now)
        model = self._fleet.admit(ManagedModel(wish, now))
        self.wake()
        return model

    async def remove(self, name: str) -> None:
        """Mark for removal; the engines are stopped by the loop. Raises NotFound, StoreError."""
        self._store.changeable()
        await asyncio.to_thread(self._store.mark_deleting, name)
        self.model(name).deleting = True
        self.wake()

    async def retry(self, name: str) -> ManagedModel:
        """Forget what failed, and start again now. Raises NotFound, StoreError."""
        self._store.changeable()
        model = self.model(name)
        now = time.time()
        await asyncio.to_thread(self._store.forgive, name, now)
        model.forgiven_at = now
        for replica in model.replicas:
            replica.blocked = None
        self.wake()
        return model

    def model(self, name: str) -> ManagedModel:
        """Raises NotFound."""
        model = self.models.get(name)
        if model is None:
            raise NotFound(f"There is no model {name[:200]}.", hint="`fitserve ps` lists the models.")
        return model

    async def plan(self, wish: Wish, hardware: str | None = None) -> Decision:
        """What would be done for this wish now; nothing is recorded."""
        facts = await asyncio.to_thread(self._store.facts)
        return await self._planner.decide(wish, facts, self._fleet.claims(None), hardware)

    async def hardware(self) -> Hardware:
        """What is in this machine now; GPUs that are lost say so."""
        return await self._planner.hardware()

    def wake(self) -> None:
        self._wake.set()

    # --- running ---

    async def run(self) -> None:
        """Until cancelled. Engines go on running after it; `close` lets go of them."""
        while True:
            self._wake.clear()
            try:
                await self._pass()
            except HostError as error:
                if self.host_problem is None:
                    log.error("the host does not answer", error=str(error))  # noqa: TRY400 - the traceback adds nothing
                self.host_problem = str(error)
                if not self._routes.table.models:
                    # The wanted models are known though no engine is: their clients are asked to wait, and do not hear that they do not exist.
                    self._publish_routes([])
            self.last_pass = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.tick_s):
                    await self._wake.wait()

    async def close(self) -> None:
        """Stop watching and wait for nothing; engines go on running."""
        for model in self.models.values():
            for endpoint in model.endpoints:
                await endpoint.close()
            for replica in model.replicas:
                await _cancel(replica.task)
                await replica.unwatch()
        for task in list(self._strays):
            await _cancel(task)

    def load(self) -> None:
        """Read what is wanted and what was tried, before the first request: no model may be unknown to clients that wait for it."""
        if restored := restore_running(self._store, self._running):
            log.warning("the database was empty, what runs was entered again", attempts=restored)
        self._fleet.load(self._store)

    async def _pass(self) -> None:
        """One look at the world and, for every replica, the next step."""
        instances = await self._host.list()
        self.host_problem, problem = None, self._store.problem
        if self._store.failing is not None:
            # No other change may come for long; so try whether the disk has room again.
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(self._store.check)
            problem = problem or self._store.failing
        if self._lost is not self._gpus.lost:
            # The set of lost GPUs changed: a replica without a plan may find one.
            self._lost = self._gpus.lost
            for replica in self._fleet.replicas():
                replica.blocked = None
        # Before anything that may fail: an engine that is gone gets no more requests.
        self._publish_routes(instances)
        self._stop_strays(instances)
        for model in list(self.models.values()):
            self._watch_endpoints(model)
            try:
                for replica in model.replicas:
                    # Several steps may follow one another in one pass (fail, stop, plan).
                    while await self._step(model, replica, instances):
                        pass
                if model.deleting:
                    await self._forget(model, instances)
            except StoreError as error:
                # A step that could not be recorded is not done, and is tried again; other models go on.
                if self.store_problem is None:
                    log.error("a step could not be recorded", model=model.wish.name, error=str(error))  # noqa: TRY400
                problem = str(error)
        self._publish_routes(instances)
        self.store_problem = problem

    async def _step(self, model: ManagedModel, replica: ReplicaState, instances: list[Instance]) -> bool:
        """Perform the next action of one replica. Returns whether to ask for another action at once."""
        if replica.task is not None and replica.task.done():
            self._finish(replica, replica.task)
            # The list of instances is older than the effect: list them again before the next step.
            self.wake()
            return False
        if model.deleting and replica.task is not None and not replica.stopping:
            replica.task.cancel()
        instance = replica.instance_among(instances)
        if replica.blocked is not None and time.monotonic() - replica.blocked_at > _REPLAN_S:
            replica.blocked = None
        watched = instance is not None and instance.state != "created" and not model.deleting
        if replica.attempt is not None and instance is not None and watched and replica.watcher is None:
            replica.watcher = self._watcher(replica.attempt, instance)
        seen = replica.watcher.observation if replica.watcher else Observation(phase=replica.phase)
        if replica.attempt is not None and (loss := self._gpus.failure(replica.attempt.plan.gpus)) is not None:
            seen = seen.evolve(proof=seen.proof or loss)
        action = next_action(
            reconcile.ReplicaSnapshot(
                wanted=not model.deleting,
                policy=model.wish.policy,
                attempt=replica.attempt,
                history=reconcile.counted(replica.history, model.forgiven_at, time.time()),
                instance=instance,
                seen=seen,
                tail=tuple(replica.watcher.tail) if replica.watcher else (),
                blocked=replica.blocked,
                busy=replica.busy,
            ),
            time.time(),
            backoff_s=self._settings.backoff_s,
            backoff_max_s=self._settings.backoff_max_s,
        )
        effects, name = self._effects, type(action).__name__
        match action:
            case Rest():
                replica.shown = action
            case reconcile.MakePlan():
                replica.shown = Rest("starting", "planning")
                self._start(replica, name, effects.plan(model, replica, lambda: self._fleet.claims(replica), self._fleet.ports))
            case reconcile.Launch(attempt):
                replica.shown = Rest("starting", "launching")
                self._start(replica, name, effects.launch(model, replica, attempt))
            case reconcile.Verify(attempt):
                replica.shown = Rest("verifying", "proving that it generates")
                self._start(replica, name, effects.verify(replica, attempt))
            case reconcile.Publish(attempt):
                await self._performed(name, effects.publish(replica, attempt))
                replica.shown = Rest("ready")
            case reconcile.Fail(attempt, failure):
                await self._performed(name, effects.fail(replica, attempt, failure))
                return True
            case reconcile.Stop(instance_to_stop, why):
                replica.shown = Rest("stopping" if model.deleting else "starting", why)
                grace = self._settings.stop_grace_s if model.deleting else _FAILED_GRACE_S
                replica.stopping = True
                self._start(replica, name, effects.stop(instance_to_stop, grace))
        return False

    # --- effects ---

    def _start(self, replica: ReplicaState, name: str, effect: Coroutine[Any, Any, None]) -> None:
        replica.task = asyncio.create_task(self._performed(name, effect))
        replica.task.add_done_callback(lambda _: self.wake())

    async def _performed(self, name: str, effect: Coroutine[Any, Any, None]) -> None:
        self._failpoint.reach(name, "before")
        await effect
        self._failpoint.reach(name, "after")

    def _finish(self, replica: ReplicaState, task: asyncio.Task[None]) -> None:
        replica.task, replica.stopping, replica.progress = None, False, ""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreError):
            raise error
        if error is not None:
            # An error that we did not expect is a bug: log it and slow down, so that the loop never spins.
            log.error("an effect broke", model=replica.model, replica=replica.index, exc_info=error)
            replica.block(f"internal error: {type(error).__name__}: {error}")

    def _watcher(self, attempt: Attempt, instance: Instance) -> Watcher:
        url = instance.url or ""

        async def canary(watcher: Watcher, timeout_s: float) -> bool:
            return await alive(self._client(), watcher.url, attempt.model, attempt.plan, timeout_s)

        watched = (self._host, self._signatures(), self._settings, self.wake, self._routes.silent_s, canary)
        return Watcher(attempt, instance.name, url, *watched)

    def _watch_endpoints(self, model: ManagedModel) -> None:
        if not model.endpoints and not model.deleting:
            for endpoint in model.wish.endpoints:
                watcher = EndpointWatcher(
                    model.wish.name, endpoint, self._client(), self._settings.health_interval_s, self.wake
                )
                model.endpoints.append(watcher)

    # --- bookkeeping ---

    def _stop_strays(self, instances: list[Instance]) -> None:
        """Instances of no attempt that we know: a model that was removed, or a database that was set back."""
        known = self._fleet.instance_names()
        for instance in instances:
            # A plan is recorded before its engine is started, so an instance without a record is not one that just starts.
            if instance.name not in known and not any(task.get_name() == instance.name for task in self._strays):
                log.warning("stopping an engine that belongs to nothing", instance=instance.name)
                task = asyncio.create_task(self._effects.stop(instance.name, self._settings.stop_grace_s), name=instance.name)
                self._strays.add(task)
                task.add_done_callback(self._strays.discard)

    async def _forget(self, model: ManagedModel, instances: list[Instance]) -> None:
        """Remove a model once nothing of it runs."""
        name = model.wish.name
        for replica in model.replicas:
            await replica.unwatch()
        if any(replica.busy for replica in model.replicas) or any(instance.model == name for instance in instances):
            return
        # Before the database forgets the attempts, so that these records never bring back a model that was removed.
        for replica in model.replicas:
            for attempt in replica.attempts:
                self._running.remove(attempt.instance_name)
                remove_logs(self._settings.data, attempt.instance_name)
        await asyncio.to_thread(self._store.remove_model, name)
        for endpoint in model.endpoints:
            await endpoint.close()
        del self.models[name]
        log.info("removed", model=name)

    def _publish_routes(self, instances: list[Instance]) -> None:
        table = self._fleet.route_table(instances)
        if table != self._routes.table:
            self._routes.table = table


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
