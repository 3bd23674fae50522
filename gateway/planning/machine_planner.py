"""Plans for the machine of a gateway that runs: what is in it now goes to the process that plans."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.domain import Hardware, Plan, Planned, Wish
from gateway.errors import BadModel
from gateway.planning.messages import Request
from gateway.planning.plan_process import PlanProcess

if TYPE_CHECKING:
    from gateway.machine.gpu_watch import GpuWatch


@dataclass(frozen=True)
class MachinePlanner:
    """`gateway.controller.planner` is its contract. `data`: the gateway's data folder."""

    data: Path
    process: PlanProcess
    gpus: GpuWatch

    async def hardware(self) -> Hardware:
        return await asyncio.to_thread(self.gpus.hardware, self.data)

    async def decide(self, wish: Wish, facts: Sequence[str], claims: Mapping[str, int], hardware: str | None = None) -> Planned:
        if wish.source is None:
            raise BadModel(f"The model {wish.name} is an endpoint; there is nothing to plan.", hint="Give a `source` instead.")
        machine = b"" if hardware else (await self.hardware()).model_dump_json(by_alias=True).encode()
        fields = {"wish": wish.model_dump(mode="json"), "claims": dict(claims), "snapshot": hardware}
        request = Request(json.dumps(fields).encode(), machine, "\n".join(facts).encode())
        answer, plan, decision = await self.process.ask(wish.source, request)
        return Planned(Plan.model_validate_json(plan) if plan else None, answer.reason, decision)
