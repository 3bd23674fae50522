"""The body of a request for inference, from its client to an engine.

the body                        place of its bytes                  slowed down
arrives                         here; `BodyBudget` counts it        the client, without room
is complete and waits           here; `BodyBudget` counts it        -
streams to an engine            on the engine's connection          the client, by the engine
was sent                        at the engine                       -
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import FitserveError
from gateway.proxy.bodies import request_body
from gateway.proxy.bodies.body_budget import SMALL_BYTES
from gateway.proxy.bodies.multipart_form import FormReader
from gateway.proxy.bodies.request_body import Body
from gateway.proxy.heads import RequestHead
from gateway.proxy.upstream_connection import UpstreamConnection

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection


class Upload:
    """A body on its way.

    body: received and not yet sent.
    is_whole: all of it was received.
    form: the reader of a form so far.
    is_in_budget: the `BodyBudget` counts the body.
    """

    __slots__ = (
        "_connection",
        "_request",
        "_upstream",
        "body",
        "form",
        "is_in_budget",
        "is_whole",
    )

    def __init__(
        self, connection: ClientConnection, request: RequestHead, body: Body, is_whole: bool
    ) -> None:
        self._connection = connection
        self._request = request
        self._upstream: UpstreamConnection | None = None  # the connection that the rest goes to
        self.body = body
        self.form: FormReader | None = None
        self.is_in_budget = False
        self.is_whole = is_whole

    # --- receiving ---

    def more(self, data: bytes) -> None:
        """Take a piece of the body. Raises BadRequest; a form is read even where it streams to an
        engine."""
        if self._request.endpoint.body == "form":
            self._read_form(data)
        upstream = self._upstream
        if upstream is not None:
            upstream.transport.write(
                b"%x\r\n%b\r\n" % (len(data), data)
                if b"content-length" not in self._request.headers
                else data
            )
        elif not self.body:
            self.body = data
        else:
            if isinstance(self.body, bytes):
                self.body = bytearray(self.body)
            self.body += data

    def complete(self) -> None:
        """Mark the body as complete."""
        self.is_whole = True
        if self._upstream is not None and b"content-length" not in self._request.headers:
            self._upstream.transport.write(b"0\r\n\r\n")

    def may_start(self) -> bool:
        """Whether an engine can be asked now, before the body is complete."""
        return self.form is not None and request_body.may_stream(
            self.form, len(self.body), self._connection.plane.routes, self._request.key
        )

    def read_form(self) -> FormReader | None:
        """The reader of a form body, which has read all of the received body."""
        if self.form is None:
            self._read_form(self.body)
        return self.form

    def _read_form(self, data: bytes | bytearray) -> None:
        if self.form is None:
            self.form = FormReader(self._request.headers.get(b"content-type"))
        self.form.feed(data)

    # --- memory ---

    @property
    def account(self) -> str:
        """The key's name, to which the memory of the body is charged."""
        return self._request.key.name

    @property
    def moved_bytes(self) -> int:
        """A number that grows with each byte of the body that arrives or that the engine takes."""
        return (
            len(self.body)
            if self._upstream is None
            else -self._upstream.transport.get_write_buffer_size()
        )

    def takes_more_bytes(self) -> bool:
        """Whether more of the body may come now. Otherwise `continue_body` is called later. Raises
        Busy."""
        if len(self.body) <= SMALL_BYTES:
            return True
        self.is_in_budget = True
        return self._connection.plane.body_budget.grow(self, len(self.body))

    def is_crowded(self) -> bool:
        """Whether the body is large and not counted yet, and the key has no memory left for it."""
        return (
            len(self.body) > SMALL_BYTES
            and not self.is_in_budget
            and self._connection.plane.body_budget.is_crowded(self.account)
        )

    def buffer_body(self) -> None:
        """Count the received body while earlier requests are answered, or until an engine can be
        asked."""
        self._count_body(len(self.body))

    def release_body(self) -> None:
        """Drop the body."""
        self.body = b""
        if self.is_in_budget:
            self.is_in_budget = False
            self._connection.plane.body_budget.release(self)

    def continue_body(self) -> None:
        """Read more of the body, for which there is room now."""
        self._connection.resume_upload()

    def reject(self, error: FitserveError) -> None:
        """Refuse the request, for whose body there is no room left."""
        upstream = self._upstream
        if upstream is None:
            self._connection.reject(self, error)
        elif upstream.exchange is not None:
            upstream.exchange.handle_failure(
                upstream, "it takes the request too slowly while other requests wait for memory"
            )

    def _count_body(self, size: int, *, is_pressed: bool = False) -> None:
        if self.is_in_budget or size > SMALL_BYTES:
            self.is_in_budget = True
            self._connection.plane.body_budget.add(self, size, is_pressed=is_pressed)

    # --- sending to an engine ---

    def stream_to(self, upstream: UpstreamConnection) -> None:
        """Send the rest of the body to this connection, which has the received body."""
        self._upstream = upstream
        self.record_unsent(upstream.transport.get_write_buffer_size())

    def restore(self, body: Body) -> None:
        """Put back the whole body, which another replica gets."""
        self.body = body
        self._upstream = None

    def record_unsent(self, bytes_left: int) -> None:
        """Take note that all but `bytes_left` bytes of the received body are sent. The engine's
        connection reports later when many are left."""
        if bytes_left > SMALL_BYTES:
            self._count_body(bytes_left, is_pressed=True)
            return
        self.release_body()
        self._connection.resume_upload()
