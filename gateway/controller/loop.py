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
from gateway.controller.launcher import Runner, instance_name
from gateway.controller.replicas import Model, Slot, route
from gateway.controller.verify import alive
from gateway.controller.watcher import EndpointWatcher, Watcher
from gateway.core import reconcile
from gateway.core.reconcile import Rest, next_action
from gateway.domain import Attempt, Decision, Instance, Observation, Wish
from gateway.errors import HostError, NotFound, StoreError
from gateway.routing import routes as routing
from gateway.store.running_engines import Live, teach
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

    def __init__(self, store: Store, runner: Runner, client: Callable[[], httpx.AsyncClient], routes: routing.Routes) -> None:
        self.models: dict[str, Model] = {}
        self.host_problem: str | None = None
        self.store_problem: str | None = None
        self.last_pass = time.monotonic()
        self._store = store
        self._runner = runner
        self._client = client
        self._routes = routes
        self._settings = runner.settings
        self._live = Live(runner.settings.data)
        self._effects = Effects(store, self._live, runner, client)
        self._failpoint = Failpoint(runner.settings.failpoint)
        self._wake = asyncio.Event()
        self._lost = runner.gpus.lost
        self._strays: set[asyncio.Task[None]] = set()

    # --- what the API calls ---

    async def add(self, wish: Wish) -> Model:
        """Record a new model durably, then start working on it. Raises Conflict, StoreError."""
        self._store.changeable()
        now = time.time()
        await asyncio.to_thread(self._store.add_model, wish, now)
        model = self._admit(Model(wish, now))
        self.wake()
        return model

    async def remove(self, name: str) -> None:
        """Mark for removal; the engines are stopped by the loop. Raises NotFound, StoreError."""
        self._store.changeable()
        await asyncio.to_thread(self._store.mark_deleting, name)
        self.model(name).deleting = True
        self.wake()

    async def retry(self, name: str) -> Model:
        """Forget what failed, and start again now. Raises NotFound, StoreError."""
        self._store.changeable()
        model = self.model(name)
        now = time.time()
        await asyncio.to_thread(self._store.forgive, name, now)
        model.forgiven_at = now
        for slot in model.slots:
            slot.blocked = None
        self.wake()
        return model

    def model(self, name: str) -> Model:
        """Raises NotFound."""
        model = self.models.get(name)
        if model is None:
            raise NotFound(f"There is no model {name[:200]}.", hint="`fitserve ps` lists the models.")
        return model

    async def plan(self, wish: Wish, hardware: str | None = None) -> Decision:
        """What would be done for this wish now; nothing is recorded."""
        facts = await asyncio.to_thread(self._store.facts)
        return await self._runner.decide(wish, facts, self._claims(None), hardware)

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
                    log.error("the host does not answer", error=str(error))  # noqa: TRY400 - what is said is known
                self.host_problem = str(error)
                if not self._routes.table.models:
                    # Nothing is known to run, but what is wanted is known: clients are told to wait, not that it does not exist.
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
            for slot in model.slots:
                await _cancel(slot.task)
                await slot.unwatch()
        for task in list(self._strays):
            await _cancel(task)

    def load(self) -> None:
        """Read what is wanted and what was tried. Before the first request: a model that is kept must not be unknown."""
        history: dict[tuple[str, int], list[Attempt]] = {}
        if taught := teach(self._store, self._live):
            log.warning("the database was empty, what runs was entered again", attempts=taught)
        for attempt in self._store.attempts():
            history.setdefault((attempt.model, attempt.replica), []).append(attempt)
        for wish, created_at, deleting, forgiven_at in self._store.models():
            slots = []
            known = max((index + 1 for name, index in history if name == wish.name), default=1)
            for index in range((wish.replicas or known) if wish.source else 0):
                past = history.get((wish.name, index), [])
                live = next((attempt for attempt in past if attempt.live), None)
                slots.append(Slot(wish.name, index, live, [attempt for attempt in past if not attempt.live]))
            self.models[wish.name] = Model(wish, created_at, deleting, slots, forgiven_at=forgiven_at)

    def _admit(self, model: Model) -> Model:
        model.slots = [Slot(model.wish.name, index) for index in range((model.wish.replicas or 1) if model.wish.source else 0)]
        self.models[model.wish.name] = model
        return model

    async def _pass(self) -> None:
        """One look at the world and, for every replica, the next step."""
        instances = await self._runner.host.list()
        self.host_problem, problem = None, self._store.problem
        if self._store.failing is not None:
            # Nothing else may want to write for long, and somebody may have made room.
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(self._store.check)
            problem = problem or self._store.failing
        if self._lost is not self._runner.gpus.lost:
            # Other GPUs than before: what found no plan may find one.
            self._lost = self._runner.gpus.lost
            for slot in [slot for model in self.models.values() for slot in model.slots]:
                slot.blocked = None
        # First of all: an engine that is gone gets no more requests, whatever else fails in this pass.
        self._publish_routes(instances)
        self._stop_strays(instances)
        for model in list(self.models.values()):
            self._watch_endpoints(model)
            try:
                for slot in model.slots:
                    # Several steps may follow one another without anything new to see (fail, stop, plan).
                    while await self._step(model, slot, instances):
                        pass
                if model.deleting:
                    await self._forget(model, instances)
            except StoreError as error:
                # What could not be recorded is not done, and is tried again; other models go on.
                if self.store_problem is None:
                    log.error("a step could not be recorded", model=model.wish.name, error=str(error))  # noqa: TRY400
                problem = str(error)
        self._publish_routes(instances)
        self.store_problem = problem

    async def _step(self, model: Model, slot: Slot, instances: list[Instance]) -> bool:
        """Perform the next action of one replica; whether to ask again at once."""
        if slot.task is not None and slot.task.done():
            self._finish(slot, slot.task)
            # What the effect did is not in this pass's list of instances: look again before the next step.
            self.wake()
            return False
        if model.deleting and slot.task is not None and not slot.stopping:
            slot.task.cancel()
        instance = self._instance_of(slot, instances)
        if slot.blocked is not None and time.monotonic() - slot.blocked_at > _REPLAN_S:
            slot.blocked = None
        watched = instance is not None and instance.state != "created" and not model.deleting
        if slot.attempt is not None and instance is not None and watched and slot.watcher is None:
            slot.watcher = self._watcher(slot.attempt, instance)
        seen = slot.watcher.observation if slot.watcher else Observation(phase=slot.phase)
        if slot.attempt is not None and (loss := self._runner.gpus.failure(slot.attempt.plan.gpus)) is not None:
            seen = seen.evolve(proof=seen.proof or loss)
        action = next_action(
            reconcile.Replica(
                wanted=not model.deleting,
                policy=model.wish.policy,
                attempt=slot.attempt,
                history=reconcile.counted(slot.history, model.forgiven_at, time.time()),
                instance=instance,
                seen=seen,
                tail=tuple(slot.watcher.tail) if slot.watcher else (),
                blocked=slot.blocked,
                busy=slot.busy,
            ),
            time.time(),
            backoff_s=self._settings.backoff_s,
            backoff_max_s=self._settings.backoff_max_s,
        )
        effects, name = self._effects, type(action).__name__
        match action:
            case Rest():
                slot.shown = action
            case reconcile.MakePlan():
                slot.shown = Rest("starting", "planning")
                self._start(slot, name, effects.plan(model, slot, lambda: self._claims(slot), self._ports))
            case reconcile.Launch(attempt):
                slot.shown = Rest("starting", "launching")
                self._start(slot, name, effects.launch(model, slot, attempt))
            case reconcile.Verify(attempt):
                slot.shown = Rest("verifying", "proving that it generates")
                self._start(slot, name, effects.verify(slot, attempt))
            case reconcile.Publish(attempt):
                await self._performed(name, effects.publish(slot, attempt))
                slot.shown = Rest("ready")
            case reconcile.Fail(attempt, failure):
                await self._performed(name, effects.fail(slot, attempt, failure))
                return True
            case reconcile.Stop(instance_to_stop, why):
                slot.shown = Rest("stopping" if model.deleting else "starting", why)
                grace = self._settings.stop_grace_s if model.deleting else _FAILED_GRACE_S
                slot.stopping = True
                self._start(slot, name, effects.stop(instance_to_stop, grace))
        return False

    # --- effects ---

    def _start(self, slot: Slot, name: str, effect: Coroutine[Any, Any, None]) -> None:
        slot.task = asyncio.create_task(self._performed(name, effect))
        slot.task.add_done_callback(lambda _: self.wake())

    async def _performed(self, name: str, effect: Coroutine[Any, Any, None]) -> None:
        self._failpoint.reach(name, "before")
        await effect
        self._failpoint.reach(name, "after")

    def _finish(self, slot: Slot, task: asyncio.Task[None]) -> None:
        slot.task, slot.stopping, slot.progress = None, False, ""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StoreError):
            raise error
        if error is not None:
            # Not one of ours, so a bug: say so and slow down, never spin.
            log.error("an effect broke", model=slot.model, replica=slot.index, exc_info=error)
            slot.block(f"internal error: {type(error).__name__}: {error}")

    def _watcher(self, attempt: Attempt, instance: Instance) -> Watcher:
        signatures = self._runner.profiles.signatures
        url = instance.url or ""

        async def canary(watcher: Watcher, timeout_s: float) -> bool:
            return await alive(self._client(), watcher.url, attempt.model, attempt.plan, timeout_s)

        watched = (self._runner.host, signatures, self._settings, self.wake, self._routes.silent_s, canary)
        return Watcher(attempt, instance.name, url, *watched)

    def _watch_endpoints(self, model: Model) -> None:
        if not model.endpoints and not model.deleting:
            for endpoint in model.wish.endpoints:
                watcher = EndpointWatcher(
                    model.wish.name, endpoint, self._client(), self._settings.health_interval_s, self.wake
                )
                model.endpoints.append(watcher)

    # --- bookkeeping ---

    def _instance_of(self, slot: Slot, instances: list[Instance]) -> Instance | None:
        """The instance of the live attempt, or else one that an ended attempt of this replica left behind."""
        names = [instance_name(slot.attempt)] if slot.attempt else []
        names += [instance_name(attempt) for attempt in reversed(slot.history)]
        found = {instance.name: instance for instance in instances}
        leftovers = [found[name] for name in names if name in found]
        if slot.attempt is None or (leftovers and leftovers[0].attempt == slot.attempt.id):
            return leftovers[0] if leftovers else None
        return None

    def _stop_strays(self, instances: list[Instance]) -> None:
        """Instances of no attempt that we know: a model that was removed, or a database that was set back."""
        known = {instance_name(attempt) for model in self.models.values() for slot in model.slots for attempt in slot.attempts}
        for instance in instances:
            # A plan is recorded before its engine is started, so an unknown name cannot be one that is just starting.
            if instance.name not in known and not any(task.get_name() == instance.name for task in self._strays):
                log.warning("stopping an engine that belongs to nothing", instance=instance.name)
                task = asyncio.create_task(self._effects.stop(instance.name, self._settings.stop_grace_s), name=instance.name)
                self._strays.add(task)
                task.add_done_callback(self._strays.discard)

    async def _forget(self, model: Model, instances: list[Instance]) -> None:
        """Remove a model once nothing of it runs."""
        name = model.wish.name
        for slot in model.slots:
            await slot.unwatch()
        if any(slot.busy for slot in model.slots) or any(instance.model == name for instance in instances):
            return
        # Before the database forgets them, so that they never bring back a model that was removed.
        for slot in model.slots:
            for attempt in slot.attempts:
                self._live.remove(instance_name(attempt))
                remove_logs(self._settings.data, instance_name(attempt))
        await asyncio.to_thread(self._store.remove_model, name)
        for endpoint in model.endpoints:
            await endpoint.close()
        del self.models[name]
        log.info("removed", model=name)

    def _claims(self, asking: Slot | None) -> dict[str, int]:
        """Bytes per GPU that live attempts may use, the asking replica's own aside."""
        claims: dict[str, int] = {}
        for model in self.models.values():
            for slot in model.slots:
                if slot.attempt is not None and slot is not asking:
                    for uuid in slot.attempt.plan.gpus:
                        claims[uuid] = claims.get(uuid, 0) + slot.attempt.plan.memory.budget_bytes
        return claims

    def _ports(self) -> set[int]:
        """Of every start that is recorded and not ended."""
        return {slot.attempt.port for model in self.models.values() for slot in model.slots if slot.attempt is not None}

    def _publish_routes(self, instances: list[Instance]) -> None:
        slots = [slot for model in self.models.values() for slot in model.slots]
        plans = {instance_name(slot.attempt): slot.attempt.fingerprint for slot in slots if slot.attempt is not None}
        # An engine with another plan than the one that was recorded is about to be replaced.
        own = [instance for instance in instances if instance.fingerprint == plans.get(instance.name)]
        urls = {instance.name: instance.url for instance in own if instance.state == "running" and instance.url}
        table = routing.RouteTable({name: route(model, urls) for name, model in self.models.items()})
        if table != self._routes.table:
            self._routes.table = table


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
