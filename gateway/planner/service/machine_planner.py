"""The planner of a running gateway: for its machine as it is now, with questions to its engines."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.domain import Cluster, Hardware, InquiryResult, Wish
from gateway.domain.image_name import AllowedImages, exact
from gateway.domain.plan_request import PlanRequest, PlanResult
from gateway.engines.inquiry.inquiry_document import ModelFiles
from gateway.errors import BadModel, HostError
from gateway.planner.service.engine_check import EngineCheck, check_limit_s
from gateway.planner.service.images import add_image_engine, learn_engine
from gateway.planner.service.plan_process import PlanProcess

if TYPE_CHECKING:
    from gateway.engines.inquiry.inquirer import Inquirer
    from gateway.machine.gpu_watch import GpuWatch
    from gateway.profiles.profiles import Profiles


def _one_class() -> int:
    return 1


@dataclass(frozen=True)
class MachinePlanner:
    """Implements `gateway.controller.steps.planner_port`.

    data: the gateway's data folder.
    profiles: those of the plan process.
    images: images that may start; None if engines are processes.
    facts: the learned facts, as JSON.
    cluster: the machines that start engines now; None: there is one machine.
    settle: waits for measurements of machines that have just come; None: there are none.
    key_classes: how many classes of priority the keys of callers have now.
    """

    data: Path
    process: PlanProcess
    gpus: GpuWatch
    inquirer: Inquirer
    profiles: Profiles
    images: AllowedImages | None
    facts: Callable[[], Sequence[str]] = tuple
    cluster: Callable[[], Awaitable[Cluster]] | None = None
    key_classes: Callable[[], int] = _one_class
    settle: Callable[[], Awaitable[None]] | None = None
    check_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Checks of many models plan one at a time: the process lets few requests wait."""

    async def hardware(self) -> Hardware:
        if self.cluster is not None:
            return _join_nodes(await self.cluster())
        return await asyncio.to_thread(self.gpus.hardware, self.data)

    async def resolve(self, wish: Wish) -> Wish:
        wish = await add_image_engine(wish, self.images, self.profiles, self.inquirer)
        if self.cluster is not None:
            # Numbers of GPUs are valid only on their node, and the planner reads NODE/NUMBER.
            return wish
        if not isinstance(wish.gpus, tuple) or not any(map(str.isdecimal, wish.gpus)):
            return wish
        # The driver renumbers GPUs if one is missing at its start.
        uuids = {str(gpu.index): gpu.uuid for gpu in (await self.hardware()).gpus}
        return wish.evolve(gpus=tuple(dict.fromkeys(uuids.get(name, name) for name in wish.gpus)))

    async def plan(self, request: PlanRequest) -> PlanResult:
        if self.settle is not None:
            await self.settle()
        return await self._request_plan(request, may_wait=True)

    async def preview(self, request: PlanRequest) -> PlanResult:
        return await self._request_plan(request, may_wait=False)

    async def _request_plan(self, request: PlanRequest, *, may_wait: bool) -> PlanResult:
        if request.wish.source is None:
            raise BadModel(
                f"The model {request.wish.name} is an endpoint; there is nothing to plan.",
                hint="Give a `source` instead.",
            )
        if request.machine is None and not request.machine_name:
            request = await self._add_machine(request)
        facts = await asyncio.to_thread(self.facts)
        return await self.process.request_plan(request, facts, may_wait=may_wait)

    async def check(
        self, request: PlanRequest, problems: Mapping[str, str], limit_s: float
    ) -> PlanResult:
        """Plan, and let engines answer the open questions of the plan."""
        request = replace(await self._add_machine(request), include_files=True)
        load = os.getloadavg()[0]
        cores = len(os.sched_getaffinity(0))
        limit_s = min(limit_s, check_limit_s(load, cores))
        result = await self._plan_for_check(request)
        if result.questions:
            engine = result.questions[0].engine
            start_s = time.monotonic()
            try:
                has_learned = await learn_engine(
                    exact(engine, request.pins), self.profiles, self.inquirer, limit_s
                )
            except HostError as error:
                return result._replace(
                    inquiry=InquiryResult({}, {str(engine): str(error)}, request.pins)
                )
            limit_s = max(0, limit_s - round(time.monotonic() - start_s))
            if has_learned:
                result = await self._plan_for_check(request)
        if not result.config:
            reason = "The model has more tensors than fit in a question to an engine."
            problems = dict.fromkeys(result.engines_to_ask, reason)
            return result._replace(inquiry=InquiryResult({}, problems, request.pins))
        assert request.machine is not None  # noqa: S101
        files = ModelFiles(result.config, result.tensor_headers or None, result.quant_files)
        check = EngineCheck(
            inquirer=self.inquirer,
            machine=request.machine.usable(),
            model=files,
            limit_s=limit_s,
            problems=problems,
            pins=request.pins,
        )
        while await check.query(result.questions):
            answers = (*request.answers, *check.answers.items())
            result = await self._plan_for_check(
                replace(request, answers=answers, include_files=False)
            )
        await check.report(result.gaps)
        return result._replace(inquiry=check.outcome)

    async def _add_machine(self, request: PlanRequest) -> PlanRequest:
        """The request for the machine, or the machines, and the keys as they are now."""
        request = replace(request, key_classes=self.key_classes())
        if self.cluster is None:
            return replace(request, machine=await self.hardware())
        cluster = await self.cluster()
        return replace(request, machine=_join_nodes(cluster), cluster=cluster)

    async def _plan_for_check(self, request: PlanRequest) -> PlanResult:
        async with self.check_lock:
            return await self.plan(request)


def _join_nodes(cluster: Cluster) -> Hardware:
    """A machine with the GPUs of all nodes, for names and for questions to engines."""
    first = cluster.nodes[0].hardware
    gpus = (gpu for node in cluster.nodes for gpu in node.hardware.gpus)
    numbered = tuple(gpu.evolve(index=index) for index, gpu in enumerate(gpus))
    return first.evolve(gpus=numbered, links=first.links if len(cluster.nodes) == 1 else ())
