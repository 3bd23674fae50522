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

from gateway.core import reconcile
from gateway.core.diagnose import learn
from gateway.core.reconcile import Rest, next_action
from gateway.domain import Attempt, Decision, Failure, Instance, Observation, Wish
from gateway.errors import FitserveError, HostError, NoPlan, NotFound, StoreError
from gateway.fleet import Model, Slot, route
from gateway.logs import remove_logs
from gateway.runner import Runner, instance_name, no_plan_reason
from gateway.serve import routes as routing
from gateway.store import Store
from gateway.verify import verify
from gateway.watch import EndpointWatcher, Watcher

if TYPE_CHECKING:
    import httpx

log = structlog.get_logger("fitserve.loop")

# How long a "no plan" stands before the planner looks at the machine again: memory may have become free.
_REPLAN_S = 30.0
# An engine that failed to start has nothing to finish; it gets a moment to end its workers.
_FAILED_GRACE_S = 1.0
_LAST_WORDS_S = 1.0


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
        self._wake = asyncio.Event()
        self._planning = asyncio.Lock()
        self._strays: set[asyncio.Task[None]] = set()

    # --- what the API calls ---

    async def add(self, wish: Wish) -> Model:
        """Record a new model durably, then start working on it. Raises Conflict, StoreError."""
        now = time.time()
        await asyncio.to_thread(self._store.add_model, wish, now)
        model = self._admit(Model(wish, now))
        self.wake()
        return model

    async def remove(self, name: str) -> None:
        """Mark for removal; the engines are stopped by the loop. Raises NotFound, StoreError."""
        await asyncio.to_thread(self._store.mark_deleting, name)
        self.model(name).deleting = True
        self.wake()

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
        await asyncio.to_thread(self._load)
        while True:
            self._wake.clear()
            try:
                await self._pass()
            except StoreError as error:
                self.store_problem = str(error)
                log.exception("the pass could not be recorded", error=str(error))
            except HostError as error:
                self.host_problem = str(error)
                log.exception("the host does not answer", error=str(error))
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
                if slot.watcher:
                    await slot.watcher.close()
        for task in list(self._strays):
            await _cancel(task)

    def _load(self) -> None:
        history: dict[tuple[str, int], list[Attempt]] = {}
        for attempt in self._store.attempts():
            history.setdefault((attempt.model, attempt.replica), []).append(attempt)
        for wish, created_at, deleting in self._store.models():
            slots = []
            known = max((index + 1 for name, index in history if name == wish.name), default=1)
            for index in range((wish.replicas or known) if wish.source else 0):
                past = history.get((wish.name, index), [])
                live = next((attempt for attempt in past if attempt.live), None)
                slots.append(Slot(wish.name, index, live, [attempt for attempt in past if not attempt.live]))
            self.models[wish.name] = Model(wish, created_at, deleting, slots)

    def _admit(self, model: Model) -> Model:
        model.slots = [Slot(model.wish.name, index) for index in range((model.wish.replicas or 1) if model.wish.source else 0)]
        self.models[model.wish.name] = model
        return model

    async def _pass(self) -> None:
        """One look at the world and, for every replica, the next step."""
        instances = await self._runner.host.list()
        self.host_problem = None
        # First of all: an engine that is gone gets no more requests, whatever else fails in this pass.
        self._publish_routes(instances)
        self._stop_strays(instances)
        for model in list(self.models.values()):
            self._watch_endpoints(model)
            for slot in model.slots:
                # Several steps may follow one another without anything new to see (fail, stop, plan).
                while await self._step(model, slot, instances):
                    pass
            if model.deleting:
                await self._forget(model, instances)
        self._publish_routes(instances)
        self.store_problem = None

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
        action = next_action(
            reconcile.Replica(
                wanted=not model.deleting,
                policy=model.wish.policy,
                attempt=slot.attempt,
                history=tuple(slot.history),
                instance=instance,
                seen=slot.watcher.observation if slot.watcher else Observation(phase=slot.phase),
                tail=tuple(slot.watcher.tail) if slot.watcher else (),
                blocked=slot.blocked,
                busy=slot.busy,
            ),
            time.time(),
            backoff_s=self._settings.backoff_s,
            backoff_max_s=self._settings.backoff_max_s,
        )
        match action:
            case Rest():
                slot.shown = action
            case reconcile.MakePlan():
                slot.shown = Rest("starting", "planning")
                self._start(slot, self._plan(model, slot))
            case reconcile.Launch(attempt):
                slot.shown = Rest("starting", "launching")
                self._start(slot, self._launch(model, slot, attempt))
            case reconcile.Verify(attempt):
                slot.shown = Rest("verifying", "proving that it generates")
                self._start(slot, self._verify(slot, attempt))
            case reconcile.Publish(attempt):
                slot.attempt = attempt.evolve(state="ready", ready_at=time.time())
                await asyncio.to_thread(self._store.save_attempt, slot.attempt)
                slot.shown = Rest("ready")
                log.info("ready", model=model.wish.name, replica=slot.index, plan=attempt.fingerprint)
            case reconcile.Fail(attempt, failure):
                await self._fail(slot, attempt, failure)
                return True
            case reconcile.Stop(name):
                slot.shown = Rest("stopping" if model.deleting else "starting", "stopping the engine")
                grace = self._settings.stop_grace_s if model.deleting else _FAILED_GRACE_S
                slot.stopping = True
                self._start(slot, self._stop(name, grace))
        return False

    # --- effects ---

    def _start(self, slot: Slot, effect: Coroutine[Any, Any, None]) -> None:
        slot.task = asyncio.create_task(effect)
        slot.task.add_done_callback(lambda _: self.wake())

    def _finish(self, slot: Slot, task: asyncio.Task[None]) -> None:
        slot.task, slot.stopping, slot.progress = None, False, ""
        if not task.cancelled() and (error := task.exception()) is not None:
            # Not one of ours, so a bug: say so and slow down, never spin.
            log.error("an effect broke", model=slot.model, replica=slot.index, exc_info=error)
            slot.blocked, slot.blocked_at = f"internal error: {type(error).__name__}: {error}", time.monotonic()

    async def _plan(self, model: Model, slot: Slot) -> None:
        # One at a time: two plans made side by side would count on the same free memory.
        async with self._planning:
            facts = await asyncio.to_thread(self._store.facts)
            try:
                decision = await self._runner.decide(model.wish, facts, self._claims(slot))
                model.decision = decision
                if not decision.plans:
                    raise NoPlan(no_plan_reason(decision))
                plan = decision.plans[0]
                if model.wish.replicas is None:
                    model.slots += [Slot(slot.model, index) for index in range(len(model.slots), plan.replicas.value)]
                port = await self._runner.host.allocate_port()
                slot.attempt = await asyncio.to_thread(self._store.add_attempt, slot.model, slot.index, plan, port, time.time())
                log.info("planned", model=slot.model, replica=slot.index, engine=str(plan.engine), plan=plan.fingerprint)
            except FitserveError as error:
                slot.blocked, slot.blocked_at = str(error), time.monotonic()
                log.warning("no plan", model=slot.model, replica=slot.index, reason=str(error))

    async def _launch(self, model: Model, slot: Slot, attempt: Attempt) -> None:
        def report(progress: str) -> None:
            slot.progress = progress

        try:
            await self._runner.launch(attempt, report, allow_remote_code=model.wish.policy.allow_remote_code)
        except FitserveError as error:
            kind = "host_error" if isinstance(error, HostError) else "download"
            failure = Failure(kind=kind, phase=slot.progress or "launching", message=error.message, advice=error.hint)
            if slot.attempt is attempt:
                await self._fail(slot, attempt, failure)

    async def _verify(self, slot: Slot, attempt: Attempt) -> None:
        watcher = slot.watcher
        if watcher is None:
            return
        failure = await verify(self._client(), watcher.url, attempt.model, attempt.plan, self._settings.start_timeout_s)
        if failure is None:
            watcher.note(verified=True, phase="serving")
        else:
            if failure.kind == "verification_failed":
                # A crash shows in the log a moment after the connection breaks, and names the cause better.
                await asyncio.sleep(_LAST_WORDS_S)
            watcher.fail(failure)

    async def _stop(self, name: str, grace_s: float) -> None:
        try:
            await self._runner.host.stop(name, grace_s)
        except FitserveError as error:
            log.exception("the engine could not be stopped", instance=name, error=str(error))
            await asyncio.sleep(1.0)

    async def _fail(self, slot: Slot, attempt: Attempt, failure: Failure) -> None:
        now = time.time()
        ended = attempt.evolve(state="failed", ended_at=now, failure=failure)
        await asyncio.to_thread(self._store.save_attempt, ended, learn(attempt, failure, now))
        log.warning(
            "failed", model=slot.model, replica=slot.index, kind=failure.kind, reason=failure.message, line=failure.line
        )
        slot.attempt = None
        slot.history.append(ended)
        if slot.task is not None and slot.task is not asyncio.current_task():
            slot.task.cancel()
        await self._unwatch(slot)

    async def _unwatch(self, slot: Slot) -> None:
        if slot.watcher is not None:
            watcher, slot.watcher = slot.watcher, None
            await watcher.close()

    def _watcher(self, attempt: Attempt, instance: Instance) -> Watcher:
        signatures = self._runner.profiles.signatures
        url = instance.url or ""
        return Watcher(attempt, instance.name, url, self._runner.host, signatures, self._settings, self.wake)

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
        known = {
            instance_name(attempt)
            for model in self.models.values()
            for slot in model.slots
            for attempt in [*slot.history, *([slot.attempt] if slot.attempt else [])]
        }
        for instance in instances:
            # A plan is recorded before its engine is started, so an unknown name cannot be one that is just starting.
            if instance.name not in known and not any(task.get_name() == instance.name for task in self._strays):
                log.warning("stopping an engine that belongs to nothing", instance=instance.name)
                task = asyncio.create_task(self._stop(instance.name, self._settings.stop_grace_s), name=instance.name)
                self._strays.add(task)
                task.add_done_callback(self._strays.discard)

    async def _forget(self, model: Model, instances: list[Instance]) -> None:
        """Remove a model once nothing of it runs."""
        name = model.wish.name
        for slot in model.slots:
            await self._unwatch(slot)
        if any(slot.busy for slot in model.slots) or any(instance.model == name for instance in instances):
            return
        await asyncio.to_thread(self._store.remove_model, name)
        for endpoint in model.endpoints:
            await endpoint.close()
        for slot in model.slots:
            for attempt in [*slot.history, *([slot.attempt] if slot.attempt else [])]:
                remove_logs(self._settings.data, instance_name(attempt))
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

    def _publish_routes(self, instances: list[Instance]) -> None:
        urls = {instance.name: instance.url for instance in instances if instance.state == "running" and instance.url}
        table = routing.RouteTable({name: route(model, urls) for name, model in self.models.items()})
        if table != self._routes.table:
            self._routes.table = table


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
