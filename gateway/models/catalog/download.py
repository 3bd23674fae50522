"""Bring a Hugging Face repository at a commit into the Hub's cache of this machine, ready to be
mounted into an engine.

The transfer runs in a child process: the library's cannot be stopped from within the process (its
workers go on after Ctrl-C, and Xet transfers ignore their callbacks), and a gateway must be able to
stop and to give up a model at once. The child is gateway.models.catalog.fetch; it reads the listing
and the index too, which may be anything. An interrupted download goes on with the files that are
not whole yet. What is here is asked of nobody.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from gateway.domain.units import Progress, words
from gateway.errors import BadModel
from gateway.models.catalog.hub import REPOSITORY, Hub
from gateway.models.catalog.hub_cache import COMMIT
from gateway.worker_process import end, started

# Not imported: what reads models stays out of the gateway.
_PROGRAM = "gateway.models.catalog.fetch"
# Lines of progress, which come every second.
_RATE_OF = 10


class Job(NamedTuple):
    """What to fetch. It comes on stdin, so that the token shows in no process list. commit: "" is
    the default branch, and a name of a branch does too."""

    endpoint: str | None
    token: str | None
    notes: str
    models: str
    repo: str
    commit: str
    remote_code: bool


class Said(NamedTuple):
    """A line of the answer: bytes that are there, of how many; or bytes that were looked at
    (`checking`). `failure`, `hint`: what went wrong, in the
    last line alone (`ended`), as is the commit."""

    done: int
    total: int
    ended: bool = False
    failure: str | None = None
    hint: str = ""
    checking: bool = False
    commit: str = ""


async def download(
    hub: Hub,
    repo: str,
    commit: str,
    report: Callable[[str], None],
    *,
    allow_remote_code: bool = False,
) -> Path:
    """The folder with the model's files, fetched as far as they are not there. `report` gets
    progress in words.

    Code (*.py) comes along only when remote code is allowed. Raises BadModel saying what to do.
    """
    if not REPOSITORY.fullmatch(repo) or not COMMIT.fullmatch(commit) or hub.disk.folder is None:
        raise BadModel(
            f"{repo!r} at {commit!r} cannot be downloaded.",
            hint="Give org/name and a commit of 40 digits.",
        )
    if not await asyncio.to_thread(hub.disk.is_whole, repo, commit, remote_code=allow_remote_code):
        disk = hub.disk
        job = Job(
            hub.endpoint,
            hub.token,
            str(disk.notes),
            str(disk.folder),
            repo,
            commit,
            allow_remote_code,
        )
        rate = Rate()
        async with aclosing(_brought(job)) as lines:
            async for said in lines:
                report(_in_words(repo, said, rate))
    return hub.disk.snapshot(repo, commit)


async def bring(hub: Hub, repo: str, revision: str | None) -> AsyncGenerator[Said, None]:
    """Bring a repository into the cache as `download` does, of whatever commit `revision` is (None:
    the default branch); the last line names the commit.
    Raises BadModel saying what to do."""
    if not REPOSITORY.fullmatch(repo) or hub.disk.folder is None:
        raise BadModel(
            f"{repo[:200]!r} is not a Hugging Face repository.", hint="It is written org/name."
        )
    disk = hub.disk
    async with aclosing(
        _brought(
            Job(
                hub.endpoint,
                hub.token,
                str(disk.notes),
                str(disk.folder),
                repo,
                revision or "",
                False,
            )
        )
    ) as lines:
        async for said in lines:
            yield said


class Rate:
    """Bytes a second, of the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_RATE_OF)

    def of(self, done: int) -> float | None:
        """None: nothing has come yet."""
        self._seen.append((time.monotonic(), done))
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if last > first and ended > began else None


def _in_words(repo: str, said: Said, rate: Rate) -> str:
    if said.ended:
        return f"Downloaded {repo}: {words(said.total)}"
    share = 100 * said.done // max(said.total, 1)
    doing, speed = ("Checking", None) if said.checking else ("Downloading", rate.of(said.done))
    pace = f" at {words(round(speed))}/s" if speed is not None else ""
    told = f"{doing} {repo}: {words(said.done)} of {words(said.total)} ({share} %){pace}"
    return Progress(told, said.done, said.total, speed)


async def _brought(job: Job) -> AsyncGenerator[Said, None]:
    """What gateway.models.catalog.fetch says, in a process that ends when this is closed. Raises
    BadModel with what the child says went wrong."""
    # The library's warnings hold signed addresses.
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
    child = await started(_PROGRAM, {"HF_HOME": job.notes, **quiet})
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018
    try:
        child.stdin.write(json.dumps(job).encode() + b"\n")
        while (said := _said(await child.stdout.readline())) is not None and not said.ended:
            yield said
        code = await child.wait()
    finally:
        await end(child)
    if said is None:
        raise BadModel(
            f"The download of {job.repo} ended with code {code}.",
            hint=(
                "The gateway's log says more; -9 is mostly a lack of memory. Start it again: whole"
                " files are kept."
            ),
        )
    if said.failure is not None:
        raise BadModel(said.failure, hint=said.hint)
    yield said


def _said(line: bytes) -> Said | None:
    """None: the child ended without a last word."""
    try:
        return Said(*json.loads(line))
    except (ValueError, TypeError):
        return None
