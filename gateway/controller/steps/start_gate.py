"""Holds a start back while another engine on the same GPUs sizes its KV cache.

Notes which engines were disturbed.

The decisions are in planner/starts.py. Here are the observations: attempts, instances, and logs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Protocol

from gateway.domain import Attempt, Failure, Hardware, Instance
from gateway.planner.starts import (
    MemoryReading,
    PendingStart,
    PlacedEngine,
    StartObstacle,
    build_pending_start,
    bytes_taken,
    cache_bytes,
    disturbances,
    memory_change,
    memory_shortage,
    readings,
    shape,
    start_block,
)

# Seconds in which a failure of a serving engine may be an echo of a neighbour's change.
_ECHO_S = 10.0
# Seconds between two looks at GPUs with foreign processes, and the longest wait for them.
_POLL_S = 1.0
_FOREIGN_WAIT_MAX_S = 120.0


class WithdrawnError(Exception):
    """The plan of this start is out of date, and nothing was started. The failure says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Engines(Protocol):
    """The part of `gateway.controller.fleet.fleet.Fleet` that the gate uses."""

    def holders(
        self, running_names: Collection[str], begun_names: set[str], now: float
    ) -> Iterable[PlacedEngine]:
        """The engines that exist.

        `running_names` are the listed instances; `begun_names` those that may not be listed yet.
        Unknown names are removed from `begun_names`. `now` is the clock of the phases.
        """
        ...

    def copy_failure(self, attempt: Attempt) -> Failure | None:
        """The failure of a copy with this plan since the attempt began, if any."""
        ...


