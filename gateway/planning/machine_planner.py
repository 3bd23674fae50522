"""Plans for the machine of a gateway that runs: what is in it now goes to the process that plans, and its engines are asked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.checking import LIMIT_S, Forecast, checked
from gateway.domain import Asked, EngineAnswer, Hardware, Plan, Planned, Question, Wish
from gateway.errors import BadModel, HostError
from gateway.inquiry.document import ModelFiles
from gateway.inquiry.learned import learn
from gateway.planning.messages import ANSWERS, GAPS, OPEN, Frames, Request
from gateway.planning.plan_process import PlanProcess

if TYPE_CHECKING:
    from gateway.inquiry.inquirer import Inquirer
    from gateway.machine.gpu_watch import GpuWatch
    from gateway.profiles import Profiles


@dataclass(frozen=True)
class MachinePlanner:
    """`gateway.controller.planner` is its contract. `data`: the gateway's data folder. `profiles`: those that the process has too."""

    data: Path
    process: PlanProcess
    gpus: GpuWatch
    inquirer: Inquirer
    profiles: Profiles
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of many models that are checked at once one is planned at a time: the process lets few requests wait."""

    async def hardware(self) -> Hardware:
        return await asyncio.to_thread(self.gpus.hardware, self.data)

    async def decide(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        hardware: str | None = None,
        answers: Mapping[Question, EngineAnswer] | None = None,
    ) -> Planned:
        machine = None if hardware else await self.hardware()
        return (await self._forecast(wish, facts, claims, answers or {}, machine, hardware))[0].decision

    async def check(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        answers: Mapping[Question, EngineAnswer],
        problems: Mapping[str, str],
        limit_s: float,
    ) -> tuple[Planned, Asked]:
        machine, limit_s = await self.hardware(), min(limit_s, LIMIT_S)

        async def again(fresh: Mapping[Question, EngineAnswer]) -> Forecast[Planned]:
            async with self.turn:
                return (await self._forecast(wish, facts, claims, {**answers, **fresh}, machine))[0]

        async with self.turn:
            forecast, frames = await self._forecast(wish, facts, claims, answers, machine, asking=True)
        if forecast.open and not self.profiles.describes(engine := str(forecast.open[0].engine)):
            # Before it is asked about a model, a version that nobody described says what it is.
            near, folder, begun = self.profiles.nearest(engine), self.data / "learned", time.monotonic()
            try:
                await learn(self.inquirer, near, forecast.open[0].engine, folder, limit_s)
            except HostError as error:
                return forecast.decision, Asked({}, {engine: str(error)})
            limit_s = max(0, limit_s - round(time.monotonic() - begun))
            async with self.turn:
                forecast, frames = await self._forecast(wish, facts, claims, answers, machine, asking=True)
        if not frames.config:
            why = "The model has more tensors than an engine is told of."
            return forecast.decision, Asked({}, dict.fromkeys(forecast.decision.open, why))
        files, here = ModelFiles(frames.config, frames.headers or None), machine.without_lost_gpus()
        return await checked(forecast, again, self.inquirer, here, files, limit_s, problems)

    async def _forecast(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        answers: Mapping[Question, EngineAnswer],
        machine: Hardware | None,
        hardware: str | None = None,
        *,
        asking: bool = False,
    ) -> tuple[Forecast[Planned], Frames]:
        """`asking`: the frames have what engines are told of the model."""
        if wish.source is None:
            raise BadModel(f"The model {wish.name} is an endpoint; there is nothing to plan.", hint="Give a `source` instead.")
        fields = {"wish": wish.model_dump(mode="json"), "claims": dict(claims), "snapshot": hardware, "asking": asking}
        here = machine.model_dump_json(by_alias=True).encode() if machine else b""
        known = ANSWERS.dump_json(list(answers.items()))
        request = Request(json.dumps(fields).encode(), here, "\n".join(facts).encode(), known)
        answer, frames = await self.process.ask(wish.source, request)
        plan, found = Plan.model_validate_json(frames.plan) if frames.plan else None, OPEN.validate_json(frames.open)
        if plan is not None:
            # Where the engine of the best plan cannot be asked, its forecast is what is started, whatever others would say.
            found = found[:1]
        planned = Planned(plan, answer.reason, frames.decision, tuple(str(one.engine) for one in found))
        return Forecast(planned, found, GAPS.validate_json(frames.gaps)), frames
