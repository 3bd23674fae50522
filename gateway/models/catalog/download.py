"""The download of a Hugging Face repository at a commit into the Hub's cache of this machine.

The transfer runs in a child process, gateway.models.catalog.fetch. The library's transfer cannot be
stopped within a process: its workers go on after Ctrl-C, and Xet transfers ignore their callbacks.
The gateway must be able to stop, and to give up a model, immediately. The child also reads the
listing and the index, which are foreign data. A new download resumes the files of an interrupted
one. Files that are in the cache are not requested from the Hub.
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

from gateway.domain.units import TransferProgress, format_bytes
from gateway.errors import BadModel
from gateway.models.catalog.hub import REPOSITORY, Hub, repository_hint
from gateway.models.catalog.hub_cache import COMMIT
from gateway.secret import Secret, secret_text
from gateway.worker_process import kill, spawn

# This module is not imported: code that reads models stays out of the gateway's process.
_PROGRAM = "gateway.models.catalog.fetch"
# Lines of progress that a rate covers; a line comes every second.
_RATE_SAMPLES = 10


class Job(NamedTuple):
    """A repository to fetch, sent on stdin so that no process list shows the token and the address.

    commit: a commit, or the name of a branch; "": the default branch.
    """

    endpoint: Secret | None
    token: Secret | None
    notes: str
    models: str
    repo: str
    commit: str
    remote_code: bool

    @classmethod
    def read(cls, line: bytes) -> Job:
        job = cls(*json.loads(line))
        return job._replace(
            endpoint=Secret(str(job.endpoint)) if job.endpoint is not None else None,
            token=Secret(str(job.token)) if job.token is not None else None,
        )


class DownloadProgress(NamedTuple):
    """One line of the child's answer.

    done, total: bytes that are downloaded, or whose digest is checked (`checking`).
    ended: the last line; only that line has `failure`, `hint` and `commit`.
    """

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
    """Download the files that are missing, and return the folder with the model's files.

    `report` gets progress as text. Code (*.py) is downloaded only when remote code is allowed.
    Raises BadModel.
    """
    if not REPOSITORY.fullmatch(repo) or not COMMIT.fullmatch(commit) or hub.disk.folder is None:
        raise BadModel(
            f"{repo!r} at {commit!r} cannot be downloaded.",
            hint="Give org/name and a commit of 40 digits.",
        )
    if not await asyncio.to_thread(hub.disk.is_whole, repo, commit, remote_code=allow_remote_code):
        job = _job(hub, repo, commit, allow_remote_code=allow_remote_code)
        rate = Rate()
        async with aclosing(_progress_lines(job)) as lines:
            async for progress in lines:
                report(_progress_text(repo, progress, rate))
    return hub.disk.snapshot(repo, commit)


async def pull_repository(
    hub: Hub, repo: str, revision: str | None
) -> AsyncGenerator[DownloadProgress, None]:
    """Download a repository into the cache at `revision` (None: the default branch).

    The last line names the commit. Raises BadModel.
    """
    if not REPOSITORY.fullmatch(repo) or hub.disk.folder is None:
        raise BadModel(
            f"{repo[:200]!r} is not a Hugging Face repository.", hint=repository_hint(repo)
        )
    job = _job(hub, repo, revision or "", allow_remote_code=False)
    async with aclosing(_progress_lines(job)) as lines:
        async for progress in lines:
            yield progress


def _job(hub: Hub, repo: str, commit: str, *, allow_remote_code: bool) -> Job:
    """The download of a repository into the Hub's folder. commit: "" is the default branch."""
    return Job(
        endpoint=hub.endpoint,
        token=hub.token,
        notes=str(hub.disk.notes),
        models=str(hub.disk.folder),
        repo=repo,
        commit=commit,
        remote_code=allow_remote_code,
    )


class Rate:
    """The download rate over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_RATE_SAMPLES)

    def add(self, bytes_done: int) -> float | None:
        """Bytes a second after `bytes_done` bytes; None: nothing was downloaded yet."""
        self._samples.append((time.monotonic(), bytes_done))
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_s - first_s) if last > first and last_s > first_s else None


def _progress_text(repo: str, progress: DownloadProgress, rate: Rate) -> str:
    if progress.ended:
        return f"Downloaded {repo}: {format_bytes(progress.total)}"
    share = 100 * progress.done // max(progress.total, 1)
    if progress.checking:
        verb = "Checking"
        speed = None
    else:
        verb = "Downloading"
        speed = rate.add(progress.done)
    pace = f" at {format_bytes(round(speed))}/s" if speed is not None else ""
    sizes = f"{format_bytes(progress.done)} of {format_bytes(progress.total)} ({share} %)"
    return TransferProgress(f"{verb} {repo}: {sizes}{pace}", progress.done, progress.total, speed)


async def _progress_lines(job: Job) -> AsyncGenerator[DownloadProgress, None]:
    """The lines of gateway.models.catalog.fetch, whose process ends when this generator is closed.

    Raises BadModel with the failure that the child reports.
    """
    # The library's warnings hold signed addresses.
    quiet_env = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error"}
    child = await spawn(_PROGRAM, {"HF_HOME": job.notes, **quiet_env})
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018
    try:
        child.stdin.write(json.dumps(job, default=secret_text).encode() + b"\n")
        progress = _parse_progress(await child.stdout.readline())
        while progress is not None and not progress.ended:
            yield progress
            progress = _parse_progress(await child.stdout.readline())
        code = await child.wait()
    finally:
        await kill(child)
    if progress is None:
        raise BadModel(
            f"The download of {job.repo} ended with exit code {code}.",
            hint=(
                "The gateway's log says more. Exit code -9 usually means out of memory. Start the"
                " download again; complete files are kept."
            ),
        )
    if progress.failure is not None:
        raise BadModel(progress.failure, hint=progress.hint)
    yield progress


def _parse_progress(line: bytes) -> DownloadProgress | None:
    """The line as a value; None: the child ended without a last line."""
    try:
        return DownloadProgress(*json.loads(line))
    except (ValueError, TypeError):
        return None
