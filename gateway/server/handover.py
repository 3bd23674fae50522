"""Upgrade without refused connections: a new gateway takes over sockets and data folder.

new gateway                                     old gateway
connects to DATA_DIR/run/handover.sock          sends its listening sockets and the lock of the data
                                                folder, as open files
checks them against its settings: "go"          ends its loop, closes the database: "yours"; answers
                                                inference by its last routes
loads, adopts the engines, has their routes,
listens: "serving"                              finishes its connections, and ends

The lock is never released, and the new gateway runs its loop only after "yours", so two loops never
act concurrently. The first "go" gets the folder; every other is answered with a refusal. A gateway
that finds another owner of the lock ends (`gateway.server.lock_watch`). Listening sockets stay
open, so a connection that neither gateway has accepted waits in the kernel. If the new gateway ends
before it serves, the old one ends with an error too, and its supervisor starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.errors import SettingsError
from gateway.hosts.peer import peer_user
from gateway.logging import Logger
from gateway.proxy.workers.sockets import listen_at, short_path
from gateway.version import __version__

log = Logger("fitserve.handover")

_PROTOCOL = 1
_MAX_FILES = 128
_MAX_BYTES = 256 * 1024
# Seconds for the end of the old control loop, and for the adoption of engines by the new gateway.
_RELEASE_S = 60.0
_ADOPT_S = 30.0
_LOOK_S = 0.05
_REFUSAL = b'{"protocol":%d,"refused":"it is handing over to another gateway"}\n' % _PROTOCOL


def path_of(data: Path) -> Path:
    return data / "run" / "handover.sock"


# --- the new gateway ---


@dataclass
class Takeover:
    """The offer of the old gateway. `ready`: the models that it served when it released the data
    folder."""

    listeners: list[socket.socket]
    lock: int
    version: str
    ready: tuple[str, ...] = ()
    _end: socket.socket = field(repr=False, kw_only=True)

    def wait_for_release(self) -> None:
        """Return once the old gateway has released the data folder. Raises SettingsError."""
        try:
            self._end.settimeout(_RELEASE_S)
            self._end.sendall(b"go\n")
            answer = json.loads(_line(self._end))
            if "refused" in answer:
                raise ValueError(answer["refused"])  # noqa: TRY301 - reported like a wrong answer
            self.ready = tuple(answer["ready"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._end.close()
            raise SettingsError(
                f"The running gateway did not release its data folder ({error}).",
                hint="The log of that gateway has the reason. Stop it, then start this one without"
                " --take-over.",
            ) from None

    def confirm(self) -> None:
        """Tell the old gateway to end."""
        with contextlib.suppress(OSError):
            self._end.sendall(b"serving\n")
            self._end.close()

    async def wait_for_routes(self, routed: Callable[[], set[str]]) -> None:
        """Return once all models that the old gateway served have routes, or after _ADOPT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ADOPT_S):
                while not routed().issuperset(self.ready):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        if missing_names := sorted({*self.ready} - routed()):
            log.warning(
                "models of the previous gateway are not ready yet; requests are accepted anyway",
                models=missing_names,
            )


def request_takeover(data: Path) -> Takeover:
    """The offer of the running gateway. Raises SettingsError if no gateway runs, or it cannot hand
    over."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(_RELEASE_S)
    try:
        end.connect(short_path(path_of(data)))
        answer, files, _, _ = socket.recv_fds(end, _MAX_BYTES, _MAX_FILES)
        offer = json.loads(answer)
        if offer["protocol"] != _PROTOCOL or len(files) < 2:
            raise ValueError(  # noqa: TRY301 - reported like an unreadable answer
                offer.get("refused") or f"it is of version {offer.get('version')}"
            )
    except (OSError, ValueError, KeyError) as error:
        end.close()
        raise SettingsError(
            f"No gateway with the data folder {data} hands over to this one"
            f" ({getattr(error, 'strerror', None) or error}).",
            hint="If no gateway is running, omit --take-over.",
        ) from None
    lock, *listening = files
    for number in files:
        os.set_inheritable(number, False)
    return Takeover(
        [socket.socket(fileno=number) for number in listening],
        lock,
        str(offer["version"]),
        _end=end,
    )


def _line(end: socket.socket) -> bytes:
    """A line from the socket. Raises OSError."""
    line = b""
    while not line.endswith(b"\n"):
        piece = end.recv(_MAX_BYTES)
        if not piece:
            raise ConnectionError("it closed the connection")
        line += piece
    return line


# --- the old gateway ---


@dataclass
class HandoverOffer:
    """Sockets, lock and callbacks of a running gateway. `release` ends its loop and returns the
    models that it serves; `drain` finishes requests and ends the process; `failed`: no process has
    the loop."""

    lock: int
    listeners: Sequence[socket.socket]
    release: Callable[[], Awaitable[list[str]]]
    drain: Callable[[], Awaitable[None]]
    failed: Callable[[str], object]


class Handover:
    """Waits for a gateway that wants to take over. Without a socket (disk full or read-only) there
    is not a handover."""

    def __init__(self, data: Path, offer: HandoverOffer) -> None:
        self._path = path_of(data)
        self._offer = offer
        self._was_handed_over = False
        self._requests: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        try:
            listener = listen_at(self._path, 1)
        except OSError as error:
            log.warning("other gateways cannot take over from this one", reason=error.strerror)
            return
        listener.setblocking(False)
        self._listener = listener
        self._task = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        for task in (self._task, *self._requests):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self._listener is not None:
            self._listener.close()
            if not self._was_handed_over:
                with contextlib.suppress(OSError):
                    self._path.unlink()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            end, _ = await loop.sock_accept(listener)
            task = loop.create_task(self._hand(end))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    def _has_successor(self) -> bool:
        return self._was_handed_over

    async def _hand(self, end: socket.socket) -> None:
        """Hand sockets and lock to a successor of the same user that asks for them."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(end):
            if peer_user(end) not in (0, os.getuid()) or self._has_successor():
                end.send(_REFUSAL)
                return
            files = [
                self._offer.lock,
                *(listener.fileno() for listener in self._offer.listeners),
            ]
            greeting = {"protocol": _PROTOCOL, "version": __version__, "process": os.getpid()}
            try:
                socket.send_fds(end, [json.dumps(greeting).encode()], files)
                if await loop.sock_recv(end, 16) != b"go\n":
                    log.warning("another gateway asked to take over, then gave up")
                    return
                if self._has_successor():
                    # Several may have asked before the first of them said "go".
                    await loop.sock_sendall(end, _REFUSAL)
                    log.warning("a second gateway asked to take over and was refused")
                    return
            except OSError:
                return
            self._was_handed_over = True
            log.info("another gateway takes over; this one finishes its requests and ends")
            try:
                ready = await self._offer.release()
                await loop.sock_sendall(end, json.dumps({"ready": ready}).encode() + b"\n")
                reply = await loop.sock_recv(end, 16)
            except OSError:
                reply = b""
            if reply != b"serving\n":
                self._offer.failed("the gateway taking over has ended")
                return
            await self._offer.drain()
