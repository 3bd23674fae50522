"""A preparation: joined by the start that needs it, replaced by one with other needs, and ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.controller.fleet.preparation import LaunchFiles, Preparation, Report
from gateway.domain import Plan
from gateway.errors import HostError
from tests.support.makers import plan

pytestmark = pytest.mark.anyio

FILES = LaunchFiles(Path("/weights"), None, {})


class World:
    def __init__(self, error: Exception | None = None) -> None:
        self.fetch_event, self.reading, self.cancelled = asyncio.Event(), asyncio.Event(), 0
        self.tasks: set[asyncio.Task[object]] = set()
        self._error = error

    async def bring(self, _plan: Plan, report: Report) -> LaunchFiles:
        report("a download")
        await self.fetch_event.wait()
        if self._error is not None:
            raise self._error
        return FILES

    async def read(self, _plan: Plan, files: LaunchFiles) -> None:
        assert files == FILES
        self.reading.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def test_a_start_joins_the_running_one() -> None:
    world, reports = World(), list[str]()
    preparation = Preparation(plan("3090"), world.bring, world.read, world.tasks)
    await asyncio.sleep(0)
    second_start = asyncio.create_task(preparation.files(reports.append))
    await asyncio.sleep(0)
    assert reports == ["a download"]
    world.fetch_event.set()
    assert await second_start == FILES
    await world.reading.wait()
    assert preparation.serves(plan("3090", max_context=2048)), (
        "another context needs the same files"
    )
    preparation.cancel()
    (reading,) = world.tasks
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert world.cancelled == 1
    assert not world.tasks


async def test_a_cancelled_start_leaves_the_download() -> None:
    world = World()
    preparation = Preparation(plan("3090"), world.bring, world.read, world.tasks)
    second_start = asyncio.create_task(preparation.files(lambda _: None))
    await asyncio.sleep(0)
    second_start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second_start
    world.fetch_event.set()
    assert await preparation.files(lambda _: None) == FILES
    preparation.cancel()


async def test_a_preparation_that_failed_or_is_of_another_model_serves_no_start() -> None:
    world, model_plan = World(HostError("no disk", hint="more")), plan("3090")
    preparation = Preparation(model_plan, world.bring, world.read, world.tasks)
    assert preparation.serves(model_plan)
    assert not preparation.serves(model_plan.evolve(model=model_plan.model.evolve(source="/other")))
    world.fetch_event.set()
    with pytest.raises(HostError):
        await preparation.files(lambda _: None)
    assert not preparation.serves(model_plan)
    preparation.cancel()
