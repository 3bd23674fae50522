"""Plans for the machine of a gateway that runs: what is in it now goes to the process that plans,
and its engines are asked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.domain import (
    Asked,
    EngineAnswer,
    Hardware,
    Plan,
    Planned,
    Question,
    Rival,
    RunningPlan,
    Sharing,
    Wish,
)
from gateway.domain.image_name import AllowedImages, exact
from gateway.domain.plan import ALONE
from gateway.engines.inquiry.document import ModelFiles
from gateway.errors import BadModel, HostError
from gateway.planner.service.checking import LIMIT_S, Forecast, checked
from gateway.planner.service.images import hear, named
from gateway.planner.service.messages import (
    ANSWERS,
    FACTS,
    GAPS,
    OPEN,
    SEEN,
    SHARING,
    TAKES,
    Frames,
    Request,
)
from gateway.planner.service.plan_process import PlanProcess

if TYPE_CHECKING:
    from gateway.engines.inquiry.inquirer import Inquirer
    from gateway.machine.gpu_watch import GpuWatch
    from gateway.profiles.profiles import Profiles


@dataclass(frozen=True)
class MachinePlanner:
    """`gateway.controller.steps.planner_port` is its contract. `data`: the gateway's data folder.
    `profiles`: those that the process has too."""

    data: Path
    process: PlanProcess
    gpus: GpuWatch
    inquirer: Inquirer
    profiles: Profiles
    images: AllowedImages | None
    """Those that may be started; None: engines are processes here."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Of many models that are checked at once one is planned at a time: the process lets few
    requests wait."""

    async def hardware(self) -> Hardware:
        return await asyncio.to_thread(self.gpus.hardware, self.data)

    async def named(self, wish: Wish) -> Wish:
        found = await named(wish, self.images, self.profiles, self.inquirer)
        if not isinstance(wish.gpus, tuple) or not any(map(str.isdecimal, wish.gpus)):
            return found
        # The driver numbers GPUs anew when one is gone at its start.
        uuids = {str(gpu.index): gpu.uuid for gpu in (await self.hardware()).gpus}
        return found.evolve(gpus=tuple(dict.fromkeys(uuids.get(one, one) for one in wish.gpus)))

    async def decide(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        hardware: str | None = None,
        answers: Mapping[Question, EngineAnswer] | None = None,
        pins: Mapping[str, str] | None = None,
        running: RunningPlan | None = None,
        *,
        others: bool = False,
        sharing: Sharing = ALONE,
    ) -> Planned:
        machine = None if hardware else await self.hardware()
        asked = (wish, facts, claims, answers or {}, pins or {}, machine, hardware)
        return (await self._forecast(*asked, running=running, others=others, sharing=sharing))[
            0
        ].decision

    async def check(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        answers: Mapping[Question, EngineAnswer],
        problems: Mapping[str, str],
        pins: Mapping[str, str],
        limit_s: float,
        sharing: Sharing = ALONE,
    ) -> tuple[Planned, Asked]:
        machine, limit_s = await self.hardware(), min(limit_s, LIMIT_S)

        async def again(fresh: Mapping[Question, EngineAnswer]) -> Forecast[Planned]:
            async with self.turn:
                return (
                    await self._forecast(
                        wish, facts, claims, {**answers, **fresh}, pins, machine, sharing=sharing
                    )
                )[0]

        async with self.turn:
            forecast, frames = await self._forecast(
                wish, facts, claims, answers, pins, machine, asking=True, sharing=sharing
            )
        if forecast.open:
            engine, begun = forecast.open[0].engine, time.monotonic()
            try:
                heard = await hear(exact(engine, pins), self.profiles, self.inquirer, limit_s)
            except HostError as error:
                return forecast.decision, Asked({}, {str(engine): str(error)}, pins)
            limit_s = max(0, limit_s - round(time.monotonic() - begun))
        if forecast.open and heard:
            async with self.turn:
                forecast, frames = await self._forecast(
                    wish, facts, claims, answers, pins, machine, asking=True, sharing=sharing
                )
        if not frames.config:
            why = "The model has more tensors than an engine is told of."
            return forecast.decision, Asked({}, dict.fromkeys(forecast.decision.open, why), pins)
        files, gpus = ModelFiles(frames.config, frames.headers or None), machine.usable()
        return await checked(forecast, again, self.inquirer, gpus, files, limit_s, problems, pins)

    async def _forecast(
        self,
        wish: Wish,
        facts: Sequence[str],
        claims: Mapping[str, int],
        answers: Mapping[Question, EngineAnswer],
        pins: Mapping[str, str],
        machine: Hardware | None,
        hardware: str | None = None,
        *,
        asking: bool = False,
        running: RunningPlan | None = None,
        others: bool = False,
        sharing: Sharing = ALONE,
    ) -> tuple[Forecast[Planned], Frames]:
        """`asking`: the frames have what engines are told of the model. `others`: the decision has
        what engines would give that are not here."""
        if wish.source is None:
            raise BadModel(
                f"The model {wish.name} is an endpoint; there is nothing to plan.",
                hint="Give a `source` instead.",
            )
        fields: dict[str, object] = {
            "wish": wish.model_dump(mode="json"),
            "claims": dict(claims),
            "snapshot": hardware,
            "asking": asking,
        }
        fields["others"], fields["sharing"] = others, SHARING.dump_python(sharing, mode="json")
        fields |= {"pins": dict(pins), "held": running.held if running else {}}
        fields["running"] = running.plan.model_dump(mode="json") if running else None
        fields["against"] = (
            running.against.model_dump(mode="json") if running and running.against else None
        )
        fields["seen"] = SEEN.dump_python(running.seen, mode="json") if running else []
        here = machine.model_dump_json(by_alias=True).encode() if machine else b""
        known = ANSWERS.dump_json(list(answers.items()))
        request = Request(json.dumps(fields).encode(), here, "\n".join(facts).encode(), known)
        answer, frames = await self.process.ask(wish.source, request)
        plan, found = (
            Plan.model_validate_json(frames.plan) if frames.plan else None,
            OPEN.validate_json(frames.open),
        )
        if plan is not None:
            # Where the engine of the best plan cannot be asked, its forecast is what is started,
            # whatever others would say.
            found = found[:1]
        rival = Rival.model_validate_json(frames.rival) if frames.rival else None
        takes = TAKES.validate_json(frames.takes) if frames.takes else ()
        asked = tuple(str(one.engine) for one in found)
        learned, unasked = FACTS.validate_json(frames.learned), tuple(answer.unasked)
        planned = Planned(
            plan,
            answer.reason,
            frames.decision,
            asked,
            rival,
            answer.commits,
            takes,
            learned,
            unasked,
            answer.template,
        )
        return Forecast(planned, found, GAPS.validate_json(frames.gaps)), frames
