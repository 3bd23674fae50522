"""A request for inference on its way in and on to an engine.

    the body                        place of its bytes                  slowed down
    arrives                         here; `BodyBudget` counts it        the client, without room
    is complete and waits           here; `BodyBudget` counts it        -
    streams to an engine            on the engine's connection          the client, by the engine
    was sent                        at the engine                       -

`Exchange` chooses the engine and handles its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gateway.errors import FitserveError
from gateway.proxy.access.auth import Key
from gateway.proxy.api.endpoints import Endpoint, Shape
from gateway.proxy.bodies import request_body, thoughts
from gateway.proxy.bodies.body_budget import SMALL_BYTES
from gateway.proxy.bodies.multipart_form import FormReader
from gateway.proxy.bodies.request_body import Body
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.heads import FIRST_VIA_LINE, hops, request_head, via_line
from gateway.proxy.routing.table import Call, RoutedReplica
from gateway.proxy.upstream_connection import UpstreamConnection

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

State = Literal["reading", "queued", "connecting", "asked", "answering", "done"]


class IncomingRequest:
    """The request alone. `Exchange` adds its answer.

    headers: those of the client that the gateway uses; `forwarded_headers`: the lines that go to
    the engine. `key`: the caller's. `keep_alive`: the connection may serve another request.
    `accepts_chunked`: the client understands chunked encoding. `body`: received and not yet sent;
    `whole`: all of it was received. `call` is read when the request starts.
    """

    __slots__ = (
        *("_content_type", "_form", "_renames_thoughts", "_upstream", "accepts_chunked", "body"),
        *("call", "connection", "endpoint", "forwarded_headers", "headers", "id", "in_budget"),
        *("keep_alive", "key", "plane", "received", "state", "whole"),
    )

    def __init__(
        self,
        connection: ClientConnection,
        endpoint: Endpoint,
        headers: dict[bytes, bytes],
        key: Key,
        id_: str,
        keep_alive: bool,
        forwarded_headers: bytes,
    ) -> None:
        self.plane: DataPlane = connection.plane
        self.connection = connection
        self.endpoint = endpoint
        self.headers = headers
        self.key = key
        self.id = id_
        self.keep_alive = keep_alive
        self.accepts_chunked = True
        self.forwarded_headers = forwarded_headers
        self.body: Body = b""
        self.whole = False
        self.call: Call
        self.in_budget = False  # the `BodyBudget` counts the body
        self.state: State = "reading"
        self.received = 0  # bytes of the body when the request started
        self._content_type = b""
        self._form: FormReader | None = None  # reader of the form so far
        self._renames_thoughts = False
        self._upstream: UpstreamConnection | None = None  # the connection that the body goes to
        self._prepare_answer()

    def _prepare_answer(self) -> None:
        """Sets the state of an answer of which nothing has come."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """The client's address."""
        return self.connection.address

    @property
    def shape(self) -> Shape:
        """The API that defines the form of errors for the client."""
        return self.endpoint.shape

    @property
    def account(self) -> str:
        """The key's name, to which the memory of the body is charged."""
        return self.key.name

    @property
    def moved(self) -> int:
        """A number that grows with each byte of the body that arrives or that the engine takes."""
        return (
            len(self.body)
            if self._upstream is None
            else -self._upstream.transport.get_write_buffer_size()
        )

    # --- receiving ---

    def more(self, data: bytes) -> None:
        """Takes a piece of the body. Raises BadRequest; a form is read even where it streams to an
        engine."""
        if self.endpoint.body == "form":
            self._read_form(data)
        upstream = self._upstream
        if upstream is not None:
            upstream.transport.write(
                b"%x\r\n%b\r\n" % (len(data), data)
                if b"content-length" not in self.headers
                else data
            )
        elif not self.body:
            self.body = data
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += data

    def complete(self) -> None:
        """Marks the body as complete."""
        self.whole = True
        if self._upstream is not None and b"content-length" not in self.headers:
            self._upstream.transport.write(b"0\r\n\r\n")

    def may_start(self) -> bool:
        """Whether an engine can be asked now, before the body is complete."""
        form = self._form
        if form is None or self.state != "reading":
            return False
        return request_body.may_stream(form, len(self.body), self.plane.routes, self.key)

    def _read_form(self, data: bytes | bytearray) -> None:
        if self._form is None:
            self._form = FormReader(self.headers.get(b"content-type"))
        self._form.feed(data)

    # --- memory ---

    def has_room(self) -> bool:
        """Whether more of the body may come now. Otherwise `continue_body` is called later. Raises
        Busy."""
        if self.state != "reading" or len(self.body) <= SMALL_BYTES:
            return True
        self.in_budget = True
        return self.plane.body_budget.grow(self, len(self.body))

    def keep_body(self) -> None:
        """Counts the received body while earlier requests are answered, or until an engine can be
        asked."""
        self._count_body(len(self.body))

    def release_body(self) -> None:
        """Drops the body."""
        self.body = b""
        if self.in_budget:
            self.in_budget = False
            self.plane.body_budget.release(self)

    def continue_body(self) -> None:
        """Reads more of the body, for which there is room now."""
        self.connection.resume_upload()

    def reject(self, error: FitserveError) -> None:
        """Refuses the request, for whose body there is no room left."""
        raise NotImplementedError

    def _count_body(self, size: int, *, pressed: bool = False) -> None:
        if self.in_budget or size > SMALL_BYTES:
            self.in_budget = True
            self.plane.body_budget.keep(self, size, pressed=pressed)

    # --- sending to an engine ---

    def _engine_request(
        self, upstream: UpstreamConnection, replica: RoutedReplica | None
    ) -> tuple[bytes, Body]:
        """The head and the received body for the engine, with the replica's name for the model.
        Raises BadRequest."""
        description, body = self._content_type, self.body
        if replica is not None:
            description += replica.key_line
            if replica.remote:
                description += (
                    via_line(hops(self.headers)) if b"via" in self.headers else FIRST_VIA_LINE
                )
            name = (
                replica.name_of(self.call.requested_name)
                if replica.adapters
                else replica.served_name
            )
            if name != (self.call.requested_name or self.call.model):
                body = request_body.renamed(self.endpoint, self._form, body, name)
            self._renames_thoughts = (
                replica.thoughts != thoughts.NAME and self.endpoint.name == "chat"
            )
            if self._renames_thoughts:
                body = thoughts.for_engine(body)
            if (
                self.call.stores
                and not replica.remote
                and self.plane.routes.responses.is_full(replica.seed)
            ):
                self.call.stores = False
                body = request_body.unstored(body)
        if self.whole:
            if self.endpoint.method == "POST":
                description += b"content-length: %d\r\n" % len(body)
        elif (announced := self.headers.get(b"content-length")) is not None:
            description += b"content-length: %d\r\n" % (int(announced) + len(body) - len(self.body))
        else:
            description += b"transfer-encoding: chunked\r\n"
            body = b"%x\r\n%b\r\n" % (len(body), bytes(body))
        pool = upstream.pool
        return (
            request_head(
                self.endpoint,
                pool.prefix,
                pool.authority,
                self.id.encode(),
                description,
                self.forwarded_headers,
            ),
            body,
        )

    def pause_upload(self) -> None:
        """Pauses the client, because the engine takes the body slowly."""
        self.connection.pause_upload()

    def resume_upload(self) -> None:
        """Resumes the client, because the engine took all of the received body."""
        self._note_upload(0)

    def _note_upload(self, bytes_left: int) -> None:
        """Takes note that all but `bytes_left` bytes of the received body are sent. `resume_upload`
        follows when many are left."""
        if bytes_left > SMALL_BYTES:
            self._count_body(bytes_left, pressed=True)
            return
        self.release_body()
        self.connection.resume_upload()
