"""Watch of the models file in the settings: its models are applied at start and after each change.

Models that were added in other ways stay; models removed from the file are removed. A file with a
mistake changes nothing. A step that is not possible yet, such as a change of a model that is being
changed, is retried.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from gateway.errors import FitserveError
from gateway.file_reading import FileReader
from gateway.logging import Logger
from gateway.store import atomic_file
from gateway.supervision import SupervisedTask
from gateway.wishes.models_file import ModelsFile, load
from gateway.wishes.steps import Step, steps

log = Logger("fitserve.models_file")

# A check is one system call; the file is read only after a change.
_CHECK_S = 1.0
_RETRY_S = 10.0
_INCOMPLETE_PROBLEM = "some steps could not be done yet"
_OK = 400


class FileStamp(NamedTuple):
    """Identity of a version of the file."""

    inode: int
    size: int
    changed_ns: int


class ModelsFileWatch:
    """Follows the file from its construction on. `api` is the admin API without authentication."""

    def __init__(self, path: Path, data: Path, api: ASGIApp) -> None:
        self._path = path
        self._names_file = data / "models-file.json"
        self._api = api
        self._applied: FileStamp | None = None
        self._stamps = FileReader(partial(_stamp, path))
        self._contents = FileReader(partial(load, path))
        self._stable: FileStamp | None = None
        self._was_read = False
        self._problem = ""
        self._work = SupervisedTask(self._check, "the watch of the models file", file=str(path))

    async def close(self) -> None:
        await self._work.close()

    async def _check(self) -> float:
        """Apply the file after a change. The seconds until the next check."""
        try:
            current_stamp = await self._stamps.result()
        except OSError as error:
            self._report(f"The file of models {self._path} cannot be read: {error.strerror}.")
            return _RETRY_S
        if current_stamp == self._applied and self._problem != _INCOMPLETE_PROBLEM:
            return _CHECK_S
        if current_stamp != self._stable and self._was_read:
            # The author may still be writing the file.
            self._stable = current_stamp
            return _CHECK_S
        self._stable = current_stamp
        self._was_read = True
        problem = ""
        try:
            if not await self._apply(await self._contents.result()):
                problem = _INCOMPLETE_PROBLEM
        except (FitserveError, OSError) as error:
            problem = str(error)
        self._applied = current_stamp
        self._report(problem)
        return _RETRY_S if problem == _INCOMPLETE_PROBLEM else _CHECK_S

    def _report(self, problem: str) -> None:
        if problem not in ("", _INCOMPLETE_PROBLEM, self._problem):
            log.error("the models file was not applied", file=str(self._path), problem=problem)
        self._problem = problem

    async def _apply(self, content: ModelsFile) -> bool:
        """Take all steps. Returns whether they are done. Raises BadRequest if none is possible."""
        _, listing = await self._query("GET", "/admin/models")
        pending = steps(listing["data"], content.wishes, await asyncio.to_thread(self._read))
        results = [await self._apply_step(step, content) for step in pending]
        if all(results):
            await asyncio.to_thread(
                atomic_file.write, self._names_file, json.dumps(sorted(content.wishes)).encode()
            )
        else:
            # Removed models may be gone already, and new models may belong to the file already.
            names = sorted({*content.wishes, *self._read()})
            await asyncio.to_thread(atomic_file.write, self._names_file, json.dumps(names).encode())
        return all(results)

    async def _apply_step(self, step: Step, content: ModelsFile) -> bool:
        status, answer = await self._query(*step.request, step.body)
        if status < _OK:
            if step.kind != "change" or answer.get("wish"):
                log.info("applied from the models file", model=step.name, did=step.kind)
            return True
        message = content.references.hide_values(
            str(answer.get("error", {}).get("message", status))
        )
        log.warning(
            "a step of the models file could not be done yet",
            model=step.name,
            wanted=step.kind,
            problem=message,
        )
        return False

    def _read(self) -> list[str]:
        """The models of the file when it was last applied."""
        with suppress(OSError, ValueError):
            names = json.loads(self._names_file.read_bytes())
            return (
                [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
            )
        return []

    async def _query(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer of the admin API, in this process."""
        content = json.dumps(body).encode() if body is not None else b""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        status = 0
        answer = b""

        async def receive() -> Message:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, answer
            status = message.get("status", status)
            answer += message.get("body", b"")

        await self._api(scope, receive, send)
        return status, json.loads(answer or b"null")


def _stamp(path: Path) -> FileStamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - cheap, and called each second
    except OSError:
        return None
    return FileStamp(status.st_ino, status.st_size, status.st_mtime_ns)
