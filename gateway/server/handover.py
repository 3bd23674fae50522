"""An upgrade without refused connections: a new gateway takes the sockets and the data folder of
    the one that runs.

new                                                    old
asks at DATA_DIR/run/handover.sock                     gives its listening sockets and the lock of the data folder, as open files
finds them as its settings want them: "go"             ends its loop, closes the database: "yours"; answers inference by its last routes
loads, adopts the engines, has their routes, listens:
"serving"                                              takes no more connections, finishes those it has, and ends

The lock is never let go of, and the new one has it for its loop only after "yours": two loops never
act at the same time. Listening sockets stay open all the while: a connection that neither has
accepted waits in the kernel. Where the new one ends before it serves, the old one ends too, as
where its loop has ended, and whoever supervises it starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.errors import SettingsError
from gateway.logging import Logger
from gateway.proxy.workers.sockets import listen_at, short
from gateway.version import __version__

log = Logger("fitserve.handover")

_PROTOCOL = 1
_MOST_FILES = 128
_MOST_BYTES = 256 * 1024
# For the loop of the old one to end, and for the engines of the new one to be adopted.
_RELEASE_S = 60.0
_ADOPT_S = 30.0
_LOOK_S = 0.05


def path_of(data: Path) -> Path:
    return data / "run" / "handover.sock"


# --- the new gateway ---


@dataclass
class Taken:
    """What the old gateway gave. `ready`: the models that it answered for, once it has let go."""

    listeners: list[socket.socket]
    lock: int
    version: str
    ready: tuple[str, ...] = ()
    _end: socket.socket = field(repr=False, kw_only=True)

    def go(self) -> None:
        """Returns when the old one has let go of the data folder. Raises SettingsError."""
        try:
            self._end.settimeout(_RELEASE_S)
            self._end.sendall(b"go\n")
            self.ready = tuple(json.loads(_line(self._end))["ready"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"The gateway that runs did not let go of its data folder ({error}).",
                hint="Its log says why.",
            ) from None

    def serving(self) -> None:
        """The old one may go."""
        with contextlib.suppress(OSError):
            self._end.sendall(b"serving\n")
            self._end.close()

    async def adopted(self, routed: Callable[[], set[str]]) -> None:
        """Returns when requests for all models that the old one answered for have somewhere to go,
        or after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ADOPT_S):
                while not routed().issuperset(self.ready):  # noqa: ASYNC110 - routes tell nobody, and it is soon over
                    await asyncio.sleep(_LOOK_S)
        if missing := sorted({*self.ready} - routed()):
            log.warning(
                "models that were ready are not yet, and the gateway takes requests all the same",
                models=missing,
            )


def ask(data: Path) -> Taken:
    """Raises SettingsError where no gateway runs, or none that can give."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(_RELEASE_S)
    try:
        end.connect(short(path_of(data)))
        said, files, _, _ = socket.recv_fds(end, _MOST_BYTES, _MOST_FILES)
        told = json.loads(said)
        if told["protocol"] != _PROTOCOL or len(files) < 2:
            raise ValueError(  # noqa: TRY301 - told like what cannot be read
                told.get("refused") or f"it is of version {told.get('version')}"
            )
    except (OSError, ValueError, KeyError) as error:
        end.close()
        raise SettingsError(
            f"No gateway on the data folder {data} hands over to this one"
            f" ({getattr(error, 'strerror', None) or error}).",
            hint="Without one that runs, start it without --take-over.",
        ) from None
    lock, *listening = files
    for number in files:
        os.set_inheritable(number, False)
    return Taken(
        [socket.socket(fileno=number) for number in listening], lock, str(told["version"]), _end=end
    )


def _line(end: socket.socket) -> bytes:
    """Raises OSError."""
    said = b""
    while not said.endswith(b"\n"):
        piece = end.recv(_MOST_BYTES)
        if not piece:
            raise ConnectionError("it has ended")
        said += piece
    return said


# --- the old gateway ---


@dataclass
class Handing:
    """What a gateway that runs can give, and how it lets go: `release` ends its loop and says which
    models it answers for; `leave` finishes what
    clients wait for and ends the process; `failed`: nobody has the loop now."""

    lock: int
    listeners: Sequence[socket.socket]
    release: Callable[[], Awaitable[list[str]]]
    leave: Callable[[], Awaitable[None]]
    failed: Callable[[str], object]


class Handover:
    """Waits for a gateway that wants to take over. Without a socket, on a disk that is full or
    read-only, there is no handover."""

    def __init__(self, data: Path, handing: Handing) -> None:
        self._path = path_of(data)
        self._handing = handing
        self._given = False
        self._asked: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            listener = listen_at(self._path, 1)
        except OSError as error:
            log.warning("no other gateway can take over from this one", reason=error.strerror)
            return
        listener.setblocking(False)
        self._listener = listener
        self._task = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        for task in (self._task, *self._asked):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self._listener is not None:
            self._listener.close()
            if not self._given:
                with contextlib.suppress(OSError):
                    self._path.unlink()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            end, _ = await loop.sock_accept(listener)
            task = loop.create_task(self._hand(end))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    async def _hand(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(end):
            _, user, _ = struct.unpack(
                "3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if user not in (0, os.getuid()) or self._given:
                end.send(
                    json.dumps(
                        {"protocol": _PROTOCOL, "refused": "it hands over to another one"}
                    ).encode()
                )
                return
            files = [
                self._handing.lock,
                *(listener.fileno() for listener in self._handing.listeners),
            ]
            said = {"protocol": _PROTOCOL, "version": __version__, "process": os.getpid()}
            try:
                socket.send_fds(end, [json.dumps(said).encode()], files)
                if await loop.sock_recv(end, 16) != b"go\n":
                    log.warning("another gateway asked to take over, and then did not")
                    return
            except OSError:
                return
            self._given = True
            log.info("another gateway takes over; this one answers what it has, and ends")
            try:
                ready = await self._handing.release()
                await loop.sock_sendall(end, json.dumps({"ready": ready}).encode() + b"\n")
                said_last = await loop.sock_recv(end, 16)
            except OSError:
                said_last = b""
            if said_last != b"serving\n":
                self._handing.failed("the gateway that was to take over has ended")
                return
            await self._handing.leave()
