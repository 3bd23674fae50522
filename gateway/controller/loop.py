"""The control loop, the only writer: steps of every replica from reality to the wish.

Events only wake the loop. Each pass works from the present state, so a crash at any point costs one
more pass. An unexpected error stays with its replica or model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from gateway.controller.copy_sizer import CopySizer
from gateway.controller.endpoints import Endpoints
from gateway.controller.evictor import Evictor
from gateway.controller.failpoint import Failpoint
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_rest import RestingModels
from gateway.controller.fleet.restored_models import load_models
from gateway.controller.fleet.route_table import route_table
from gateway.controller.fleet.start_record import StartRecord
from gateway.controller.loop_health import LoopHealth
from gateway.controller.memory_gifts import OfferTransfers
from gateway.controller.orphan_engines import OrphanEngines
from gateway.controller.owner_commands import OwnerCommands
from gateway.controller.plan_input_watch import PlanInputWatch
from gateway.controller.plan_preview import PlanPreview
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.change_steps import ChangeSteps
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.plan_input_reader import PlanInputReader
from gateway.controller.steps.plan_steps import PlanSteps
from gateway.controller.steps.planner_port import PlannerPort
from gateway.controller.steps.proof_steps import ProofSteps
from gateway.controller.steps.replica_planner import ReplicaPlanner
from gateway.controller.steps.replica_steps import Effects, ReplicaSteps, WatchSources
from gateway.controller.steps.shrink_steps import ShrinkSteps
from gateway.controller.steps.sleep_steps import SleepSteps
from gateway.controller.steps.start_gate import StartGate
from gateway.controller.steps.start_steps import StartSteps
from gateway.controller.steps.trial_steps import TrialSteps
from gateway.controller.steps.wish_changes import WishChanges
from gateway.controller.watch.engine_client import EngineClient
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Failure, Instance
from gateway.domain.running import TRIAL_GENERATION
from gateway.errors import HostError, StoreError
from gateway.logging import Logger
from gateway.machine.gpu_watch import GpuWatch
from gateway.proxy.access.endpoint_keys import EndpointKeys
from gateway.proxy.routing.drains import Drains
from gateway.proxy.routing.model_route import ModelRoute
from gateway.proxy.routing.routes import Routes
from gateway.store.engine_logs import remove_logs
from gateway.store.running_engines import RunningEngines, restore_running
from gateway.store.store import Store

log = Logger("fitserve.loop")

# Concurrent calls to engines, and as many to endpoints.
_CALLS_AT_ONCE = 128
# These passes and the rests between them take about two minutes.
_MAX_BROKEN_PASSES = 8
# Seconds between two looks at the database.
_STORE_POLL_S = 2.0
# Seconds in which early downloads and inquiries end.
_PREPARATION_END_S = 10.0
_GATEWAY_END = Failure(
    kind="ended_with_gateway",
    phase="serving",
    message="The engine was stopped with the gateway, because FITSERVE_STOP_ENGINES is set.",
    proven_subject="nothing",
)


class Loop:
    """Owns the state.

    Others read `fleet` and `health`, and use `owner_commands` and `plan_preview`. All other work
    happens in `run`.
    """

    def __init__(
        self,
        store: Store,
        planner: PlannerPort,
        launcher: Launcher,
        gpus: GpuWatch,
        signatures: Callable[[], Signatures],
        routes: Routes,
        ended_counts: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`signatures` gives the known failure patterns; `ended_counts` the number of ended
        requests of each model."""
        self._settings = settings = launcher.settings
        self._store, self._host, self._launcher = store, launcher.host, launcher
        self.routes, self._gpus, self._lost_gpus = routes, gpus, gpus.lost_cards
        self._running_engines = RunningEngines(settings.data)
        self.fleet = Fleet(settings.keep_alive)
        self.health, self.starts = LoopHealth(), StartRecord(store)
        self.read_prepared, self.machines = launcher.host.prepared_views, launcher.host.machines
        self.on_pass: Callable[[], object] = lambda: None
        """Called after each pass, with the new state in the models."""
        self._wake = asyncio.Event()
        self._store_read_at = time.monotonic()
        """The time of the last look at the database."""
        self._has_passed = False
        self._instances: list[Instance] | None = None
        """The instances of the last look; None before the first."""
        self._resting = RestingModels()
        self._resting_routes: dict[str, ModelRoute] = {}
        """The routes of models at rest, as they were last published."""
        wishes = WishChanges(store)
        self._gate = StartGate(self.fleet, planner.hardware, settings.start_timeout_s)
        self._drains = Drains(routes, settings.drain_s)
        engines, ports = self._running_engines, self.fleet.ports
        attempts = Attempts(store, engines, launcher, self._gate, signatures, ports, self.starts)
        reader = PlanInputReader(planner.hardware, store.fact_texts, settings.data)
        self._inputs = PlanInputWatch(self.fleet, reader, self.wake)
        self._steps = ReplicaSteps(
            self._effects(planner, wishes, reader, attempts),
            self.fleet,
            launcher,
            gpus,
            WatchSources(signatures, EngineClient(_CALLS_AT_ONCE), routes.silent_s),
            self._drains,
            self.wake,
        )
        measures, failpoint = self._gate.measures, Failpoint(settings.failpoint)
        self._gifts = OfferTransfers(self.fleet, measures, self._steps.shrink)
        self.trials = TrialSteps(attempts, self._drains, self.wake)
        self._changes = ChangeSteps(wishes, self.trials, attempts, failpoint, self._drains)
        keys, client = EndpointKeys(settings.data), EngineClient(_CALLS_AT_ONCE)
        self._endpoints = Endpoints(self.fleet, client, keys, settings.health_interval_s, self.wake)
        self._orphans = OrphanEngines(launcher.stop, settings.stop_grace_s, self.wake)
        self.evictor = Evictor(self.fleet, routes, store, settings, measures, ended_counts)
        self.sizer = CopySizer(self.fleet, routes, settings, self.evictor, planner.hardware)
        self.plan_preview = PlanPreview(planner, self.fleet)
        self.owner_commands = OwnerCommands(
            store, self.fleet, wishes, self._publish_new_model, self.wake
        )
        routes.on_demand = self.wake

    def _effects(
        self,
        planner: PlannerPort,
        wishes: WishChanges,
        reader: PlanInputReader,
        attempts: Attempts,
    ) -> Effects:
        """The effects of all steps, which share one planner of replicas."""
        launcher = self._launcher
        patience_s = self._settings.start_timeout_s
        replica_planner = ReplicaPlanner(planner, patience_s / 2, wishes.store_commits)
        return Effects(
            PlanSteps(replica_planner, reader, attempts, launcher, self._gpus),
            StartSteps(
                replica_planner,
                attempts,
                launcher,
                self._running_engines,
                self._gate,
                planner.hardware,
            ),
            ProofSteps(self._store, patience_s),
            attempts,
            ShrinkSteps(replica_planner, attempts, self._drains),
            SleepSteps(self._store, planner, launcher, self._gate, replica_planner.turns),
        )

    def wake(self) -> None:
        self._wake.set()

    def _publish_new_model(self) -> None:
        """Publish a new model immediately, so that it is not unknown to its first client."""
        if self._instances is not None:
            self._publish_routes(self._instances)

    async def run(self) -> None:
        """Run passes until cancelled. Engines run on after it; `close` lets go of them.

        Raises an unexpected error after several failed passes in a row, as a new process may do
        better.
        """
        # Requests wait until the first look at running engines, so no model appears unknown or
        # away.
        self.routes.table = route_table(
            self.fleet, [], self._settings.start_timeout_s, waits_for_engine=True
        )
        while True:
            self._wake.clear()
            await self._guarded_pass()
            self.health.last_pass = time.monotonic()
            self.on_pass()
            # Yield even after a pass that awaited nothing, so that pending steps can end.
            await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.tick_s):
                    await self._wake.wait()

    async def _guarded_pass(self) -> None:
        """Run one pass and record its errors. Raises the last of several unexpected ones."""
        setback = self.health.setback
        try:
            await self._pass()
            self._has_passed = True
            setback.clear()
        except HostError as error:
            self._record_host_problem(error)
        except Exception as error:
            setback.record_failure(error)
            if setback.count >= _MAX_BROKEN_PASSES:
                raise
            await asyncio.sleep(setback.rest_s)

    def _record_host_problem(self, error: HostError) -> None:
        if self.health.host_problem is None:
            # The traceback adds nothing.
            log.error("the host does not answer", error=str(error))
        self.health.host_problem = str(error)
        if not self._has_passed:
            # The wanted models are known without any engine: clients are asked to come again, and
            # get no 404.
            self._publish_routes([])

    async def close(self) -> None:
        """Stop watching, without waiting for starts. Engines run on."""
        await self._inputs.close()
        for model in self.fleet.models.values():
            for endpoint in model.endpoints:
                await endpoint.close()
        for replica in self.fleet.replicas():
            if replica.task is not None:
                replica.task.cancel()
                await asyncio.wait({replica.task})
            replica.cancel_preparation()
            replica.cancel_inquiry()
            await replica.unwatch()
        if self._launcher.preparations:
            # Their processes are killed, and must be waited for before the event loop ends. One
            # that hangs in the file system of another machine is left.
            await asyncio.wait(self._launcher.preparations, timeout=_PREPARATION_END_S)
        await self._orphans.close()

    async def stop_engines(self) -> None:
        """Stop all engines of this gateway, after `close`. The next gateway starts their models
        again."""
        for replica in self.fleet.replicas():
            if replica.attempt is not None:
                ended_attempt = replica.attempt.evolve(
                    state="stopped", ended_at=time.time(), failure=_GATEWAY_END
                )
                with contextlib.suppress(StoreError):
                    await asyncio.to_thread(self._store.save_attempt, ended_attempt)
                self._running_engines.remove(ended_attempt.instance_name)
        grace_s = self._settings.stop_grace_s
        await asyncio.gather(
            *(self._launcher.stop(instance.name, grace_s) for instance in await self._host.list())
        )

    async def running_instances(self) -> list[str]:
        """The running engines of this gateway, by instance name. Raises HostError."""
        return [
            instance.name for instance in await self._host.list() if instance.state == "running"
        ]

    def load(self) -> None:
        """Read wishes and attempts, so that the first request meets no unknown model."""
        if restored := restore_running(self._store, self._running_engines):
            log.warning(
                "the database was empty, running engines were recorded again", attempts=restored
            )
        self.fleet.models.update(load_models(self._store))

    async def _pass(self) -> None:
        """One look at the world and, for every replica, the next step."""
        former_instances = self._instances or []
        instances = await self._host.list()
        self._instances = instances
        self.health.host_problem, problem = None, await self._store_problem()
        self._retry_on_freed_gpus(former_instances, instances)
        self._inputs.start()
        demand = self.routes.demand()
        awake_models = self._awaken(instances, demand)
        await self._show_engines(instances, awake_models, demand)
        models = self.evictor.plan_order(awake_models)
        # All models receive before any is planned, so that no gift is planned twice.
        for model in models:
            self._gifts.request_offers(model, instances)
        problem = await self._attend_all(models, instances) or problem
        self._publish_routes(instances)
        self._park_idle_models(awake_models)
        self.health.store_problem = problem

    def _retry_on_freed_gpus(
        self, former_instances: Iterable[Instance], instances: Iterable[Instance]
    ) -> None:
        """Let replicas without a plan try again after an engine's end, or with other GPUs."""
        ended_names = _running_names(former_instances) - _running_names(instances)
        if ended_names or self._lost_gpus is not self._gpus.lost_cards:
            self._lost_gpus = self._gpus.lost_cards
            self.fleet.schedule_replanning()

    async def _show_engines(
        self,
        instances: list[Instance],
        awake_models: list[ManagedModel],
        demand: Mapping[str, float],
    ) -> None:
        """Show the engines of this pass to all that follow them. Raises StoreError."""
        # First of all, engines that are gone or evicted get no more requests.
        was_freeing_memory = self.evictor.is_freeing_memory
        await self.evictor.decide_evictions(instances, awake_models, demand)
        if self.evictor.is_freeing_memory != was_freeing_memory:
            self.wake()
        await self.sizer.follow_load(demand)
        self._publish_routes(instances)
        self._gate.record_engines(instances)
        self._drains.forget_engines({instance.name for instance in instances})
        self._orphans.stop_orphans(instances, self.fleet.instance_names() if instances else ())

    async def _attend_all(
        self, models: Iterable[ManagedModel], instances: list[Instance]
    ) -> str | None:
        """Take the next steps of all models. Returns the reason why a step could not be recorded;
        None: all were."""
        problem: str | None = None
        instance_by_name = {instance.name: instance for instance in instances}
        for model in models:
            try:
                await self._attend(model, instance_by_name)
            except StoreError as error:
                # A step that was not recorded is not done, and is tried again. Other models go on.
                if self.health.store_problem is None:
                    log.error(  # noqa: TRY400
                        "a step could not be recorded", model=model.wish.name, error=str(error)
                    )
                problem = str(error)
        return problem

    def _awaken(self, instances: list[Instance], demand: Mapping[str, float]) -> list[ManagedModel]:
        """The models that this pass looks at; those at rest are left out."""
        models = self.fleet.models
        names = {instance.model for instance in instances} | demand.keys()
        awake_models = self._resting.awake(
            models.values(), names, self.evictor.is_freeing_memory, time.monotonic()
        )
        for model in awake_models:
            self._resting_routes.pop(model.wish.name, None)
        return awake_models

    def _park_idle_models(self, awake_models: list[ManagedModel]) -> None:
        """Leave models without work out of the next passes, and keep their routes."""
        models = self.fleet.models
        self._resting.retain(models.keys())
        self._resting.record(
            (model for model in awake_models if model.wish.name in models),
            self.evictor.is_freeing_memory,
            time.monotonic(),
        )
        for model in awake_models:
            name = model.wish.name
            if name in self._resting and name in self.routes.table.models:
                self._resting_routes[name] = self.routes.table.models[name]

    async def _store_problem(self) -> str | None:
        """The reason why changes cannot be stored now, after a look at the database; None: they
        can."""
        if time.monotonic() > self._store_read_at + _STORE_POLL_S:
            await asyncio.to_thread(self._store.inspect)
            self._store_read_at = time.monotonic()
        if self._store.failing is not None:
            # No other change may come for long, so check whether the disk has room again.
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(self._store.check)
        return self._store.problem or self._store.failing

    async def _attend(self, model: ManagedModel, instances: Mapping[str, Instance]) -> None:
        """Take the next steps of one model. An unexpected error stays with the model. Raises
        StoreError."""
        if model.setback.rest_s:
            return
        try:
            await self._endpoints.update_watchers(model)
            for replica in model.replicas:
                await self._steps.step(model, replica, instances)
            if model.trial is not None:
                await self._steps.step(model, model.trial, instances)
                await self._forget_trial(model, model.trial, instances)
            await self._changes.size(model)
            # One step in a pass, so that an engine has left the routes before it stops.
            if await self._changes.step(model):
                self.wake()
            if model.is_deleting:
                await self._forget(model, instances)
            model.setback.clear()
        except StoreError:
            raise
        except Exception as error:
            model.setback.record_failure(error)

    async def _forget(self, model: ManagedModel, instances: Mapping[str, Instance]) -> None:
        """Remove a model once nothing of it runs."""
        name = model.wish.name
        replicas = model.all_replicas
        for replica in replicas:
            await replica.unwatch()
        if any(replica.is_busy for replica in replicas) or any(
            instance.model == name for instance in instances.values()
        ):
            return
        # Records go first, so that they never restore a removed model.
        for replica in replicas:
            for attempt in replica.attempts:
                self._running_engines.remove(attempt.instance_name)
                remove_logs(self._settings.data, attempt.instance_name)
        await asyncio.to_thread(self._store.remove_model, name)
        for endpoint in model.endpoints:
            await endpoint.close()
        del self.fleet.models[name]
        log.info("removed", model=name)

    async def _forget_trial(
        self, model: ManagedModel, trial: ReplicaState, instances: Mapping[str, Instance]
    ) -> None:
        """Return the attempts of a trial to its replica once nothing of the trial runs. Attempts
        that measured a plan are dropped."""
        is_running = trial.attempt is not None or trial.instance_among(instances) is not None
        if is_running or trial.succession.seeks_plan or trial.is_busy:
            return
        if trial.generation != TRIAL_GENERATION:
            for attempt in model.replicas[trial.index].remember(*trial.history):
                remove_logs(self._settings.data, attempt.instance_name)
        model.trial = None
        await trial.unwatch()

    def _publish_routes(self, instances: list[Instance]) -> None:
        table = route_table(
            self.fleet,
            instances,
            self._settings.start_timeout_s,
            resting_routes=self._resting_routes,
        )
        if table != self.routes.table:
            self.routes.table = table


def _running_names(instances: Iterable[Instance]) -> set[str]:
    return {instance.name for instance in instances if instance.state == "running"}
