"""The host over machines in the contract suite: real Ray, two machines in network namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

from gateway.domain import LaunchSpec
from gateway.errors import FitserveError
from gateway.hosts.cluster import host
from gateway.hosts.cluster.host import ClusterHost
from gateway.hosts.cluster.membership import read_membership
from gateway.hosts.cluster.node_host import ANSWER_S
from gateway.hosts.cluster.ray_start import ray_environment
from tests.contract.harness import until
from tests.contract.process_harness import fake_spec, living_in
from tests.support.cluster_nodes import HEAD_PORT, ClusterNodes, obstacle
from tests.support.patience import slowness

OWNER = "contract"


class LinkedNodes(ClusterNodes):
    """The machines, and a link on the first one as a gateway has it."""

    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        super().start()
        self.link = self.folder / "link.sock"
        self.until("the machines have joined", lambda: self.connect() and self.has_joined())

    def connect(self) -> bool:
        """Start the link unless it runs. Returns whether it runs."""
        if self.process is None or self.process.poll() is not None:
            self._disconnect()
            membership = read_membership(self.head.data)
            if membership is None:
                return False
            self.process = subprocess.Popen(
                self.head.command(
                    "gateway.hosts.cluster.link",
                    f"{self.head.address}:{HEAD_PORT}",
                    str(self.link),
                ),
                env=ray_environment(membership.token_file, self.head.environment()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self.process.stdout is not None
            while (line := self.process.stdout.readline()) not in (b"", b"ready\n"):
                pass
            return line == b"ready\n"
        return True

    def begin(self) -> None:
        """Start the machines whose supervisors a former test ended."""
        for node in self.nodes:
            if node.supervisor is None or node.supervisor.poll() is not None:
                node.start()

    def has_joined(self) -> bool:
        return all(node.pids("raylet/raylet") for node in self.nodes)

    def close(self) -> list[int]:
        self._disconnect()
        return super().close()

    def _disconnect(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None


class ClusterHarness:
    log_stays = True

    def __init__(self, nodes: LinkedNodes) -> None:
        self.nodes = nodes
        self.host = self.restart()

    async def join(self) -> None:
        """Wait until all machines answer, as after a fault."""

        async def is_member() -> bool:
            for node in self.nodes.nodes:
                assert node.supervisor is not None
                assert node.supervisor.poll() is None, node.log.read_text()
            await asyncio.to_thread(self.nodes.connect)
            with suppress(FitserveError):
                names = {view.name for view in await self.host.views()}
                node_names = {node.name for node in self.nodes.nodes}
                return names == node_names and await self.host.list() is not None
            return False

        await until("all machines answer", is_member)

    def make_spec(
        self, name: str, fingerprint: str = "f1", script: Sequence[str] = (), port: int = 0
    ) -> LaunchSpec:
        return fake_spec(name, fingerprint, script, port, address="127.0.0.1")

    def restart(self) -> ClusterHost:
        # On a busy machine an answer takes longer.
        self.host = ClusterHost(self.nodes.link, OWNER, answer_s=ANSWER_S * slowness())
        return self.host

    def records(self, name: str) -> list[Path]:
        return [node.data / "instances" / f"{name}.json" for node in self.nodes.nodes]

    def foreign(self, name: str) -> Callable[[], bool]:
        """A name is held on every machine: another one would be free to take it."""
        paths = self.records(name)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("not a record of ours")
        return lambda: all(path.read_text() == "not a record of ours" for path in paths)

    def pid(self, name: str) -> int:
        (path,) = (path for path in self.records(name) if path.exists())
        pid: int = json.loads(path.read_text())["pid"]
        return pid

    def kill_engine(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def members(self, name: str) -> int:
        return sum(len(living_in(node.data / "run" / name)) for node in self.nodes.nodes)

    async def cleanup(self) -> None:
        for instance in await self.host.list():
            await self.host.stop(instance.name, grace_s=0)
        await self.host.close()
        for node in self.nodes.nodes:
            (node.data / "cluster/drained").unlink(missing_ok=True)
            for folder in ("instances", "logs"):
                with suppress(OSError):
                    shutil.rmtree(node.data / folder)


@asynccontextmanager
async def cluster_for_test(nodes: LinkedNodes) -> AsyncIterator[ClusterHarness]:
    """The machines for one test in their network, once all answer; then without engines."""
    cluster_harness = ClusterHarness(nodes)
    nodes.begin()
    with nodes.network(), mock.patch.object(host, "_LIST_S", host._LIST_S * slowness()):
        try:
            await cluster_harness.join()
            yield cluster_harness
        finally:
            await cluster_harness.join()
            await cluster_harness.cleanup()


def linked_nodes() -> LinkedNodes:
    """Skips the test where namespaces or Ray are missing."""
    if reason := obstacle():
        pytest.skip(reason)
    return LinkedNodes()
