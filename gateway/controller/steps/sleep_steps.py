"""Puts engines to sleep and wakes them, and measures the freed memory.

Each change is on disk before it begins. An engine cut off in between is woken up, as its memory
stays reserved until the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.fleet.managed_model import ReplicaState
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.plan_turns import PlanTurns
from gateway.controller.steps.planner_port import PlannerPort
from gateway.controller.steps.start_gate import StartGate
from gateway.controller.watch.engine_client import NoAnswerError
from gateway.controller.watch.engine_questions import is_alive
from gateway.controller.watch.watcher import Watcher
from gateway.diagnosis.facts import sleep
from gateway.domain import Attempt, Fact, Offer, SleepState
from gateway.domain.units import gib
from gateway.logging import Logger
from gateway.planner.sharing.leaving import (
    bytes_occupied,
    bytes_promised_away,
    offers_to_wake,
    sleep_refusal,
)
from gateway.store.store import Store

log = Logger("fitserve.loop")

# Seconds until NVML shows freed memory, and between two readings.
_RELEASE_TIMEOUT_S = 5.0
_POLL_S = 0.2
# Seconds in which a woken engine has to answer the smallest request.
_SMALL_REQUEST_TIMEOUT_S = 60.0


class SleepSteps:
    """Puts engines to sleep and wakes them. Each gateway has one object of this class."""

    def __init__(
        self,
        store: Store,
        planner: PlannerPort,
        launcher: Launcher,
        gate: StartGate,
        turns: PlanTurns,
    ) -> None:
        """`turns` are those of `ReplicaPlanner`."""
        self._store = store
        self._planner = planner
        self._launcher = launcher
        self._gate = gate
        self._turns = turns
        self._patience_s = launcher.settings.start_timeout_s
        self._measurement = asyncio.Lock()
        """Freed memory is measured, so one engine falls asleep at a time."""

    async def sleep(self, replica: ReplicaState, attempt: Attempt) -> None:
        """Put an idle engine to sleep. If it cannot sleep, its attempt ends instead. Raises
        StoreError."""
        watcher = replica.watcher
        machine = await self._planner.hardware()
        if (reason := sleep_refusal(attempt.plan, machine)) or watcher is None:
            log.warning("stopped instead of put to sleep", model=replica.model, why=reason)
            replica.unsleepable_attempt = attempt.id
            return
        async with self._measurement:
            await self._put_to_sleep(replica, attempt, watcher)

    async def _put_to_sleep(
        self, replica: ReplicaState, attempt: Attempt, watcher: Watcher
    ) -> None:
        """Put an engine to sleep, and learn the freed bytes. A failure ends the attempt."""
        start_s = time.monotonic()
        used_bytes = await self._read_used_bytes(attempt)
        sleepy_attempt = attempt.evolve(asleep=SleepState(since=time.time()))
        await self._save_attempt(replica, sleepy_attempt)
        replica.progress = "falls asleep"
        watcher.stop_questions()
        try:
            await self._call_endpoint(watcher, "/sleep?level=1")
        except NoAnswerError as error:
            await self._finish_attempt(
                replica,
                sleepy_attempt,
                sleep.failure_fact(attempt, f"did not fall asleep: it {error}", time.time()),
            )
            return
        call_s = time.monotonic() - start_s
        freed_bytes = await self._wait_for_freed_bytes(attempt, used_bytes)
        fact = sleep.result_fact(attempt, freed_bytes, time.time())
        if not sleep.has_freed_enough(attempt.plan, freed_bytes):
            await self._finish_attempt(replica, sleepy_attempt, fact)
            return
        sleep_record = SleepState(since=time.time(), freed_bytes=freed_bytes)
        await self._save_attempt(
            replica, attempt.evolve(asleep=sleep_record), *await self._new_facts(fact)
        )
        log.info(
            "sleeps",
            model=replica.model,
            replica=replica.index,
            gave=freed_bytes,
            seconds=round(call_s, 2),
        )

    async def wake(
        self,
        replica: ReplicaState,
        attempt: Attempt,
        promised_bytes: Callable[[], Mapping[str, int]],
        offers: Callable[[], Iterable[Offer]],
        *,
        is_spare: bool,
    ) -> None:
        """Wake an engine once there is room.

        Else it waits for the offers of others, and its attempt ends if they are too small.
        `is_spare`: another copy serves, so it sleeps on. `promised_bytes` are those of all others.
        Raises StoreError.
        """
        watcher = replica.watcher
        if watcher is None or not await self._reserve_memory(
            replica, attempt, promised_bytes, offers, is_spare=is_spare
        ):
            return
        sleep_record = attempt.asleep or SleepState(since=time.time())
        woken_attempt = attempt.evolve(asleep=sleep_record.evolve(freed_bytes=None))
        await self._save_attempt(replica, woken_attempt)
        replica.progress = "waking up"
        await self._gate.wait_for_wake_turn(woken_attempt)
        start_s = time.monotonic()
        begun_at = time.time()
        try:
            await self._call_endpoint(watcher, "/wake_up")
            await self._check_answer(watcher, attempt)
        except NoAnswerError as error:
            await self._finish_attempt(
                replica,
                woken_attempt,
                sleep.failure_fact(attempt, f"did not wake up: it {error}", time.time()),
            )
            return
        watcher.update(is_sleeping=False)
        await self._save_attempt(replica, attempt.evolve(asleep=None))
        # Its requests are let through from here on: the state says so at the same moment.
        replica.status = NoAction("ready")
        replica.wake_times = (begun_at, time.time())
        replica.planning.blocked_reason = None
        replica.planning.awaited_offers = ()
        replica.planning.requested_copies = set()
        log.info(
            "woke up",
            model=replica.model,
            replica=replica.index,
            seconds=round(time.monotonic() - start_s, 2),
        )

    async def _reserve_memory(
        self,
        replica: ReplicaState,
        attempt: Attempt,
        promised_bytes: Callable[[], Mapping[str, int]],
        offers: Callable[[], Iterable[Offer]],
        *,
        is_spare: bool,
    ) -> bool:
        """Reserve the memory for the engine once it is free. Returns whether it is.

        Memory that others have just left is waited for.
        """
        if attempt.asleep is None or attempt.asleep.freed_bytes is None:
            return True
        deadline = time.monotonic() + _RELEASE_TIMEOUT_S
        while True:
            async with self._turns.turn():
                machine = await self._planner.hardware()
                promised_away = bytes_promised_away(attempt, promised_bytes(), machine)
                occupied = bytes_occupied(attempt, machine)
                if not promised_away and not occupied:
                    sleep = attempt.asleep.evolve(freed_bytes=None)
                    await self._save_attempt(replica, attempt.evolve(asleep=sleep))
                    return True
                missing_bytes = promised_away or (occupied if time.monotonic() > deadline else {})
                if self._waits_for_others(replica, missing_bytes, offers()):
                    return False
            if missing_bytes:
                _abandon_waking(replica, attempt, missing_bytes, is_spare=is_spare)
                return False
            await asyncio.sleep(_POLL_S)

    @staticmethod
    def _waits_for_others(
        replica: ReplicaState, missing_bytes: Mapping[str, int], offers: Iterable[Offer]
    ) -> bool:
        """Whether others can leave to free the missing bytes. The replica waits for them."""
        evictions = [offer for offer in offers if offer.kind != "surplus"]
        needed_offers = offers_to_wake(missing_bytes, evictions) or ()
        if needed_offers and replica.planning.wait_for(needed_offers):
            log.warning(
                "others leave", model=replica.model, takes=[offer.words for offer in needed_offers]
            )
        return bool(needed_offers)

    async def _wait_for_freed_bytes(
        self, attempt: Attempt, used_bytes: Mapping[str, int]
    ) -> dict[str, int]:
        """Freed bytes by GPU UUID, as NVML shows them. Waits for the expected number for a
        while."""
        end = time.monotonic() + _RELEASE_TIMEOUT_S
        while True:
            present_bytes = await self._read_used_bytes(attempt)
            freed_bytes = {
                uuid: used_bytes[uuid] - present_bytes[uuid]
                for uuid in used_bytes.keys() & present_bytes.keys()
            }
            if sleep.has_freed_enough(attempt.plan, freed_bytes) or time.monotonic() > end:
                expected_freed = sleep.expected_bytes(attempt.plan)
                return {
                    uuid: min(expected_freed, max(0, count)) for uuid, count in freed_bytes.items()
                }
            await asyncio.sleep(_POLL_S)

    async def _read_used_bytes(self, attempt: Attempt) -> dict[str, int]:
        """Bytes that the engine's processes use on each GPU, by UUID.

        Without such data from the driver: the bytes that all processes use.
        """
        pids = {
            process.pid for process in await self._launcher.host.processes(attempt.instance_name)
        }
        used_by_gpu = {}
        for gpu in (await self._planner.hardware()).gpus:
            if (
                gpu.uuid not in attempt.plan.gpus
                or gpu.total_bytes is None
                or gpu.free_bytes is None
            ):
                continue
            process_bytes = [
                process.used_bytes for process in gpu.processes or () if process.pid in pids
            ]
            total = sum(count for count in process_bytes if count is not None)
            used_by_gpu[gpu.uuid] = total if total else gpu.total_bytes - gpu.free_bytes
        return used_by_gpu

    async def _check_answer(self, watcher: Watcher, attempt: Attempt) -> None:
        """Check that the engine answers. Raises NoAnswerError."""
        if not await is_alive(
            watcher.client, watcher.url, attempt.served_name, attempt.plan, _SMALL_REQUEST_TIMEOUT_S
        ):
            raise NoAnswerError("answers no request")

    async def _call_endpoint(self, watcher: Watcher, path: str) -> None:
        """Call an endpoint of the engine. Raises NoAnswerError."""
        answer = await watcher.client.post(f"{watcher.url}{path}", {}, self._patience_s)
        if answer.status != 200:
            raise NoAnswerError(
                f"answers {path.partition('?')[0]} with {answer.status} {answer.excerpt}"
            )

    async def _save_attempt(self, replica: ReplicaState, attempt: Attempt, *facts: Fact) -> None:
        await asyncio.to_thread(self._store.save_attempt, attempt, *facts)
        replica.attempt = attempt

    async def _new_facts(self, fact: Fact) -> list[Fact]:
        """A known fact is not learned again."""
        facts = await asyncio.to_thread(self._store.facts)
        return (
            []
            if any(
                (stored_fact.kind, stored_fact.scope) == (fact.kind, fact.scope)
                for stored_fact in facts
            )
            else [fact]
        )

    async def _finish_attempt(self, replica: ReplicaState, attempt: Attempt, fact: Fact) -> None:
        log.warning("is stopped", model=replica.model, replica=replica.index, why=fact.source)
        await self._save_attempt(replica, attempt, *await self._new_facts(fact))
        replica.unsleepable_attempt = attempt.id


def _abandon_waking(
    replica: ReplicaState, attempt: Attempt, missing_bytes: Mapping[str, int], *, is_spare: bool
) -> None:
    """Leave a spare engine asleep, and end any other that lacks room."""
    if is_spare:
        replica.planning.block_planning(
            f"a copy of it sleeps: it lacks {gib(max(missing_bytes.values()))} of a GPU's memory,"
            " which others have"
        )
        return
    log.warning("there is no room to wake up in", model=replica.model, lacks=missing_bytes)
    replica.unsleepable_attempt = attempt.id
