"""Copies of weights between the machines of a cluster, ordered by the gateway.

A machine gets the files that it lacks from a machine that has all of them, over the relays: the
gateway sees no byte of them. A copy that breaks off is continued, from another machine if need be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from weakref import WeakValueDictionary

from gateway.domain.units import TransferProgress, format_bytes
from gateway.errors import AgentRefusal, FitserveError
from gateway.hosts.agent.calls import (
    DoneAnswer,
    MissingCall,
    MissingFile,
    ProgressAnswer,
    ReceiveCall,
    SendCall,
    WeightsCall,
    WeightsFile,
)
from gateway.hosts.cluster.node_host import NodeHost
from gateway.hosts.host import HubCommit
from gateway.logging import Logger

log = Logger("fitserve.cluster")

# Files that are copied concurrently. Each takes a few chunks of memory on both machines.
_MAX_CONCURRENT_FILES = 3


class WeightsCopies:
    """Copies commits of the Hub to machines, one at a time to each."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def copy(
        self,
        target: NodeHost,
        nodes: Sequence[NodeHost],
        commit: HubCommit,
        report: Callable[[str], None],
    ) -> None:
        """Copy the missing files of a commit to the target from one of the nodes.

        Without a node that has the commit nothing happens, nor on a target that refuses the call:
        its fitserve may be older. Raises AgentAway where the target does not answer, and the last
        error of the copies.
        """
        if not await self._lacks(target, commit):
            return
        # Others copy to the target for hours.
        async with self._turns.setdefault(target.name, asyncio.Lock()):
            if not await self._lacks(target, commit):
                return
            failure: FitserveError | None = None
            for source in (node for node in nodes if node.name != target.name):
                try:
                    files = await self.files(source, commit)
                except FitserveError as error:
                    # The machine may hang, or run an older fitserve.
                    _log_silence(source, commit, error)
                    continue
                if not files:
                    continue
                try:
                    await self._copy(target, source, commit, files, report)
                except FitserveError as error:
                    log.warning(
                        "weights could not be copied",
                        source=source.name,
                        target=target.name,
                        model=commit.repo,
                        reason=str(error),
                    )
                    failure = error
                else:
                    return
            if failure is not None:
                raise failure

    async def files(self, node: NodeHost, commit: HubCommit) -> tuple[WeightsFile, ...]:
        """The files of a commit that is whole on the machine; none: it is not. Raises HostError."""
        call = WeightsCall(
            repo=commit.repo, commit=commit.revision, remote_code=commit.allows_remote_code
        )
        return (await node.final_answer(call, node.answer_s)).files

    async def _lacks(self, target: NodeHost, commit: HubCommit) -> bool:
        """Whether the machine takes copies, and lacks the commit. Raises HostError."""
        try:
            return not await self.files(target, commit)
        except AgentRefusal as error:
            _log_silence(target, commit, error)
            return False

    async def _copy(
        self,
        target: NodeHost,
        source: NodeHost,
        commit: HubCommit,
        files: tuple[WeightsFile, ...],
        report: Callable[[str], None],
    ) -> None:
        """Copy missing files of a commit between two machines, and verify them there."""
        total = sum(file.size for file in files)
        report(f"Checking {commit.repo} on {target.name}")
        missing_files = await self._request_missing(target, commit, files)
        progress = _Progress(commit.repo, source.name, target.name, total, report)
        # Files with equal bytes are one blob, which is copied once and linked for all.
        distinct_files = {
            missing_file.file.digest: missing_file for missing_file in missing_files
        }.values()
        progress.start(distinct_files)
        permits = asyncio.Semaphore(_MAX_CONCURRENT_FILES)

        async def copy(missing_file: MissingFile) -> None:
            async with permits:
                await self._copy_file(target, source, commit, missing_file, progress)

        answers = await asyncio.gather(*map(copy, distinct_files), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if missing_files:
            await self._request_missing(target, commit, files)
        log.info(
            "weights were copied",
            model=commit.repo,
            source=source.name,
            target=target.name,
            bytes=sum(
                distinct_file.file.size - distinct_file.offset for distinct_file in distinct_files
            ),
        )

    async def _request_missing(
        self, target: NodeHost, commit: HubCommit, files: tuple[WeightsFile, ...]
    ) -> tuple[MissingFile, ...]:
        """The files that the machine lacks. Files that are there are read once, for minutes."""
        call = MissingCall(
            repo=commit.repo,
            commit=commit.revision,
            remote_code=commit.allows_remote_code,
            files=files,
        )
        return (await target.final_answer(call, None)).missing

    async def _copy_file(
        self,
        target: NodeHost,
        source: NodeHost,
        commit: HubCommit,
        missing_file: MissingFile,
        progress: _Progress,
    ) -> None:
        """Copy one file from machine to machine, from the bytes that the target already has."""
        receive = ReceiveCall(
            repo=commit.repo,
            commit=commit.revision,
            remote_code=commit.allows_remote_code,
            file=missing_file.file,
            offset=missing_file.offset,
        )
        send = SendCall(
            repo=commit.repo,
            commit=commit.revision,
            remote_code=commit.allows_remote_code,
            name=missing_file.file.name,
            offset=missing_file.offset,
        )
        name = missing_file.file.name
        async with aclosing(target.receive(receive, source, send)) as answers:
            async for answer in answers:
                if isinstance(answer, ProgressAnswer):
                    progress.record(name, int(answer.text))
                elif isinstance(answer, DoneAnswer):
                    progress.record(name, missing_file.file.size)


def _log_silence(node: NodeHost, commit: HubCommit, error: FitserveError) -> None:
    log.warning(
        "a machine does not list its weights",
        node=node.name,
        model=commit.repo,
        reason=str(error),
    )


class _Progress:
    """The bytes of a copy, file by file, as text for the user."""

    def __init__(
        self, repo: str, source: str, target: str, total: int, report: Callable[[str], None]
    ) -> None:
        self._words = f"Copying {repo} from {source} to {target}"
        self._total = total
        self._report = report
        self._sizes: dict[str, int] = {}
        self._present_bytes = 0

    def start(self, missing_files: Collection[MissingFile]) -> None:
        self._sizes = {
            missing_file.file.name: missing_file.offset for missing_file in missing_files
        }
        self._present_bytes = self._total - sum(
            missing_file.file.size for missing_file in missing_files
        )

    def record(self, name: str, size: int) -> None:
        self._sizes[name] = size
        done_bytes = self._present_bytes + sum(self._sizes.values())
        share = 100 * done_bytes // max(self._total, 1)
        self._report(
            TransferProgress(
                f"{self._words}: {format_bytes(done_bytes)} of {format_bytes(self._total)}"
                f" ({share} %)",
                done_bytes,
                self._total,
            )
        )
