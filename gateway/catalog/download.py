"""Download a Hugging Face repository at a commit into ROOT/org--name/COMMIT/, ready to be mounted into an engine.

The transfer runs in a child process: the library's cannot be stopped from within the process (its workers go on after
Ctrl-C, and Xet transfers ignore their callbacks), and a gateway must be able to stop and to give up a model at once.
The child is gateway.catalog.fetch; it reads the listing and the index too, which may be anything. An interrupted download goes
on with the files that are not whole yet.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gateway.catalog.hub import COMMIT, REPOSITORY, Hub
from gateway.domain.units import GIB, MIB
from gateway.errors import BadModel

MARKER = ".complete"
# Not imported: what reads models stays out of the gateway.
_PROGRAM = "gateway.catalog.fetch"


class Job(NamedTuple):
    """What to fetch. It comes on stdin, so that the token shows in no process list."""

    endpoint: str | None
    token: str | None
    cache: str
    repo: str
    commit: str
    folder: str
    remote_code: bool


class Said(NamedTuple):
    """A line of the answer: bytes that are there, of how many. `failure`, `hint`: what went wrong, in the last line alone (`ended`)."""

    done: int
    total: int
    ended: bool = False
    failure: str | None = None
    hint: str = ""


def words(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


async def download(
    hub: Hub, repo: str, commit: str, target_root: Path, report: Callable[[str], None], *, allow_remote_code: bool = False
) -> Path:
    """The folder with the model's files, fetched as far as they are not there. `report` gets progress in words.

    Code (*.py) comes along only when remote code is allowed. Raises BadModel saying what to do.
    """
    folder = _folder(target_root, repo, commit)
    if await asyncio.to_thread(_is_complete, folder, remote_code=allow_remote_code):
        return folder
    job = Job(hub.endpoint, hub.token, str(hub.cache), repo, commit, str(folder), allow_remote_code)
    report(f"Downloaded {repo}: {words(await _run_child(job, report))}")
    return folder


def _folder(root: Path, repo: str, commit: str) -> Path:
    if not REPOSITORY.fullmatch(repo) or not COMMIT.fullmatch(commit):
        raise BadModel(f"{repo!r} at {commit!r} cannot be downloaded.", hint="Give org/name and a commit of 40 digits.")
    return root.absolute() / repo.replace("/", "--") / commit


def _is_complete(folder: Path, *, remote_code: bool) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        return isinstance(marker, dict) and (marker["remote_code"] is True or not remote_code)
    except (OSError, ValueError, KeyError):
        return False


async def _run_child(job: Job, report: Callable[[str], None]) -> int:
    """Run gateway.catalog.fetch in a process that ends when this is cancelled. The bytes of the model. Raises what the child says went wrong."""
    environment = os.environ | {
        # So that the child finds this very package, installed or not.
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep),
        "HF_HOME": job.cache,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # The library's warnings hold signed addresses.
        "HF_HUB_VERBOSITY": "error",
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", _PROGRAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        # Away from the terminal's Ctrl-C: the gateway decides when it ends.
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018
    try:
        child.stdin.write(json.dumps(job).encode() + b"\n")
        while (said := _said(await child.stdout.readline())) is not None and not said.ended:
            share = 100 * said.done // max(said.total, 1)
            report(f"Downloading {job.repo}: {words(said.done)} of {words(said.total)} ({share} %)")
        code = await child.wait()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        await child.wait()
    if said is None:
        raise BadModel(
            f"The download of {job.repo} ended with code {code}.",
            hint="The gateway's log says more; -9 is mostly a lack of memory. Start it again: whole files are kept.",
        )
    if said.failure is not None:
        raise BadModel(said.failure, hint=said.hint)
    return said.total


def _said(line: bytes) -> Said | None:
    """None: the child ended without a last word."""
    try:
        return Said(*json.loads(line))
    except (ValueError, TypeError):
        return None
