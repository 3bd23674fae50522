"""Measures free GPUs in a child process, with an engine's Python or only with the driver."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.domain import EngineRef, Fact, Hardware, Value
from gateway.engines.inquiry.inquirer import AskedHost
from gateway.errors import Conflict, HostError
from gateway.hosts.process.asked_environment import run_inquiry_process
from gateway.measuring.calibration.gpu_set import GpuSet, busy_gpus, gpu_sets
from gateway.measuring.calibration.measurement import (
    LIMIT_S,
    Measurement,
    build_facts,
    document,
    read_measurement,
)
from gateway.profiles.profiles import Profiles


class CalibrationResult(Value):
    """New facts, the reason for each GPU that was not measured (by UUID), and problems."""

    facts: tuple[Fact, ...]
    left_alone: dict[str, str]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Calibrator:
    """Measures with the engines of `host`. folder: for files of the child."""

    host: AskedHost
    profiles: Profiles
    folder: Path

    async def measure(self, hardware: Hardware, holders: Mapping[str, str]) -> CalibrationResult:
        """Measure the free GPUs. holders: engine and advice by a GPU's UUID. Raises Conflict."""
        if not hardware.gpus:
            raise Conflict(
                "This machine has no GPU to measure.",
                hint="`fitserve doctor` shows the reason.",
            )
        busy = busy_gpus(hardware, holders)
        free_gpus = [gpu for gpu in hardware.gpus if gpu.uuid not in busy]
        facts: list[Fact] = []
        problems: list[str] = []
        engine = await self._engine() if free_gpus else None
        for gpu_set in gpu_sets(free_gpus, hardware.links):
            source, measurement, set_problems = await self._measure_set(gpu_set, engine)
            problems += set_problems
            if measurement is not None:
                new_facts, unsteady = build_facts(
                    measurement, gpu_set, source, hardware.driver, time.time()
                )
                facts += new_facts
                problems += unsteady
        return CalibrationResult(facts=tuple(facts), left_alone=busy, problems=tuple(problems))

    async def _engine(self) -> EngineRef | None:
        """An installed engine; none is downloaded."""
        for engine in await asyncio.to_thread(self.profiles.references, "cuda"):
            with contextlib.suppress(HostError):
                resolved_ref = await self.host.resolve(engine)
                await self.host.identity(resolved_ref)
                return resolved_ref
        return None

    async def _measure_set(
        self, gpu_set: GpuSet, engine: EngineRef | None
    ) -> tuple[str, Measurement | None, list[str]]:
        """Source, measurement and problems. The driver comes last: it cannot multiply matrices."""
        problems = []
        if engine is not None:
            uuids = tuple(gpu.uuid for gpu in gpu_set.gpus)
            try:
                measurement = await _first_line(
                    self.host.run_inquiry(engine, document(gpu_set, "torch"), uuids), gpu_set
                )
            except HostError as error:
                problems.append(error.message)
            else:
                if measurement.numbers:
                    return str(engine), measurement, problems
                problems += measurement.problems
        else:
            problems.append(
                "No engine is installed, so matrix products and all-reduces are not measured."
                " Install an engine first."
            )
        try:
            return (
                "the driver",
                await _first_line(
                    run_inquiry_process(
                        Path(sys.executable), self.folder, document(gpu_set, "driver")
                    ),
                    gpu_set,
                ),
                problems,
            )
        except HostError as error:
            return "", None, [*problems, error.message]


async def _first_line(answer: AsyncGenerator[bytes, None], gpu_set: GpuSet) -> Measurement:
    """The measurement in the first line of an answer. Raises HostError."""
    try:
        async with asyncio.timeout(LIMIT_S), contextlib.aclosing(answer) as lines:
            return read_measurement([await anext(lines, b"")], len(gpu_set.gpus))
    except TimeoutError:
        raise HostError(
            f"Nothing was measured within {LIMIT_S:.0f} s.",
            hint="Check the driver with `nvidia-smi`.",
        ) from None
