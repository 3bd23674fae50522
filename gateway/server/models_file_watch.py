"""The file of models that the settings name: what it says when the gateway starts, and after each
change of it, the gateway's models are brought to.

Models that were added otherwise stay; those that the file had and has no more go. A file with a
mistake changes nothing, and what could not be done yet, as a change of a model that is being
changed already, is tried again.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from gateway.errors import FitserveError
from gateway.logging import Logger
from gateway.store import atomic_file
from gateway.supervision import Supervised
from gateway.wishes.models_file import ModelsFile, load
from gateway.wishes.steps import Step, steps

log = Logger("fitserve.models_file")

# A look is one call of the kernel; the file is read where it is another one.
_LOOK_S = 1.0
_AGAIN_S = 10.0
_AGAIN = "some of it could not be done yet"
_OK = 400


class Seen(NamedTuple):
    """By which a file is told from another one."""

    inode: int
    size: int
    changed_ns: int


class ModelsFileWatch:
    """Begins at once. `app` has the admin API, and asks for no key."""

    def __init__(self, path: Path, data: Path, app: ASGIApp) -> None:
        self._path = path
        self._kept = data / "models-file.json"
        self._app = app
        self._seen: Seen | None = None
        self._still = _seen(path)
        self._said = ""
        self._work = Supervised(self._look, "the file of models", file=str(path))

    async def close(self) -> None:
        await self._work.close()

    async def _look(self) -> float:
        """Follow the file where it is another one than the last time; the seconds until the next
        look."""
        now = _seen(self._path)
        if now == self._seen and self._said != _AGAIN:
            return _LOOK_S
        if now != self._still:
            # Who writes it may not have written all of it.
            self._still = now
            return _LOOK_S
        said = ""
        try:
            if not await self._brought(await asyncio.to_thread(load, self._path)):
                said = _AGAIN
        except FitserveError as error:
            said = str(error)
            if said != self._said:
                log.error("the file of models was not taken", file=str(self._path), problem=said)  # noqa: TRY400 - a mistake of its author, told whole
        self._seen, self._said = now, said
        return _AGAIN_S if said == _AGAIN else _LOOK_S

    async def _brought(self, found: ModelsFile) -> bool:
        """Whether all is done. Raises BadRequest where nothing can be."""
        _, listing = await self._ask("GET", "/admin/models")
        wanted = steps(listing["data"], found.wishes, await asyncio.to_thread(self._read))
        done = [await self._done(step, found) for step in wanted]
        if all(done):
            await asyncio.to_thread(
                atomic_file.write, self._kept, json.dumps(sorted(found.wishes)).encode()
            )
        else:
            # What went already is not there any more; what is new may be the file's from now on.
            both = sorted({*found.wishes, *self._read()})
            await asyncio.to_thread(atomic_file.write, self._kept, json.dumps(both).encode())
        return all(done)

    async def _done(self, step: Step, found: ModelsFile) -> bool:
        status, said = await self._ask(*step.request, step.body)
        if status < _OK:
            if step.kind != "change" or said.get("wish"):
                log.info("by the file of models", model=step.name, did=step.kind)
            return True
        message = found.references.hidden(str(said.get("error", {}).get("message", status)))
        log.warning(
            "the file of models could not be followed yet",
            model=step.name,
            wanted=step.kind,
            problem=message,
        )
        return False

    def _read(self) -> list[str]:
        """The models that the file had when it was last followed."""
        with suppress(OSError, ValueError):
            known = json.loads(self._kept.read_bytes())
            return (
                [name for name in known if isinstance(name, str)] if isinstance(known, list) else []
            )
        return []

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
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
        status, answer = 0, b""

        async def receive() -> Message:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, answer
            status = message.get("status", status)
            answer += message.get("body", b"")

        await self._app(scope, receive, send)
        return status, json.loads(answer or b"null")


def _seen(path: Path) -> Seen | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - a look costs microseconds, and comes each second
    except OSError:
        return None
    return Seen(found.st_ino, found.st_size, found.st_mtime_ns)
