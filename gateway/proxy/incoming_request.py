"""A request for inference as it comes in, and as it goes to an engine: its head, and its body,
which is kept until it is complete or passed on
as it comes.

    the body                        where its bytes are                            who is slowed down
    comes in                        here; counted by `BodyBudget` where large      the client, while there is no room
    is whole, and waits             here; counted likewise                         nobody: nothing more comes
    goes to an engine as it comes   on the engine's connection                     the client, while the engine takes it slowly
    was taken                       at the engine                                  nobody

Which engine gets it, and what comes back: `Exchange`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gateway.errors import FitserveError
from gateway.proxy.access.auth import Key
from gateway.proxy.api.endpoints import Endpoint, Shape
from gateway.proxy.bodies import request_body
from gateway.proxy.bodies.body_budget import SMALL_BYTES
from gateway.proxy.bodies.multipart_form import FormReader
from gateway.proxy.bodies.request_body import Body
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.heads import hops, request_head, via_line
from gateway.proxy.routing.table import Call, RoutedReplica
from gateway.proxy.upstream_connection import UpstreamConnection

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

State = Literal["reading", "queued", "connecting", "asked", "answering", "done"]


@dataclass(slots=True, eq=False)
class IncomingRequest(ABC):
    """The request alone. `Exchange` has its answer too."""

    plane: DataPlane
    connection: ClientConnection
    endpoint: Endpoint
    found: dict[bytes, bytes]  # the client's headers that count
    key: Key  # who calls
    id: str
    keep: bool  # the client's connection may live on
    chunks: bool  # the client understands chunks
    lines: bytes  # of its head that go to the engine
    body: Body = b""  # what is here and not yet sent
    whole: bool = False  # all of it was received
    held: bool = False  # its body is counted by the `BodyBudget`
    state: State = "reading"
    received: int = 0  # bytes of the body, when the request was started
    call: Call = field(init=False)
    _content_type: bytes = b""
    _form: FormReader | None = None  # has read what came so far of a form
    _upstream: UpstreamConnection | None = None  # the connection that the body goes to

    @property
    def address(self) -> str:
        """Of the client."""
        return self.connection.address

    @property
    def shape(self) -> Shape:
        """Whose errors the client expects."""
        return self.endpoint.shape

    @property
    def account(self) -> str:
        """Whose memory the body takes."""
        return self.key.name

    @property
    def moved(self) -> int:
        """Grows with each byte of the body that comes in, and with each that the engine takes."""
        return (
            len(self.body)
            if self._upstream is None
            else -self._upstream.transport.get_write_buffer_size()
        )

    # --- as it comes in ---

    def more(self, data: bytes) -> None:
        """A piece of the body. Raises BadRequest: also what goes on to an engine at once is read
        first."""
        if self.endpoint.body == "form":
            self._read_form(data)
        upstream = self._upstream
        if upstream is not None:
            upstream.transport.write(
                b"%x\r\n%b\r\n" % (len(data), data) if b"content-length" not in self.found else data
            )
        elif not self.body:
            self.body = data
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += data

    def complete(self) -> None:
        """That was all of the body."""
        self.whole = True
        if self._upstream is not None and b"content-length" not in self.found:
            self._upstream.transport.write(b"0\r\n\r\n")

    def may_start(self) -> bool:
        """Whether it can go to an engine now, although more of the body is to come."""
        form = self._form
        if form is None or self.state != "reading":
            return False
        return request_body.may_stream(form, len(self.body), self.plane.routes, self.key)

    def _read_form(self, data: bytes | bytearray) -> None:
        if self._form is None:
            self._form = FormReader(self.found.get(b"content-type"))
        self._form.feed(data)

    # --- where it is kept ---

    def has_room(self) -> bool:
        """Whether more of the body may come now; else the client is read again when it may. Raises
        Busy."""
        if self.state != "reading" or len(self.body) <= SMALL_BYTES:
            return True
        self.held = True
        return self.plane.body_budget.grow(self, len(self.body))

    def keep_body(self) -> None:
        """What is here of the body stays here for a while: until the requests before it are
        answered, or an engine can be asked."""
        self._hold(len(self.body))

    def release_body(self) -> None:
        """Nothing of the body is kept here any more."""
        self.body = b""
        if self.held:
            self.held = False
            self.plane.body_budget.leave(self)

    def go_on(self) -> None:
        """There is room for more of the body."""
        self.connection.resume_upload()

    @abstractmethod
    def give_up(self, error: FitserveError) -> None:
        """There is no room for the body any more."""

    def _hold(self, size: int, *, pressed: bool = False) -> None:
        if self.held or size > SMALL_BYTES:
            self.held = True
            self.plane.body_budget.keep(self, size, pressed=pressed)

    # --- as it goes to an engine ---

    def _written(
        self, upstream: UpstreamConnection, replica: RoutedReplica | None
    ) -> tuple[bytes, Body]:
        """The head for the engine, and what is here of the body, with the model called as the
        replica calls it. Raises BadRequest."""
        described, body = self._content_type, self.body
        if replica is not None:
            described += replica.key_line
            if replica.elsewhere:
                described += via_line(hops(self.found))
            name = replica.name_of(self.call.asked) if replica.adapters else replica.served_name
            if name != (self.call.asked or self.call.model):
                body = request_body.renamed(self.endpoint, self._form, body, name)
        if self.whole:
            if self.endpoint.method == "POST":
                described += b"content-length: %d\r\n" % len(body)
        elif (announced := self.found.get(b"content-length")) is not None:
            described += b"content-length: %d\r\n" % (int(announced) + len(body) - len(self.body))
        else:
            described += b"transfer-encoding: chunked\r\n"
            body = b"%x\r\n%b\r\n" % (len(body), bytes(body))
        pool = upstream.pool
        return (
            request_head(
                self.endpoint, pool.prefix, pool.authority, self.id.encode(), described, self.lines
            ),
            body,
        )

    def pause_upload(self) -> None:
        """The engine takes the body slowly."""
        self.connection.pause_upload()

    def resume_upload(self) -> None:
        """The engine has taken all of the body that was here."""
        self._uploaded(0)

    def _uploaded(self, left: int) -> None:
        """What was here of the body is written to the engine, but for `left` bytes: `resume_upload`
        comes when many of them are."""
        if left > SMALL_BYTES:
            self._hold(left, pressed=True)
            return
        self.release_body()
        self.connection.resume_upload()
