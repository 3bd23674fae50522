"""A request for FastAPI: uvicorn's ASGI cycle, which takes its turn on a client's connection.

uvicorn never holds the connection. uvicorn's calls to the transport (write, pause, close) come
here. The client's connection carries them out, because only it knows the turn, the unread bytes and
the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from typing import TYPE_CHECKING

import httptools
from uvicorn._types import ASGISendEvent, HTTPResponseBodyEvent, HTTPScope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.errors import FitserveError
from gateway.proxy.api.endpoints import Shape
from gateway.proxy.bodies.body_budget import SMALL_BYTES, full_budget_error

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

log = logging.getLogger("uvicorn.error")

# Bytes of an answer of the gateway itself that are written in one piece. The client receives them
# before the next.
PIECE_BYTES = 64 * 1024


def _address(name: object) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class AsgiRequest(RequestResponseCycle):
    """A request that FastAPI answers.

    is_whole: all of it was received.
    id: the client's own, if valid.
    """

    shape: Shape = "openai"
    # FastAPI identifies the caller; until then no memory is charged to a key.
    account = ""
    # An upload, which its reader takes as it comes: no more than some reads are in memory.
    is_file = False

    def __init__(
        self,
        connection: ClientConnection,
        method: bytes,
        target: bytes,
        version: str,
        headers: list[tuple[bytes, bytes]],
        id_: str,
        *,
        keep_alive: bool,
    ) -> None:
        """Parse the target of the request. Raises HttpParserInvalidURLError."""
        url = httptools.parse_url(target)
        path = (url.path or b"").decode("ascii")
        config = connection.config
        root = connection.config.root_path
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
            "extensions": {"fitserve": {"connection": connection}},
        }
        super().__init__(
            scope,
            transport=self,  # type: ignore[arg-type]  # has the methods that a cycle calls
            flow=FlowControl(self),  # type: ignore[arg-type]
            logger=log,
            access_logger=log,
            access_log=False,
            default_headers=connection.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=version != "1.0"
            and any(
                name == b"expect" and value.lower() == b"100-continue" for name, value in headers
            ),
            keep_alive=keep_alive,
            on_response=self._finish_turn,
        )
        self.id = id_
        self.is_whole = False
        self.is_in_budget = False  # the `BodyBudget` counts the body
        self._connection = connection
        self._budget = connection.plane.body_budget
        self._received_bytes = 0

    # --- called by the connection ---

    @property
    def upload(self) -> AsgiRequest:
        """The receiver of the body: the cycle itself."""
        return self

    @property
    def answer(self) -> AsgiRequest:
        """The state of the answer: the cycle's own."""
        return self

    @property
    def has_started(self) -> bool:
        """Whether the client has a part of the answer."""
        return self.response_started

    @property
    def moved_bytes(self) -> int:
        """Bytes of the body that arrived."""
        return self._received_bytes

    def buffer_body(self) -> None:
        """Count the body, which uvicorn or FastAPI keeps."""
        if self.is_file:
            return
        if self._received_bytes > SMALL_BYTES and not self.response_complete:
            self.is_in_budget = True
            self._budget.add(self, self._received_bytes)

    def takes_more_bytes(self) -> bool:
        """Always True, because FastAPI takes all pieces and its bodies are small. Raises Busy."""
        if (
            self._received_bytes > SMALL_BYTES
            and not self.is_in_budget
            and not self.is_file
            and self._budget.is_crowded(self.account)
        ):
            raise full_budget_error()
        self.buffer_body()
        return True

    def release_body(self) -> None:
        """End the count of the body."""
        self.is_in_budget = False
        self._budget.release(self)

    def start(self) -> None:
        """Run the application, because its turn has come."""
        connection = self._connection
        task = asyncio.get_running_loop().create_task(self.run_asgi(connection.config.loaded_app))
        task.add_done_callback(connection.server_state.tasks.discard)
        connection.server_state.tasks.add(task)

    def more(self, data: bytes) -> None:
        """Take a piece of the body."""
        self._received_bytes += len(data)
        if not self.response_complete:
            self.body += data
            if len(self.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.message_event.set()

    def complete(self) -> None:
        """Mark the body as complete."""
        self.is_whole = True
        self.more_body = False
        self.message_event.set()

    def abandon(self) -> None:
        """End the request of a client that closed or was refused."""
        self.disconnected = True
        self.message_event.set()
        self.flow.resume_writing()
        self.release_body()

    def pause(self) -> None:
        """Pause the answer while the client reads slowly."""
        self.flow.pause_writing()

    def resume(self) -> None:
        self.flow.resume_writing()

    def sweep(self, now: float) -> None:
        """Do nothing: FastAPI has no time limit."""

    def stop(self) -> None:
        """Do nothing: uvicorn ends the task."""

    def continue_body(self) -> None:
        """Do nothing: the body never waits for memory."""

    def reject(self, error: FitserveError) -> None:
        """Do nothing, like `continue_body`."""

    # --- called by the cycle ---

    async def send(self, message: ASGISendEvent) -> None:
        if not self.is_whole:
            # The head of the answer announces the close, because the rest of the body is not read.
            self.keep_alive = False
        if message["type"] != "http.response.body" or len(message["body"]) <= PIECE_BYTES:
            await super().send(message)
            return
        body = message["body"]
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            piece: HTTPResponseBodyEvent = {
                "type": "http.response.body",
                "body": body[start:end],
                "more_body": end < len(body) or message.get("more_body", False),
            }
            await super().send(piece)

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
        """End an incomplete answer. A complete answer ends by `_finish_turn`."""
        if not self.response_complete and not self.disconnected:
            self._connection.abort_answer(self)

    def _finish_turn(self) -> None:
        self.release_body()
        if not self.disconnected:
            self._connection.finish_turn(self)
