"""The order of copies between machines, with machines that answer from memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.errors import AgentAway, AgentRefusal, HostError
from gateway.hosts.agent.calls import Call, DoneAnswer, MissingCall, WeightsCall, WeightsFile
from gateway.hosts.cluster.node_host import NodeHost
from gateway.hosts.cluster.weights_copies import WeightsCopies
from gateway.hosts.host import HubCommit
from tests.support.hub_commits import COMMIT, REPO
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio

WANTED = HubCommit(REPO, COMMIT)
OTHER = HubCommit("org/other", COMMIT)
FILE = WeightsFile(name="config.json", size=2, digest="0" * 64)
OLDER = AgentRefusal("The agent refuses: the call is unknown.")
AWAY = AgentAway("The machine does not answer.")


class MemoryNode(NodeHost):
    """A machine with whole commits of some repositories."""

    def __init__(self, name: str, *repos: str, error: HostError | None = None) -> None:
        super().__init__(Path(), name, "a")
        self.repos = repos
        self.error = error
        self.calls: list[Call] = []
        self.copy_error: HostError | None = None
        self.comparison = asyncio.Event()
        """Set: files are compared at once."""
        self.comparison.set()

    async def final_answer(self, call: Call, timeout_s: float | None) -> DoneAnswer:
        self.calls.append(call)
        if isinstance(call, MissingCall):
            await self.comparison.wait()
            if self.copy_error is not None:
                raise self.copy_error
        if isinstance(call, WeightsCall):
            if self.error is not None:
                raise self.error
            return DoneAnswer(files=(FILE,) if call.repo in self.repos else ())
        return DoneAnswer()

    def has_compared(self) -> bool:
        return any(isinstance(call, MissingCall) for call in self.calls)


async def bring(target: NodeHost, *nodes: NodeHost) -> None:
    await WeightsCopies().copy(target, nodes, WANTED, lambda _: None)


@pytest.mark.parametrize("error", [OLDER, AWAY])
async def test_a_machine_that_lists_no_weights_stops_no_start(
    anyio_backend: str, error: HostError
) -> None:
    target, source = MemoryNode("one"), MemoryNode("three", REPO)
    silent_node = MemoryNode("two", error=error)
    await bring(target, target, silent_node)
    assert not target.has_compared()
    await bring(target, target, silent_node, source)
    assert target.has_compared()


async def test_an_older_target_gets_no_copy_and_starts(anyio_backend: str) -> None:
    target = MemoryNode("one", error=OLDER)
    await bring(target, target, MemoryNode("two", REPO))
    assert not target.has_compared()


async def test_a_target_that_does_not_answer_is_named(anyio_backend: str) -> None:
    with pytest.raises(AgentAway):
        await bring(MemoryNode("one", error=AWAY), MemoryNode("two", REPO))


async def test_an_error_of_a_copy_outlives_a_machine_that_lists_no_weights(
    anyio_backend: str,
) -> None:
    target = MemoryNode("one")
    target.copy_error = HostError("The disk is full.")
    with pytest.raises(HostError, match="disk is full"):
        await bring(target, MemoryNode("two", REPO), MemoryNode("three", error=AWAY))


async def test_whole_weights_wait_for_no_other_copy(anyio_backend: str) -> None:
    target, source = MemoryNode("one", OTHER.repo), MemoryNode("two", REPO)
    copies = WeightsCopies()
    target.comparison.clear()
    copying = asyncio.ensure_future(copies.copy(target, [source], WANTED, lambda _: None))
    async with asyncio.timeout(hang_s()):
        while not target.has_compared():
            await asyncio.sleep(0)
        await copies.copy(target, [source], OTHER, lambda _: None)
    assert not copying.done()
    target.comparison.set()
    await copying
