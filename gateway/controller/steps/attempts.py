"""The life of attempts: begun, planned again, ready, failed, ended. Each change is on disk before
it counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable

from gateway.controller.fleet.engine_ports import engine_ports
from gateway.controller.fleet.managed_model import ReplicaState, share_parts
from gateway.controller.fleet.start_record import StartRecord
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.start_gate import StartGate
from gateway.diagnosis.facts.learn import drop_disturbed_proof, judge, learn, prove_success
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Abilities, Attempt, Failure, Plan, Scalar
from gateway.domain.running import failures_in_a_row
from gateway.engines.common.chat import abilities
from gateway.errors import HostError, NoPlan
from gateway.logging import Logger
from gateway.store.engine_logs import remove_logs
from gateway.store.running_engines import RunningEngines
from gateway.store.store import Store

log = Logger("fitserve.loop")

_PORT_TRIES = 100


class Attempts:
    """Records how attempts begin, change and end. Each gateway has one object of this class."""

    def __init__(
        self,
        store: Store,
        engines: RunningEngines,
        launcher: Launcher,
        gate: StartGate,
        signatures: Callable[[], Signatures],
        ports: Callable[[], Collection[int]],
        starts: StartRecord,
    ) -> None:
        """`signatures` gives known failures and their remedies; `ports` those of all live
        attempts."""
        self._store = store
        self._engines = engines
        self._host = launcher.host
        self._patience_s = launcher.settings.start_timeout_s
        self._data = launcher.settings.data
        self._gate = gate
        self._signatures = signatures
        self._ports = ports
        self._starts = starts

    async def start(self, replica: ReplicaState, plan: Plan) -> Attempt:
        """Record the start of a plan. Raises HostError, StoreError."""
        plan = share_parts(plan, replica)
        # A watch must not wait until the files of known failures are read.
        await asyncio.to_thread(self._signatures)
        port = await self._allocate_port(plan)
        fields = (replica.model, replica.index, plan, port, time.time(), replica.generation)
        return await asyncio.to_thread(self._store.add_attempt, *fields)

    async def drop(self, attempt: Attempt) -> None:
        """End an attempt that is not started after all. Raises StoreError."""
        await asyncio.to_thread(
            self._store.save_attempt, attempt.evolve(state="stopped", ended_at=time.time())
        )

    async def rewrite(self, replica: ReplicaState, attempt: Attempt, plan: Plan) -> Attempt:
        settled_attempt = attempt.evolve(plan=plan, fingerprint=plan.fingerprint)
        await asyncio.to_thread(self._store.save_plan, settled_attempt)
        replica.attempt = settled_attempt
        return settled_attempt

    async def is_verified(self, plan: Plan) -> bool:
        """Whether this plan has served with exactly this software. Raises StoreError."""
        verifying_software = await asyncio.to_thread(
            self._store.verifying_software, plan.fingerprint
        )
        return plan.software in verifying_software

    async def publish(self, replica: ReplicaState, attempt: Attempt) -> None:
        now = time.time()
        phases = clock.seconds(time.monotonic()) if (clock := replica.start_clock) else {}
        ready = attempt.evolve(state="ready", ready_at=now, phases=phases)
        cache_bytes = memory_bytes = None
        if attempt.plan.grade != "verified" and not self._gate.disturbance(attempt):
            change_words, memory_bytes = await self._gate.foreign_change(attempt)
            cache_bytes = (
                replica.watcher.cache_bytes if replica.watcher and not change_words else None
            )
        await asyncio.to_thread(
            self._store.save_attempt, ready, *prove_success(attempt, now, cache_bytes, memory_bytes)
        )
        replica.attempt = ready
        replica.succession.awaits_successor = False
        if phases:
            await self._starts.add(ready, replica.conditions)
        log.info("ready", model=replica.model, replica=replica.index, plan=attempt.fingerprint)

    async def record_abilities(
        self, replica: ReplicaState, attempt: Attempt, abilities: Abilities
    ) -> None:
        """Record the abilities that a serving engine has shown. Raises StoreError."""
        noted_attempt = attempt.evolve(abilities=abilities)
        await asyncio.to_thread(self._store.save_attempt, noted_attempt)
        replica.attempt = noted_attempt

    async def fail(self, replica: ReplicaState, attempt: Attempt, failure: Failure) -> None:
        """End an attempt with a failure, and store the facts that the failure proves."""
        now = time.time()
        disturbance = self._gate.record_failure(attempt, failure) or self._gate.disturbance(attempt)
        if not disturbance and failure.proven_subject != "nothing" and attempt.state == "starting":
            disturbance, _ = await self._gate.foreign_change(attempt)
        failure = drop_disturbed_proof(attempt, failure, disturbance)
        if abilities.was_ended_by_asking(attempt.evolve(state="failed", ended_at=now)):
            # The plan serves clients that do not use the ability.
            failure = failure.evolve(proven_subject="nothing")
        failure = judge(attempt, failure, failures_in_a_row(tuple(replica.history)), now)
        failure = await self._add_remedy(attempt, failure)
        ended_attempt = attempt.evolve(state="failed", ended_at=now, failure=failure)
        await asyncio.to_thread(
            self._store.save_attempt, ended_attempt, *learn(attempt, failure, now)
        )
        self._engines.remove(attempt.instance_name)
        log.warning(
            "failed",
            model=replica.model,
            replica=replica.index,
            kind=failure.kind,
            reason=failure.message,
            line=failure.line,
        )
        replica.attempt = None
        forgotten_attempts = replica.remember(ended_attempt)
        if replica.task is not None and replica.task is not asyncio.current_task():
            replica.task.cancel()
        await replica.retire_watcher()
        await self._remove_logs(forgotten_attempts)

    async def refuse(self, replica: ReplicaState, attempt: Attempt, error: NoPlan) -> None:
        """End an attempt whose plan all engines refuse. Nothing was started, so nothing is tried
        again."""
        failure = Failure(
            kind="engine_refuses",
            phase="checking",
            message=error.message,
            advice=error.hint,
            proven_subject="nothing",
        )
        failure = await self._add_remedy(attempt, failure)
        ended_attempt = attempt.evolve(state="stopped", ended_at=time.time(), failure=failure)
        await asyncio.to_thread(self._store.save_attempt, ended_attempt)
        replica.attempt = None
        forgotten_attempts = replica.remember(ended_attempt)
        replica.planning.block_planning(str(error))
        log.warning("no plan", model=replica.model, replica=replica.index, reason=str(error))
        await self._remove_logs(forgotten_attempts)

    async def retire(self, replica: ReplicaState, attempt: Attempt) -> None:
        """End an attempt whose engine serves nobody and stops next. Nothing failed. Raises
        StoreError."""
        if replica.task is not None and replica.task is not asyncio.current_task():
            replica.task.cancel()
        await self.finish(replica, attempt)
        replica.attempt = None
        log.info("retired", model=replica.model, replica=replica.index)

    async def finish(
        self, replica: ReplicaState, attempt: Attempt, cause: Failure | None = None
    ) -> None:
        """End an attempt of the replica. The engine of the attempt stops. cause: outside of its
        plan, which is restored later."""
        ended_attempt = attempt.evolve(state="stopped", ended_at=time.time(), failure=cause)
        forgotten_attempts = replica.remember(ended_attempt)
        await replica.retire_watcher()
        await asyncio.to_thread(self._store.save_attempt, ended_attempt)
        self._engines.remove(attempt.instance_name)
        await self._remove_logs(forgotten_attempts)

    async def _allocate_port(self, plan: Plan) -> int:
        """A port whose engine takes none of other starts. Raises HostError.

        The host does not know the port of a start that was recorded and cut off.
        """
        ports = set()
        for _ in range(_PORT_TRIES):
            port = await self._host.allocate_port()
            if engine_ports(plan, port).isdisjoint(self._ports()):
                return port
            ports.add(port)
        # Each container has ports of its own, so their host always answers with the same number.
        if len(ports) == 1:
            return port
        raise HostError(
            f"No free port was found in {_PORT_TRIES} tries.",
            hint="Stop other programs on this machine.",
        )

    async def _remove_logs(self, forgotten_attempts: Iterable[Attempt]) -> None:
        """Remove the logs of attempts that have left the history."""
        for attempt in forgotten_attempts:
            await asyncio.to_thread(remove_logs, self._data, attempt.instance_name)

    async def _add_remedy(self, attempt: Attempt, failure: Failure) -> Failure:
        """The failure with its remedy, filled with the numbers of this case."""
        signatures = await asyncio.to_thread(self._signatures)
        return signatures.cures.add_remedy(failure, _case(attempt, self._patience_s))


def _case(attempt: Attempt, patience_s: float) -> dict[str, Scalar]:
    """The values that a remedy may name."""
    plan = attempt.plan
    conditions: dict[str, Scalar] = {
        "model": attempt.model,
        "engine": str(plan.engine),
        "patience": round(patience_s),
    }
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel"):
        conditions[name] = getattr(plan, name).value
    if plan.engine.image is not None:
        conditions["image"] = plan.engine.image
    return conditions | ({"ranks": len(plan.gpus)} if len(plan.gpus) > 1 else {})
