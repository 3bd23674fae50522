"""TLS for clients: certificate and key from files, read again when they change. Connections that
are open keep what they began with.
And the handshake of a connection, which has a place among its client's connections and a time."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gateway.errors import SettingsError
from gateway.logging import Logger
from gateway.supervision import Supervised

log = Logger("fitserve.tls")

_LOOK_S = 5.0
HANDSHAKE_S = 10.0
# For the last words of TLS, which a client need not say.
_FAREWELL_S = 5.0


class Certificate:
    """`context`: for the server. `watch` belongs into an event loop."""

    def __init__(self, certificate: Path, key: Path | None, look_s: float = _LOOK_S) -> None:
        """certificate: with the chain behind it; key: None where the same file has it. Raises
        SettingsError."""
        self._files = (certificate, key or certificate)
        self._look_s = look_s
        self._known = self._state()
        self._watching: Supervised | None = None
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"The certificate {certificate} with the key {self._files[1]} cannot be used:"
                f" {_reason(error)}.",
                hint=(
                    "FITSERVE_TLS_CERT is a PEM file with the chain, FITSERVE_TLS_KEY its key"
                    " without a passphrase."
                ),
            ) from None

    def watch(self) -> None:
        self._watching = Supervised(self._look, "watching the certificate")

    async def close(self) -> None:
        if self._watching is not None:
            await self._watching.close()

    async def _look(self) -> float:
        state = self._state()
        if state != self._known:
            try:
                # Apart at first: a key that does not fit would be half of the context in force.
                self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
                self._load(self.context)
            except (OSError, ssl.SSLError) as error:
                log.error(  # noqa: TRY400
                    "the new certificate cannot be used, the one before stays in force",
                    reason=_reason(error),
                )
            else:
                log.info("the certificate was read again", file=str(self._files[0]))
            self._known = state
        return self._look_s

    def _load(self, context: ssl.SSLContext) -> None:
        # A passphrase would be asked for on the terminal.
        context.load_cert_chain(*self._files, password=lambda: "")

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for file in self._files:
            try:
                seen = file.stat()
                found.append((seen.st_mtime_ns, seen.st_ino, seen.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)


class Places(Protocol):
    """`gateway.proxy.limits.ConnectionLimiter`."""

    def admit(self, address: str) -> Any: ...

    def release(self, address: str, place: Any) -> None: ...


class Handshake(asyncio.Protocol):
    """One connection until its handshake is over; then it is what `behind` makes, which takes over
    its place. The event loop's own TLS
    tells nobody of connections whose handshake goes on, and gives each of them a minute."""

    behind: ClassVar[Callable[..., Any]]
    """Makes a protocol with a `place`."""
    context: ClassVar[ssl.SSLContext]
    limiter: ClassVar[Places]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """With what `behind` is made with."""
        self._make = partial(type(self).behind, *args, **kwargs)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address = peer_address(transport)
        place = self.limiter.admit(address)
        if place != "out":
            # Nothing was read yet. In another file the connection begins anew, as one with TLS.
            connection = transport.get_extra_info("socket").dup()
            self._task = asyncio.get_running_loop().create_task(
                self._shake(connection, address, place)
            )
        transport.abort()

    async def _shake(self, connection: socket.socket, address: str, place: object) -> None:
        made = self._make()
        made.place = place
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: made,
                connection,
                ssl=self.context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=_FAREWELL_S,
            )
        except OSError:
            # No TLS, none that we speak, or too slow.
            self.limiter.release(address, place)
            connection.close()


def peer_address(transport: asyncio.BaseTransport) -> str:
    """Without its port. Empty: no TCP."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _reason(error: OSError) -> str:
    """What SSL says has the place in its source in it."""
    return (
        (getattr(error, "reason", None) or error.strerror or str(error)).lower().replace("_", " ")
    )
