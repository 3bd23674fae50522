"""The loop: the only writer. It compares what is wanted with what is there, and has every replica take its next step.

Level-triggered: events only wake it, and each pass works from what is true now, so a crash at any point costs one
more pass. An error that nobody expected stays with the replica or the model that met it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gateway.access.endpoint_keys import EndpointKeys
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.residents import Residents
from gateway.controller.steps.change_steps import ChangeSteps
from gateway.controller.steps.effects import Effects
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.planner import Planner
from gateway.controller.steps.replica_steps import ReplicaSteps
from gateway.controller.steps.sleep_steps import SleepSteps
from gateway.controller.steps.start_gate import StartGate
from gateway.controller.strays import Strays
from gateway.controller.watch.endpoint_watcher import EndpointKey, EndpointWatcher
from gateway.controller.watch.engine_client import EngineClient
from gateway.core.failures.signatures import Signatures
from gateway.core.reconcile import Rest
from gateway.domain import Attempt, Change, Failure, Hardware, Instance, Offer, Plan, Planned, RunningPlan, Served, Wish
from gateway.domain.plan import ALONE
from gateway.errors import BadRequest, Conflict, HostError, StoreError, no_model
from gateway.failpoint import Failpoint
from gateway.logging import Logger
from gateway.machine.gpu_watch import GpuWatch
from gateway.routing.drains import Drains
from gateway.routing.routes import Routes
from gateway.store.engine_logs import remove_logs
from gateway.store.running_engines import RunningEngines, restore_running
from gateway.store.store import Store
from gateway.supervision import Setback

log = Logger("fitserve.loop")

# Calls to engines at once, and as many to endpoints.
_CALLS_AT_ONCE = 128
# So many endpoints are asked as often as the settings say. Of more, each is asked less often, so that all cost as much as these.
_ENDPOINTS = 300
# With their rests these take about two minutes.
_MOST_BROKEN_PASSES = 8
_ENDED_WITH_US = Failure(
    kind="ended_with_gateway",
    phase="serving",
    message="The engine was ended with the gateway, as FITSERVE_STOP_ENGINES asks for.",
    proves="nothing",
)


class Loop:
    """Owns the state. The API reads `models` and calls `add` and `remove`; everything else happens in `run`."""

    def __init__(
        self,
        store: Store,
        planner: Planner,
        launcher: Launcher,
        gpus: GpuWatch,
        signatures: Callable[[], Signatures],
        routes: Routes,
        ended: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """signatures: gives what engines print when they fail. ended: how many requests of each model have ended so far."""
        self._fleet = Fleet(launcher.settings.start_timeout_s, launcher.settings.keep_alive)
        self.models = self._fleet.models
        self.host_problem: str | None = None
        self.store_problem: str | None = None
        self.last_pass = time.monotonic()
        self.passed: Callable[[], object] = lambda: None
        """Called after each pass, with what came of it in `models`."""
        self._store = store
        self._planner = planner
        self._host = launcher.host
        self._gpus = gpus
        self._routes = routes
        self._settings = launcher.settings
        self._running = RunningEngines(launcher.settings.data)
        # Apart, so that no number of endpoints that are away keeps the engines of this machine waiting.
        engine_client, self._endpoint_client = EngineClient(_CALLS_AT_ONCE), EngineClient(_CALLS_AT_ONCE)
        self._endpoint_keys = EndpointKeys(launcher.settings.data)
        self._gate = StartGate(self._fleet, planner.hardware, launcher.settings.start_timeout_s)
        self._drains = Drains(routes, launcher.settings.drain_s)
        effects = Effects(store, self._running, planner, launcher, gpus, self._gate, self._drains, signatures)
        self.residents = Residents(self._fleet, routes, store, launcher.settings, self._gate.measures, ended)
        watching = (gpus, signatures, engine_client, self.wake, routes.silent_s, self._drains)
        self._effects = effects
        sleeping = SleepSteps(store, planner, launcher, self._gate, effects.planning)
        self._steps = ReplicaSteps(effects, sleeping, self._fleet, launcher, *watching)
        self._changes = ChangeSteps(effects, Failpoint(launcher.settings.failpoint), self._drains)
        self._strays = Strays(effects.stop, launcher.settings.stop_grace_s, self.wake)
        self._setback = Setback("the control loop")
        # Of wishes one at a time is held against the others and recorded: no two take one name, and none is lost.
        self._wishing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._instances: list[Instance] | None = None
        """As of the last look; None: nobody has looked yet."""
        routes.demanded = self.wake
        self._lost = gpus.lost

    # --- what the API calls ---

    async def add(self, wish: Wish) -> ManagedModel:
        """Record a new model durably, then start working on it. Raises Conflict, StoreError."""
        self._store.changeable()
        async with self._wishing:
            self._fleet.check_names(wish)
            now = time.time()
            await asyncio.to_thread(self._store.add_model, wish, now)
            model = self._fleet.admit(ManagedModel(wish, now))
        if self._instances is not None:
            # So that it is no unknown model for whoever asks it as soon as this is answered.
            self._publish_routes(self._instances)
        self.wake()
        return model

    async def remove(self, name: str) -> None:
        """Mark for removal; the engines are stopped by the loop. Raises NotFound, StoreError."""
        self._store.changeable()
        await asyncio.to_thread(self._store.mark_deleting, name)
        self.model(name).deleting = True
        self.wake()

    async def change(self, model: ManagedModel, old: Wish, wish: Wish, *, anew: bool) -> ManagedModel:
        """Record another wish for a model durably, then bring its engines to it. old: the wish that it was made of. anew: other engines may be
        needed. Raises NotFound, Conflict, StoreError."""
        self._store.changeable()
        name = model.wish.name
        async with self._wishing:
            if self.models.get(name) is not model or model.wish != old:
                raise Conflict(f"The model {name} was changed meanwhile.", hint="Nothing was changed; try again.")
            if model.deleting:
                raise Conflict(f"The model {name} is being removed.", hint="Add it again when it is gone.")
            if model.change is not None and not model.change.refused:
                ends = f"`fitserve show {name}` tells how far that is; try again then."
                if model.stopped:
                    ends = f"It was stopped meanwhile: `fitserve start {name}` goes on with that."
                raise Conflict(f"The model {name} is being changed already.", hint=ends)
            self._fleet.check_names(wish)
            if not anew:
                await self._effects.enforce(model, wish, model.generation)
            elif not model.serving:
                # There is nothing to go back to.
                await self._effects.enforce(model, wish, model.newest + 1)
            else:
                change = Change(wish=wish, generation=model.newest + 1, at=time.time())
                await asyncio.to_thread(self._store.save_change, model.wish, model.generation, change)
                model.change = change
            if anew:
                model.problems_of_asking.clear()
                model.answers = {}
        self.wake()
        return model

    async def retry(self, name: str) -> ManagedModel:
        """Forget what failed, and start again now. Raises NotFound, StoreError."""
        self._store.changeable()
        model = self.model(name)
        now = time.time()
        await asyncio.to_thread(self._store.forgive, name, now)
        model.forgiven_at = now
        model.problems_of_asking.clear()
        # What is asked or started meanwhile keeps the old ones for itself. Answers are on disk, as long as what gave them is here.
        model.pins, model.answers = {}, {}
        model.setback.over()
        for replica in model.replicas:
            replica.blocked = None
            replica.setback.over()
        self.wake()
        return model

    async def stop(self, name: str) -> ManagedModel:
        """End its engines and load it no more until `start`; it is not forgotten. Raises NotFound, BadRequest, StoreError."""
        return await self._set_stopped(name, stopped=True)

    async def start(self, name: str) -> ManagedModel:
        """Load it again, and from now on as its policy says. Raises NotFound, BadRequest, StoreError."""
        return await self._set_stopped(name, stopped=False)

    async def _set_stopped(self, name: str, *, stopped: bool) -> ManagedModel:
        self._store.changeable()
        model = self.model(name)
        if not model.replicas:
            raise BadRequest(f"{name} is an engine that runs elsewhere.", hint="Stop it there, or `fitserve rm` it here.")
        await asyncio.to_thread(self._store.set_stopped, name, stopped=stopped)
        model.stopped = stopped
        for replica in model.replicas:  # as it is shown until the next pass
            engine = replica.attempt is not None or replica.busy
            if stopped and engine:
                replica.shown = Rest("stopping", "its owner stops it; what it answers is finished first")
            elif not stopped and not engine:
                replica.shown = Rest("starting", "its owner starts it")
        if not stopped:
            # Being started is being asked.
            model.used_at, model.gave_way = time.time(), False
        self.wake()
        return model

    def model(self, name: str) -> ManagedModel:
        """Raises NotFound."""
        model = self.models.get(name)
        if model is None:
            names = {known: one.wish.name for one in self.models.values() for known in (one.wish.name, *one.wish.aliases)}
            raise no_model(name, names)
        return model

    async def named(self, wish: Wish) -> Wish:
        """As the planner's."""
        return await self._planner.named(wish)

    async def plan(self, wish: Wish, hardware: str | None = None, *, others: bool = False) -> Planned:
        """What would be done for this wish now; nothing is recorded. others: and what engines would give that are not here."""
        facts = await asyncio.to_thread(self._store.fact_texts)
        beside = wish if hardware else self._fleet.beside(wish)
        sharing = ALONE if hardware else self._fleet.sharing(None, wish)
        return await self._planner.decide(beside, facts, self._fleet.claims(None), hardware, others=others, sharing=sharing)

    async def plan_change(self, model: ManagedModel, wish: Wish) -> Planned:
        """What would be done for this wish in the place of what the model has now; nothing is recorded."""
        facts, held = await asyncio.to_thread(self._store.fact_texts), self._fleet.held(model)
        claims = {uuid: size - held.get(uuid, 0) for uuid, size in self._fleet.claims(None).items()}
        known = facts, claims, None, model.answers, model.pins
        sharing = self._fleet.sharing(model, wish)
        return await self._planner.decide(self._fleet.beside(wish), *known, others=True, sharing=sharing)

    async def compared(
        self,
        model: ManagedModel,
        plan: Plan,
        replica: ReplicaState | None = None,
        *,
        beside: bool = False,
        seen: tuple[Served, ...] = (),
        against: Plan | None = None,
    ) -> Planned:
        """With a plan that should be better than this one, which serves, once something is known of that; `beside`: that can run while it
        serves. replica: for this one alone; the others stay. seen, against: as in RunningPlan. Raises BadModel and its kin."""
        facts, held = await asyncio.to_thread(self._store.fact_texts), {} if beside else self._fleet.held(model, replica)
        claims = {uuid: size - held.get(uuid, 0) for uuid, size in self._fleet.claims(None).items()}
        wish = self._fleet.room(model, replica).wish if replica is not None else self._fleet.beside(model.wish)
        running, sharing = RunningPlan(plan, held, seen, against), self._fleet.sharing(model, wish)._replace(offers=())
        return await self._planner.decide(wish, facts, claims, None, model.answers, model.pins, running, sharing=sharing)

    async def try_plan(self, model: ManagedModel, replica: ReplicaState, plan: Plan, *, beside: bool) -> None:
        """Start another plan for a replica: beside what serves, or in its place. Raises HostError, StoreError."""
        effects = self._effects.try_beside if beside else self._effects.try_instead
        # It is started as it is: the engine's own answer might bring the plan back that serves.
        await effects(model, replica, plan.evolve(question=None), self._fleet.ports)
        self.wake()

    async def settle(self, model: ManagedModel, *, adopt: bool) -> None:
        """End what is tried beside: it takes the place of what serves, or stops. Raises StoreError."""
        await (self._effects.adopt(model) if adopt else self._effects.end_trial(model))
        self.wake()

    def working(self, name: str) -> bool:
        """Whether an engine of the model works for a client."""
        route = self._routes.table.models.get(name)
        return route is not None and any(self._routes.silent_s(replica.id) is not None for replica in route.replicas)

    async def instance(self, attempt: Attempt) -> Instance | None:
        """Its engine as the host sees it. Raises HostError."""
        return next((one for one in await self._host.list() if one.name == attempt.instance_name), None)

    async def hardware(self) -> Hardware:
        """What is in this machine now; GPUs that are lost say so."""
        return await self._planner.hardware()

    @contextlib.contextmanager
    def set_apart(self, gpus: Sequence[str]) -> Iterator[dict[str, str]]:
        """Nothing is started on these GPUs (by UUID) meanwhile. Gives what the gateway has on each that is not free, and what to do about it. Raises
        Conflict where they are set apart already."""
        if self._fleet.set_apart:
            raise Conflict("The GPUs are being measured already.", hint="Try again in a minute.")
        users = self._fleet.users()
        planned = next((one.model for one in self._fleet.replicas() if one.attempt is None and one.busy), None)
        wait = f"a start of {planned} is being planned: try again in a minute"
        held = {
            uuid: f"{', '.join(users[uuid])} runs on it: remove it (`fitserve rm {users[uuid][0]}`) and add it again afterwards"
            for uuid in users
        }
        self._fleet.set_apart = frozenset(gpus) - held.keys()
        try:
            yield {**(dict.fromkeys(gpus, wait) if planned else {}), **held}
        finally:
            self._fleet.set_apart = frozenset()
            self._fleet.unblock()
            self.wake()

    def wake(self) -> None:
        self._wake.set()

    # --- running ---

    @property
    def problem(self) -> str | None:
        """What keeps passes from being whole, that nobody expected."""
        return self._setback.problem

    async def run(self) -> None:
        """Until cancelled. Engines go on running after it; `close` lets go of them.

        Raises what passes meet that nobody expected, after so many in a row: perhaps another process does better.
        """
        # Until the first look at what runs, requests wait: no model is unknown, and none is said to be away.
        self._routes.table = self._fleet.route_table([], waits=True)
        looked = False
        while True:
            self._wake.clear()
            try:
                await self._pass()
                looked = True
                self._setback.over()
            except HostError as error:
                if self.host_problem is None:
                    log.error("the host does not answer", error=str(error))  # noqa: TRY400 - the traceback adds nothing
                self.host_problem = str(error)
                if not looked:
                    # The wanted models are known though no engine is: their clients are asked to come again, and do not hear that they do not exist.
                    self._publish_routes([])
            except Exception as error:
                self._setback.broke(error)
                if self._setback.count >= _MOST_BROKEN_PASSES:
                    raise
                await asyncio.sleep(self._setback.rest_s)
            self.last_pass = time.monotonic()
            self.passed()
            # A pass that waited for nothing lets others run all the same: what it waits for may be a step that has to end.
            await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.tick_s):
                    await self._wake.wait()

    async def close(self) -> None:
        """Stop watching and wait for nothing; engines go on running."""
        for model in self.models.values():
            for endpoint in model.endpoints:
                await endpoint.close()
        for replica in self._fleet.replicas():
            if replica.task is not None:
                replica.task.cancel()
                await asyncio.wait({replica.task})
            await replica.unwatch()
        await self._strays.close()

    async def end_engines(self) -> None:
        """After `close`: no engine of this gateway goes on. Their models start again with the next one."""
        for replica in self._fleet.replicas():
            if replica.attempt is not None:
                ended = replica.attempt.evolve(state="stopped", ended_at=time.time(), failure=_ENDED_WITH_US)
                with contextlib.suppress(StoreError):
                    await asyncio.to_thread(self._store.save_attempt, ended)
                self._running.remove(ended.instance_name)
        grace_s = self._settings.stop_grace_s
        await asyncio.gather(*(self._effects.stop(one.name, grace_s) for one in await self._host.list()))

    async def left_running(self) -> list[str]:
        """The engines of this gateway that run, by the names of their instances. Raises HostError."""
        return [one.name for one in await self._host.list() if one.state == "running"]

    def load(self) -> None:
        """Read what is wanted and what was tried, before the first request: no model may be unknown to clients that wait for it."""
        if restored := restore_running(self._store, self._running):
            log.warning("the database was empty, what runs was entered again", attempts=restored)
        self._fleet.load(self._store)

    async def _pass(self) -> None:
        """One look at the world and, for every replica, the next step."""
        before, instances = self._instances or [], await self._host.list()
        self._instances = instances
        self.host_problem, problem = None, self._store.problem
        if self._store.failing is not None:
            # No other change may come for long; so try whether the disk has room again.
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(self._store.check)
            problem = problem or self._store.failing
        ended = {one.name for one in before if one.state == "running"} - {
            one.name for one in instances if one.state == "running"
        }
        if ended or self._lost is not self._gpus.lost:
            # Another set of GPUs, or memory that an engine had: a replica without a plan may find one.
            self._lost = self._gpus.lost
            self._fleet.unblock()
        # Before anything that may fail: an engine that is gone, or leaves, gets no more requests.
        await self.residents.look(instances)
        self._publish_routes(instances)
        self._gate.look(instances)
        self._drains.look({instance.name for instance in instances})
        self._strays.look(instances, self._fleet.instance_names())
        for model in self.residents.in_order():
            try:
                await self._attend(model, instances)
            except StoreError as error:
                # A step that could not be recorded is not done, and is tried again; other models go on.
                if self.store_problem is None:
                    log.error("a step could not be recorded", model=model.wish.name, error=str(error))  # noqa: TRY400
                problem = str(error)
        self._publish_routes(instances)
        self.store_problem = problem

    async def _attend(self, model: ManagedModel, instances: list[Instance]) -> None:
        """What is to be done for one model now. An error that nobody expected stays with the model. Raises StoreError."""
        if model.setback.rest_s:
            return
        try:
            await self._watch_endpoints(model)
            for replica in model.replicas:
                missing = [take for take in replica.takes if not self._given(take, model.wish.name)]
                if replica.takes and not missing:
                    replica.blocked, replica.takes = None, ()
                await self._steps.attend(model, replica, instances)
            if model.trial is not None:
                await self._steps.attend(model, model.trial, instances)
                self._forget_trial(model, model.trial, instances)
            await self._changes.size(model)
            # One step in a pass: what leaves the routes has left them before it stops.
            if await self._changes.attend(model):
                self.wake()
            if model.deleting:
                await self._forget(model, instances)
            model.setback.over()
        except StoreError:
            raise
        except Exception as error:
            model.setback.broke(error)

    def _given(self, take: Offer, asking: str) -> bool:
        """Whether a model has given what is taken of it, or never will; else it is seen to."""
        model = self.models.get(take.model)
        if model is None or take.replica >= len(model.replicas):
            return True
        replica, attempt = model.replicas[take.replica], model.replicas[take.replica].attempt
        if take.how != "surplus":
            gone = attempt is None or (take.how == "sleep" and replica.asleep)
            return gone and replica.leaving is None and not replica.busy
        if model.deleting:
            return True
        if attempt is None or attempt.state != "ready" or replica.busy:
            return attempt is None and not replica.busy
        if (attempt.plan.cap is not None and attempt.plan.cap.bytes <= take.keeps) or model.keeps_until > time.monotonic():
            return True
        # One of its copies after the other: the rest serves meanwhile.
        away = any(
            one.left_at is not None or (one.made_room and one.attempt is not None)
            for one in model.replicas
            if one is not replica
        )
        if model.trial is None and not model.unsettled and not away and not self._gate.measures(attempt.plan.gpus):
            self._steps.shrink(model, *self._fleet.asked_of(model, take, asking))
        return False

    def _stretch(self) -> float:
        return max(1.0, sum(len(model.endpoints) for model in self.models.values()) / _ENDPOINTS)

    async def _watch_endpoints(self, model: ManagedModel) -> None:
        """One watcher for each endpoint that is wished for now."""
        key = EndpointKey(self._endpoint_keys, model.wish.endpoint_key)
        if model.deleting or [(one.endpoint, one.key) for one in model.endpoints] == [
            (one, key) for one in model.wish.endpoints
        ]:
            return
        before = {one.endpoint: one for one in model.endpoints}
        watched = (self._endpoint_client, self._settings.health_interval_s, self._stretch, self.wake, key)
        model.endpoints = []
        for endpoint in model.wish.endpoints:
            known = before.get(endpoint)
            if known is not None and known.key == key:
                model.endpoints.append(before.pop(endpoint))
                continue
            model.endpoints.append(EndpointWatcher(model.wish.name, endpoint, *watched))
            # Until it is asked with the other key its requests go on.
            if known is not None:
                model.endpoints[-1].replica, model.endpoints[-1].state = known.replica, known.state
        for one in before.values():
            await one.close()

    # --- bookkeeping ---

    async def _forget(self, model: ManagedModel, instances: list[Instance]) -> None:
        """Remove a model once nothing of it runs."""
        name = model.wish.name
        replicas = model.all_replicas
        for replica in replicas:
            await replica.unwatch()
        if any(replica.busy for replica in replicas) or any(instance.model == name for instance in instances):
            return
        # Before the database forgets the attempts, so that these records never bring back a model that was removed.
        for replica in replicas:
            for attempt in replica.attempts:
                self._running.remove(attempt.instance_name)
                remove_logs(self._settings.data, attempt.instance_name)
        await asyncio.to_thread(self._store.remove_model, name)
        for endpoint in model.endpoints:
            await endpoint.close()
        del self.models[name]
        log.info("removed", model=name)

    def _forget_trial(self, model: ManagedModel, trial: ReplicaState, instances: list[Instance]) -> None:
        """Once nothing of it runs its attempts are those of the replica."""
        if trial.attempt is None and not trial.seeks and not trial.busy and trial.instance_among(instances) is None:
            replica = model.replicas[trial.index]
            replica.history = sorted([*replica.history, *trial.history], key=lambda attempt: attempt.id)
            model.trial = None

    def _publish_routes(self, instances: list[Instance]) -> None:
        table = self._fleet.route_table(instances)
        if table != self._routes.table:
            self._routes.table = table
