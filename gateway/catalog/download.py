"""Download a Hugging Face repository at a commit into ROOT/org--name/COMMIT/, ready to be mounted into an engine.

The transfer runs in a child process: the library's cannot be stopped from within the process (its workers go on after
Ctrl-C, and Xet transfers ignore their callbacks), and a gateway must be able to stop and to give up a model at once.
The child is gateway.catalog.fetch. An interrupted download goes on with the files that are not whole yet.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gateway.catalog import fetch
from gateway.catalog.catalog import weight_files
from gateway.catalog.fetch import MARKER, Job, size_of
from gateway.catalog.files import Repository
from gateway.catalog.hub import COMMIT, REPOSITORY, Hub
from gateway.domain.units import GIB, MIB
from gateway.errors import BadModel

MARGIN_BYTES = GIB
REPORT_EVERY_S = 1.0

_SMALL = re.compile(r"[^/]+\.(json|txt|jinja|model|tiktoken)|tokenizer[^/]*")
# The parts of a sentence-transformers model: 1_Pooling/config.json, 2_Dense/model.safetensors.
_MODULE = re.compile(r"\d+_\w+/[\w.-]+\.(json|safetensors)", re.ASCII)
_CODE = re.compile(r"[^/]+\.py")
# Pickles run code when they are loaded, so nothing but safetensors is ever fetched as weights.
_NEVER = (".bin", ".pt", ".pth", ".pkl", ".gguf")


async def download(
    hub: Hub, repo: str, commit: str, target_root: Path, report: Callable[[str], None], *, allow_remote_code: bool = False
) -> Path:
    """The folder with the model's files, fetched as far as they are not there. `report` gets progress in words.

    Code (*.py) comes along only when remote code is allowed. Raises BadModel saying what to do.
    """
    folder = _folder(target_root, repo, commit)
    if await asyncio.to_thread(_is_complete, folder, remote_code=allow_remote_code):
        return folder
    files = await asyncio.to_thread(_wanted, hub, repo, commit, remote_code=allow_remote_code)
    await asyncio.to_thread(_make_room, folder, files)
    job = Job(hub.endpoint, hub.token, str(hub.cache), repo, commit, str(folder), files, allow_remote_code)
    total = sum(files.values())
    transfer = asyncio.ensure_future(_run_child(job))
    try:
        before = -1
        while not (await asyncio.wait({transfer}, timeout=REPORT_EVERY_S))[0]:
            done = min(await asyncio.to_thread(_bytes_there, folder, files), total)
            if done != before:
                report(f"Downloading {repo}: {_words(done)} of {_words(total)} ({100 * done // max(total, 1)} %)")
            before = done
        await transfer
    finally:
        transfer.cancel()
        with suppress(asyncio.CancelledError, BadModel):
            await transfer
    report(f"Downloaded {repo}: {_words(total)}")
    return folder


def _folder(root: Path, repo: str, commit: str) -> Path:
    if not REPOSITORY.fullmatch(repo) or not COMMIT.fullmatch(commit):
        raise BadModel(f"{repo!r} at {commit!r} cannot be downloaded.", hint="Give org/name and a commit of 40 digits.")
    return root.absolute() / repo.replace("/", "--") / commit


def _wanted(hub: Hub, repo: str, commit: str, *, remote_code: bool) -> dict[str, int]:
    """Path -> bytes of what an engine needs of the repository."""
    listing = hub.resolve(repo, commit)
    weights = weight_files(Repository(hub, listing))
    if not weights:
        raise BadModel(f"{repo} holds no weights.", hint="Take a repository that has safetensors files.")

    def needed(path: str) -> bool:
        if path in weights:
            return True
        if path.endswith(_NEVER):
            return False
        return bool(_SMALL.fullmatch(path) or _MODULE.fullmatch(path) or (remote_code and _CODE.fullmatch(path)))

    return {path: size for path, size in listing.files.items() if needed(path)}


def _is_complete(folder: Path, *, remote_code: bool) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        return isinstance(marker, dict) and (marker["remote_code"] is True or not remote_code)
    except (OSError, ValueError, KeyError):
        return False


def _make_room(folder: Path, files: dict[str, int]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadModel(
            f"{folder} cannot be made: {error.strerror}.", hint="Set FITSERVE_MODELS_DIR to a folder that can."
        ) from None
    needed = sum(size for path, size in files.items() if size_of(folder / path) != size) + MARGIN_BYTES
    if needed > free:
        raise BadModel(
            f"The download needs {_words(needed)} (1 GiB of it as a margin), and {_words(free)} are free at {folder}.",
            hint="Make room there, or set FITSERVE_MODELS_DIR to a larger disk.",
        )


def _bytes_there(folder: Path, files: dict[str, int]) -> int:
    unfinished = folder.glob(".cache/huggingface/download/**/*.incomplete")
    return sum(size_of(path) or 0 for path in (*(folder / name for name in files), *unfinished))


def _words(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


async def _run_child(job: Job) -> None:
    """Run gateway.catalog.fetch in a process that ends when this is cancelled. Raises what it says went wrong."""
    environment = os.environ | {
        # So that the child finds this very package, installed or not.
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep),
        "HF_HOME": job.cache,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # The library's warnings hold signed addresses.
        "HF_HUB_VERBOSITY": "error",
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", fetch.__name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        # Away from the terminal's Ctrl-C: the gateway decides when it ends.
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None  # noqa: S101, PT018
    try:
        child.stdin.write(json.dumps(job).encode() + b"\n")
        answer = await child.stdout.read()
        code = await child.wait()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        await child.wait()
    try:
        failure = json.loads(answer)
    except ValueError:
        failure = {
            "message": f"The download of {job.repo} ended with code {code}.",
            "hint": "The gateway's log says more; -9 is mostly a lack of memory. Start it again: whole files are kept.",
        }
    if failure is not None:
        raise BadModel(failure["message"], hint=failure["hint"])
