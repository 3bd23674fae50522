"""What the loop does about one replica: plan, launch, verify, publish, fail, stop. Each records what it did before it counts.

Nothing here decides what comes next. Effects may be cut off anywhere: what they leave is what the next pass finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping

import structlog

from gateway.controller.launcher import Launcher
from gateway.controller.managed_model import ManagedModel, ReplicaState
from gateway.controller.planner import Planner
from gateway.controller.verify import verify
from gateway.core.facts.learn import judged, learn, proved
from gateway.core.reconcile import failures_in_a_row
from gateway.domain import Attempt, Failure
from gateway.errors import FitserveError, HostError, NoPlan
from gateway.machine.gpu_watch import GpuWatch
from gateway.store.running_engines import RunningEngine, RunningEngines
from gateway.store.store import Store

log = structlog.get_logger("fitserve.loop")

# How long the last log lines of a broken engine may take, in turns of the event loop and not in seconds: on a busy machine the
# reader of the log gets as many turns.
_LAST_WORDS, _TURN_S = 10, 0.1
_PORT_TRIES = 100
# Between two looks at whether a pull or a download still moves.
_STALL_POLL_S = 5.0


class Effects:
    """Shared by all replicas of a gateway."""

    def __init__(
        self,
        store: Store,
        running: RunningEngines,
        planner: Planner,
        launcher: Launcher,
        gpus: GpuWatch,
    ) -> None:
        self._store = store
        self._running = running
        self._planner = planner
        self._launcher = launcher
        self._gpus = gpus
        self._planning = asyncio.Lock()

    async def plan(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        claims: Callable[[], Mapping[str, int]],
        ports: Callable[[], Collection[int]],
    ) -> None:
        # One at a time: two plans made side by side would count on the same free memory.
        async with self._planning:
            facts = await asyncio.to_thread(self._store.fact_texts)
            try:
                planned = await self._planner.decide(model.wish, facts, claims())
                model.decision, plan = planned.decision, planned.plan
                if plan is None:
                    raise NoPlan("; ".join([planned.reason, *self._gpus.lost_messages()]))
                if model.wish.replicas is None:
                    model.replicas += [
                        ReplicaState(replica.model, index) for index in range(len(model.replicas), plan.replicas.value)
                    ]
                # The host does not know the port of a start that was recorded and cut off. In containers all engines have the same port.
                for _ in range(_PORT_TRIES):
                    port = await self._launcher.host.allocate_port()
                    if port not in ports():
                        break
                replica.attempt = await asyncio.to_thread(
                    self._store.add_attempt, replica.model, replica.index, plan, port, time.time()
                )
                log.info("planned", model=replica.model, replica=replica.index, engine=str(plan.engine), plan=plan.fingerprint)
            except FitserveError as error:
                replica.block(str(error))
                log.warning("no plan", model=replica.model, replica=replica.index, reason=str(error))

    async def launch(self, model: ManagedModel, replica: ReplicaState, attempt: Attempt) -> None:
        moved = time.monotonic()

        def report(progress: str) -> None:
            nonlocal moved
            if progress != replica.progress:
                moved, replica.progress = time.monotonic(), progress

        patience_s = self._launcher.settings.start_timeout_s
        bringing: asyncio.Future[None] | None = None
        try:
            entry = RunningEngine(wish=model.wish, created_at=model.created_at, attempt=attempt)
            await asyncio.to_thread(self._running.write, attempt.instance_name, entry)
            launch = self._launcher.launch(attempt, report, allow_remote_code=model.wish.policy.allow_remote_code)
            bringing = asyncio.ensure_future(launch)
            while not (await asyncio.wait({bringing}, timeout=min(_STALL_POLL_S, patience_s / 4)))[0]:
                if time.monotonic() - moved > patience_s:
                    await self.fail(replica, attempt, _stalled(replica.progress, patience_s))
                    return
            await bringing
        except FitserveError as error:
            kind = "host_error" if isinstance(error, HostError) else "download"
            failure = Failure(
                kind=kind, phase=replica.progress or "launching", message=error.message, advice=error.hint, proves="nothing"
            )
            if replica.attempt is attempt:
                await self.fail(replica, attempt, failure)
        finally:
            if bringing is not None:
                bringing.cancel()
                with contextlib.suppress(asyncio.CancelledError, FitserveError):
                    await bringing

    async def verify(self, replica: ReplicaState, attempt: Attempt) -> None:
        watcher = replica.watcher
        if watcher is None:
            return
        patience_s = self._launcher.settings.start_timeout_s

        def report(progress: str) -> None:
            replica.progress = progress

        failure = await verify(watcher.client, watcher.url, attempt.model, attempt.plan, patience_s, report)
        if failure is None:
            watcher.note(verified=True, phase="serving")
        else:
            if failure.kind == "verification_failed":
                # A crash shows in the log a moment after the connection breaks, and the log names the cause better.
                turn = 0
                while turn < _LAST_WORDS or watcher.failure_pending:
                    await asyncio.sleep(_TURN_S)
                    turn += 1
            watcher.fail(failure)

    async def publish(self, replica: ReplicaState, attempt: Attempt) -> None:
        now = time.time()
        ready = attempt.evolve(state="ready", ready_at=now)
        cache_bytes = replica.watcher.cache_bytes if replica.watcher else None
        await asyncio.to_thread(self._store.save_attempt, ready, *proved(attempt, now, cache_bytes))
        replica.attempt = ready
        log.info("ready", model=replica.model, replica=replica.index, plan=attempt.fingerprint)

    async def fail(self, replica: ReplicaState, attempt: Attempt, failure: Failure) -> None:
        now = time.time()
        failure = judged(attempt, failure, failures_in_a_row(tuple(replica.history)), now)
        ended = attempt.evolve(state="failed", ended_at=now, failure=failure)
        await asyncio.to_thread(self._store.save_attempt, ended, *learn(attempt, failure, now))
        self._running.remove(attempt.instance_name)
        log.warning(
            "failed", model=replica.model, replica=replica.index, kind=failure.kind, reason=failure.message, line=failure.line
        )
        replica.attempt = None
        replica.history.append(ended)
        if replica.task is not None and replica.task is not asyncio.current_task():
            replica.task.cancel()
        await replica.unwatch()

    async def stop(self, name: str, grace_s: float) -> None:
        try:
            await self._launcher.host.stop(name, grace_s)
        except FitserveError as error:
            log.error("the engine could not be stopped", instance=name, error=str(error))  # noqa: TRY400 - the traceback adds nothing
            await asyncio.sleep(1.0)


def _stalled(progress: str, patience_s: float) -> Failure:
    return Failure(
        kind="stalled",
        phase=progress or "launching",
        message=f"Nothing moved for {round(patience_s)} seconds; the last that was heard is: {progress or 'nothing'}.",
        advice="Look at the network and the disk; what is there already is kept. FITSERVE_START_TIMEOUT_S sets the patience.",
        proves="nothing",
    )
