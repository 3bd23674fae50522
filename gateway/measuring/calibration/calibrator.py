"""Measures the GPUs of this machine that are free: an engine's own Python where one is here, else
the driver alone, in a child process."""

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
from gateway.hosts.process.asked_environment import ask
from gateway.measuring.calibration.gpu_set import GpuSet, in_use, sets
from gateway.measuring.calibration.measurement import LIMIT_S, Measurement, document, facts_of, read
from gateway.profiles.profiles import Profiles


class Calibrated(Value):
    """What was measured, which GPUs were left alone and why (by UUID), and what did not work."""

    facts: tuple[Fact, ...]
    left_alone: dict[str, str]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Calibrator:
    """host: has the engines. folder: for what a child writes."""

    host: AskedHost
    profiles: Profiles
    folder: Path

    async def measure(self, hardware: Hardware, holders: Mapping[str, str]) -> Calibrated:
        """holders: by UUID what runs on a GPU, and what to do about it. Raises Conflict."""
        if not hardware.gpus:
            raise Conflict(
                "There is no GPU here that could be measured.",
                hint="`fitserve doctor` says what is missing.",
            )
        busy = in_use(hardware, holders)
        free = [gpu for gpu in hardware.gpus if gpu.uuid not in busy]
        facts: list[Fact] = []
        problems: list[str] = []
        engine = await self._engine() if free else None
        for one in sets(free, hardware.links):
            by, found, went_wrong = await self._measured(one, engine)
            problems += went_wrong
            if found is not None:
                kept, not_kept = facts_of(found, one, by, hardware.driver, time.time())
                facts += kept
                problems += not_kept
        return Calibrated(facts=tuple(facts), left_alone=busy, problems=tuple(problems))

    async def _engine(self) -> EngineRef | None:
        """One that is here. What would have to be downloaded first is not asked for."""
        for engine in await asyncio.to_thread(self.profiles.references, "cuda"):
            with contextlib.suppress(HostError):
                found = await self.host.resolve(engine)
                await self.host.identity(found)
                return found
        return None

    async def _measured(
        self, one: GpuSet, engine: EngineRef | None
    ) -> tuple[str, Measurement | None, list[str]]:
        """And by whom, and what went wrong. The driver multiplies nothing: it is the last
        resort."""
        problems = []
        if engine is not None:
            uuids = tuple(gpu.uuid for gpu in one.gpus)
            try:
                found = await _first_line(
                    self.host.inquire(engine, document(one, "torch"), uuids), one
                )
            except HostError as error:
                problems.append(error.message)
            else:
                if found.numbers:
                    return str(engine), found, problems
                problems += found.problems
        else:
            problems.append(
                "No engine is here whose Python could multiply: products and all-reduces are not"
                " measured. Install one first."
            )
        try:
            return (
                "the driver",
                await _first_line(
                    ask(Path(sys.executable), self.folder, document(one, "driver")), one
                ),
                problems,
            )
        except HostError as error:
            return "", None, [*problems, error.message]


async def _first_line(said: AsyncGenerator[bytes, None], one: GpuSet) -> Measurement:
    """Raises HostError."""
    try:
        async with asyncio.timeout(LIMIT_S), contextlib.aclosing(said) as lines:
            return read([await anext(lines, b"")], len(one.gpus))
    except TimeoutError:
        raise HostError(
            f"Nothing was measured within {LIMIT_S:.0f} s.",
            hint="See whether the driver works (`nvidia-smi`).",
        ) from None
