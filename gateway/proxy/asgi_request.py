"""One request for FastAPI: uvicorn's ASGI cycle, which takes its turn on a client's connection as
an `Exchange` does.

uvicorn never holds the connection. What its cycle would do to the transport (write, pause, close)
comes here, and is done by the client's connection, which alone knows whose turn it is, what is
still to be read, and how much time there is.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from typing import TYPE_CHECKING

import httptools
from uvicorn._types import ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.errors import FitserveError
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.bodies.body_budget import SMALL_BYTES, no_room

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

log = logging.getLogger("uvicorn.error")


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class AsgiRequest(RequestResponseCycle):
    """A request, and the answer that FastAPI gives to it. `whole`: all of the request was received;
    `id`: the client's, of those that may be."""

    shape: Shape = "openai"
    # FastAPI finds out who calls; until then nothing is kept for anybody.
    account = ""

    def __init__(
        self,
        connection: ClientConnection,
        method: bytes,
        target: bytes,
        version: str,
        headers: list[tuple[bytes, bytes]],
        id_: str,
        *,
        expects: bool,
        keep: bool,
    ) -> None:
        """Raises HttpParserInvalidURLError."""
        url = httptools.parse_url(target)
        path = (url.path or b"").decode("ascii")
        config, root = connection.config, connection.config.root_path
        scope: HTTPScope = {
            "type": "http",
            "asgi": {"version": config.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": "http",
            "path": root + (urllib.parse.unquote(path) if "%" in path else path),
            "raw_path": root.encode("ascii") + (url.path or b""),
            "query_string": url.query or b"",
            "root_path": root,
            "headers": headers,
            "client": _address(connection.transport.get_extra_info("peername")),
            "server": _address(connection.transport.get_extra_info("sockname")),
            "state": connection.app_state.copy(),
        }
        super().__init__(
            scope,
            transport=self,  # type: ignore[arg-type]  # as much of one as a cycle asks
            flow=FlowControl(self),  # type: ignore[arg-type]
            logger=log,
            access_logger=log,
            access_log=False,
            default_headers=connection.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expects,
            keep_alive=keep,
            on_response=self._answered,
        )
        self.id = id_
        self.whole = False
        self.held = False  # its body is counted by the `BodyBudget`
        self._connection = connection
        self._budget = connection.plane.body_budget
        self._received = 0

    # --- the connection's side ---

    @property
    def keep(self) -> bool:
        return self.keep_alive

    @keep.setter
    def keep(self, keep: bool) -> None:
        self.keep_alive = keep

    @property
    def status(self) -> int:
        """Above 0: the answer has started."""
        return int(self.response_started)

    @property
    def moved(self) -> int:
        """Bytes of the body that came in."""
        return self._received

    def keep_body(self) -> None:
        """Counts the body, which uvicorn or FastAPI keeps."""
        if self._received > SMALL_BYTES and not self.response_complete:
            self.held = True
            self._budget.keep(self, self._received)

    def has_room(self) -> bool:
        """Raises Busy. Never waits: FastAPI has taken what came, and its bodies are small."""
        if self._received > SMALL_BYTES and not self.held and self._budget.crowded(self.account):
            raise no_room()
        self.keep_body()
        return True

    def release_body(self) -> None:
        """Nothing of the body is kept any more."""
        self.held = False
        self._budget.leave(self)

    def start(self) -> None:
        """Its turn has come."""
        connection = self._connection
        task = asyncio.get_running_loop().create_task(self.run_asgi(connection.config.loaded_app))
        task.add_done_callback(connection.server_state.tasks.discard)
        connection.server_state.tasks.add(task)

    def more(self, data: bytes) -> None:
        """A piece of the body."""
        self._received += len(data)
        if not self.response_complete:
            self.body += data
            if len(self.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.message_event.set()

    def complete(self) -> None:
        """That was all of the body."""
        self.whole = True
        self.more_body = False
        self.message_event.set()

    def leave(self) -> None:
        """The client is gone, or hears no more of this."""
        self.disconnected = True
        self.message_event.set()
        self.flow.resume_writing()
        self.release_body()

    def pause(self) -> None:
        """The client reads slowly."""
        self.flow.pause_writing()

    def resume(self) -> None:
        self.flow.resume_writing()

    def sweep(self, now: float) -> None:
        """Nothing here is timed: FastAPI may think as long as it likes."""

    def stop(self) -> None:
        """uvicorn ends the task."""

    def go_on(self) -> None:
        """Never called: it does not wait for room."""

    def give_up(self, error: FitserveError) -> None:
        """As `go_on`."""

    # --- the cycle's side ---

    async def send(self, message: ASGISendEvent) -> None:
        if not self.whole:
            # The rest of the body is not waited for: the head of the answer says so.
            self.keep_alive = False
        await super().send(message)

    def write(self, data: bytes) -> None:
        if not self.disconnected:
            self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self.disconnected or self._connection.transport.is_closing()

    def pause_reading(self) -> None:
        self._connection.pause_upload()

    def resume_reading(self) -> None:
        self._connection.resume_upload()

    def close(self) -> None:
        """After a complete answer, `_answered` follows."""
        if not self.response_complete and not self.disconnected:
            self._connection.broke_off(self)

    def _answered(self) -> None:
        if not self.disconnected:
            self._connection.answered(self)