class StartGate:
    """Lets starts wait while another engine on their GPUs measures. Each gateway has one object of
    this class.

    The loop calls `look` before each pass.
    """

    def __init__(
        self, engines: Engines, hardware: Callable[[], Awaitable[Hardware]], limit_s: float
    ) -> None:
        """End the hold of a start that takes longer than `limit_s` seconds."""
        self._engines = engines
        self._hardware = hardware
        self._limit_s = limit_s
        self._waiting_starts: dict[str, PendingStart] = {}
        self._begun_names: set[str] = set()
        """Started instances that the host may not list yet."""
        self._holders: dict[str, PlacedEngine] = {}
        self._measuring_names: dict[str, set[str]] = {}
        """The holders that measure a GPU, by its UUID."""
        self._disturbances: dict[str, tuple[float, str]] = {}
        """When and how a neighbour last disturbed an instance."""
        self._readings: dict[str, dict[str, MemoryReading]] = {}
        """The memory of an instance's GPUs just before its start."""
        self._restless: dict[str, float] = {}
        """Since when a waiting instance watches foreign processes."""
        self._sized: set[str] = set()
        """Instances that were given their KV cache in bytes."""
        self._measuring: set[str] = set()
        """Models whose engines measure, because one with given bytes has failed."""
        self._numbers: dict[str, str] = {}
        """GPU indices by UUID, for messages."""
        self._looked = asyncio.Event()
        self._was_seen_once = False

    def record_engines(self, instances: Iterable[Instance]) -> None:
        """Note the present engines. No engine starts before the first look."""
        now = time.monotonic()
        former_holders = self._holders
        running_names = {instance.name for instance in instances if instance.state == "running"}
        engines = self._engines.holders(running_names, self._begun_names, now)
        holders = (engine.evolve(is_sized=engine.instance in self._sized) for engine in engines)
        self._holders = {
            holder.instance: _add_phase_start(holder, former_holders.get(holder.instance))
            for holder in holders
        }
        self._index_measurements()
        # Engines from before the gateway's start disturb no measurement by their first sight.
        former_holders = former_holders if self._was_seen_once else self._holders
        self._was_seen_once = True
        for instance, disturbance in disturbances(former_holders.values(), self._holders.values()):
            self._disturbances[instance] = now, disturbance
        self._readings = {
            name: read
            for name, read in self._readings.items()
            if name in self._holders or name in self._waiting_starts
        }
        self._disturbances = {
            name: note for name, note in self._disturbances.items() if name in self._holders
        }
        self._sized &= self._holders.keys() | self._waiting_starts.keys()
        self._looked.set()
        self._looked = asyncio.Event()

    def measures(self, gpus: Collection[str], but: str = "") -> bool:
        """Whether an engine, except for one, measures one of these GPUs now.

        Such a measurement fails if another engine frees memory meanwhile.
        """
        return any(self._measuring_names.get(uuid, frozenset()) - {but} for uuid in gpus)

    def is_waiting(self, attempt: Attempt) -> bool:
        return attempt.instance_name in self._waiting_starts

    def disturbance(self, attempt: Attempt) -> str:
        """A neighbour's disturbance during the start, or just before now for a serving engine; ""
        if none."""
        at, text = self._disturbances.get(attempt.instance_name, (0.0, ""))
        return text if attempt.state == "starting" or time.monotonic() - at < _ECHO_S else ""

    async def wait_for_turn(
        self, attempt: Attempt, report: Callable[[str], None], *, accepts_cache_bytes: bool = False
    ) -> int | None:
        """Wait until the engine may start; from then on it counts as loading.

        `accepts_cache_bytes`: the engine can be given its KV cache in bytes. Returns the bytes, or
        None if it has
        to measure. Raises WithdrawnError.
        """
        kv_bytes = (
            cache_bytes(attempt.plan)
            if accepts_cache_bytes and attempt.model not in self._measuring
            else None
        )
        start = build_pending_start(attempt, is_sized=kv_bytes is not None)
        try:
            self._waiting_starts[start.instance] = start
            if not self._was_seen_once:
                await self._looked.wait()
            while (obstacle := self._start_blocker(start)) is not None or not await self._is_stable(
                attempt, start, report
            ):
                if obstacle is not None:
                    report(await self._obstacle_text(obstacle))
                    await self._looked.wait()
                if (copy_failure := self._engines.copy_failure(attempt)) is not None:
                    message = f"Another copy with this plan failed first: {copy_failure.message}"
                    failure = Failure(
                        kind="withdrawn",
                        phase="waiting",
                        message=message,
                        proven_subject="nothing",
                        disturbed=start.model,
                    )
                    raise WithdrawnError(failure)
        finally:
            self._waiting_starts.pop(start.instance, None)
            self._restless.pop(start.instance, None)
        self._begun_names.add(start.instance)
        self._disturbances.pop(start.instance, None)
        if start.is_sized:
            self._sized.add(start.instance)
        now = time.monotonic()
        is_sized = start.is_sized
        self._holders[start.instance] = PlacedEngine(
            instance=start.instance,
            model=start.model,
            gpus=start.gpus,
            shape=start.shape,
            phase="loading",
            phase_since=now,
            is_sized=is_sized,
        )
        self._index_measurements()
        return kv_bytes

    async def wait_for_wake_turn(self, attempt: Attempt) -> None:
        """Wait until no engine measures its GPUs. From then on the waking engine counts as
        loading."""
        name = attempt.instance_name
        gpus = frozenset(attempt.plan.gpus)
        while any(
            holder.phase == "loading" and holder.gpus & gpus
            for holder in self._holders.values()
            if holder.instance != name
        ):
            await self._looked.wait()
        now = time.monotonic()
        self._holders[name] = PlacedEngine(
            instance=name,
            model=attempt.model,
            gpus=gpus,
            shape=shape(attempt.plan),
            phase="loading",
            phase_since=now,
            is_measuring=False,
            is_proved=True,
        )
        self._index_measurements()

    def record_failure(self, attempt: Attempt, failure: Failure) -> str:
        """Note a failure. Returns why it says nothing about the plan; "" if it does."""
        if failure.proven_subject != "memory" or attempt.instance_name not in self._sized:
            return ""
        self._measuring.add(attempt.model)
        return (
            f"{attempt.model} was given its KV cache in bytes, and failed; from now on it measures"
            " its memory"
        )

    def _index_measurements(self) -> None:
        self._measuring_names = {}
        for holder in self._holders.values():
            if holder.phase == "loading" and not holder.is_sized:
                for uuid in holder.gpus:
                    self._measuring_names.setdefault(uuid, set()).add(holder.instance)

    async def _is_stable(
        self, attempt: Attempt, start: PendingStart, report: Callable[[str], None]
    ) -> bool:
        """Whether the memory of its GPUs is stable now, and remember it.

        Raises WithdrawnError if the memory is too little for the plan.
        """
        if not start.gpus:
            return True
        read = readings(await self._hardware(), start.gpus)
        former_reading = self._readings.get(start.instance)
        self._readings[start.instance] = read
        neighbours = [holder for holder in self._holders.values() if holder.gpus & start.gpus]
        restless_since = self._restless.setdefault(start.instance, time.monotonic())
        is_foreign = any(
            len(reading.processes or ()) > sum(reading.uuid in engine.gpus for engine in neighbours)
            for reading in read.values()
        )
        if (
            is_foreign
            and time.monotonic() - restless_since < _FOREIGN_WAIT_MAX_S
            and (former_reading is None or (change_words := memory_change(former_reading, read)))
        ):
            if former_reading is not None:
                report(f"waits until the memory of its GPUs is stable: {change_words}")
            await asyncio.sleep(_POLL_S)
            return False
        if shortage := memory_shortage(attempt.plan, read):
            raise WithdrawnError(
                Failure(
                    kind="withdrawn",
                    phase="waiting",
                    message=shortage,
                    proven_subject="nothing",
                    disturbed="memory",
                )
            )
        # Another start may have come meanwhile.
        return self._start_blocker(start) is None

    async def foreign_change(self, attempt: Attempt) -> tuple[str, int | None]:
        """The foreign change of memory on its GPUs since its start; "" if none or unknown.

        Also the bytes that the engine took of the GPU with the most; None if unknown.
        """
        if not (former_readings := self._readings.get(attempt.instance_name)):
            return "", None
        now = readings(await self._hardware(), former_readings)
        change_words = memory_change(former_readings, now)
        return change_words, None if change_words else bytes_taken(former_readings, now)

    def _start_blocker(self, start: PendingStart) -> StartObstacle | None:
        return start_block(
            start,
            self._waiting_starts.values(),
            self._holders.values(),
            time.monotonic(),
            self._limit_s,
        )

    async def _obstacle_text(self, obstacle: StartObstacle) -> str:
        if obstacle.gpu is None:
            return f"waits for {obstacle.model}, which {obstacle.activity}"
        if obstacle.gpu not in self._numbers:  # each reading of the machine takes part of a second
            self._numbers |= {gpu.uuid: str(gpu.index) for gpu in (await self._hardware()).gpus}
        number = self._numbers.get(obstacle.gpu, obstacle.gpu)
        return f"waits for {obstacle.model} on GPU {number}, which {obstacle.activity}"


def _add_phase_start(engine: PlacedEngine, former_engine: PlacedEngine | None) -> PlacedEngine:
    """The engine with the time when its present phase began."""
    return (
        engine.evolve(phase_since=former_engine.phase_since)
        if former_engine is not None and former_engine.phase == engine.phase
        else engine
    )
