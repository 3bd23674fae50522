"""TLS for clients: certificate and key from files, and the handshake of a connection.

The files are read every few seconds; open connections keep their certificate. Workers get the pair
in use from the control process and read no file. A connection in its handshake counts among its
client's connections and has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gateway.errors import SettingsError
from gateway.file_reading import FileReader, read_file
from gateway.logging import Logger
from gateway.secret import Secret
from gateway.supervision import SupervisedTask

log = Logger("fitserve.tls")

_POLL_S = 5.0
_MAX_BYTES = 1024 * 1024
HANDSHAKE_S = 10.0
# The time for the closing message of TLS, which clients may omit.
_FAREWELL_S = 5.0


class CertificatePair(NamedTuple):
    """The contents of two PEM files: the certificate with its chain, and its key."""

    chain: bytes
    key: Secret

    def load_into(self, context: ssl.SSLContext) -> None:
        """Give certificate and key to a context. Raises OSError (ssl.SSLError) where they do not
        fit."""
        # OpenSSL reads a key only from a file. These are files in memory.
        with _memory_file(self.chain) as chain, _memory_file(self.key.reveal_bytes()) as key:
            # OpenSSL would ask for a missing password on the terminal.
            context.load_cert_chain(chain, key, password=lambda: "")


def server_context(pair: CertificatePair) -> ssl.SSLContext:
    """The settings of a server with that certificate. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    pair.load_into(context)
    return context


class Certificate:
    """The server's certificate. `pair`: the last one that could be used. `watch` needs an event
    loop."""

    def __init__(self, certificate: Path, key: Path | None, look_s: float = _POLL_S) -> None:
        """certificate: file with the chain.
        key: its file; None: the same.

        Raises SettingsError.
        """
        self._files = (certificate, key or certificate)
        self._look_s = look_s
        self._watching: SupervisedTask | None = None
        self._reader = FileReader(self._read_pair)
        self._problem = ""
        self._on_change: Callable[[CertificatePair], object] = lambda _: None
        try:
            self.pair = self._loaded_pair = self._read_pair()
            self.context = server_context(self.pair)
        except OSError as error:
            raise SettingsError(
                f"The certificate {certificate} with the key {self._files[1]} cannot be used:"
                f" {_plain_reason(error)}.",
                hint=(
                    "FITSERVE_TLS_CERT is a PEM file with the chain, FITSERVE_TLS_KEY its key"
                    " without a passphrase."
                ),
            ) from None

    def watch(self, on_change: Callable[[CertificatePair], object] = lambda _: None) -> None:
        """Follow the files. `on_change` gets each further pair that can be used."""
        self._on_change = on_change
        self._watching = SupervisedTask(self._reload_certificate, "watching the certificate")

    async def close(self) -> None:
        if self._watching is not None:
            await self._watching.close()

    async def _reload_certificate(self) -> float:
        try:
            pair = await self._reader.result()
            if pair != self._loaded_pair:
                self._loaded_pair = pair
                # First into another context: a wrong key would half replace the one in use.
                server_context(pair)
                pair.load_into(self.context)
                self.pair = pair
                self._on_change(pair)
                log.info("the certificate was read again", file=str(self._files[0]))
                self._problem = ""
        except OSError as error:
            if (problem := _plain_reason(error)) != self._problem:
                log.error(  # noqa: TRY400
                    "the new certificate cannot be used; the gateway keeps the former one",
                    reason=problem,
                )
            self._problem = problem
        return self._look_s

    def _read_pair(self) -> CertificatePair:
        chain, key = (read_file(file, _MAX_BYTES) for file in self._files)
        return CertificatePair(chain, Secret(key))


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """The path of a file of this process that is on no disk."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class AdmissionLimiter(Protocol):
    """The limit on connections.

    `gateway.proxy.limits.ConnectionLimiter`.
    """

    def admit(self, address: str) -> Any: ...

    def release(self, address: str, admission: Any) -> None: ...


class Handshake(asyncio.Protocol):
    """A connection until its handshake is over. Then a new protocol takes over its place.

    The event loop's own TLS does not report connections during their handshake, and gives each of
    them a minute.
    """

    def __init__(
        self,
        protocol_factory: Callable[..., Any],
        context: ssl.SSLContext,
        limiter: AdmissionLimiter,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """`protocol_factory` makes a protocol with an `admission` from args and kwargs."""
        self._make = partial(protocol_factory, *args, **kwargs)
        self._context = context
        self._limiter = limiter

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address = peer_address(transport)
        admission = self._limiter.admit(address)
        if admission != "out":
            # Nothing was read yet. The connection starts again with TLS, as another descriptor.
            connection = transport.get_extra_info("socket").dup()
            self._task = asyncio.get_running_loop().create_task(
                self._shake_hands(connection, address, admission)
            )
        transport.abort()

    async def _shake_hands(
        self, connection: socket.socket, address: str, admission: object
    ) -> None:
        protocol = self._make()
        protocol.admission = admission
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=_FAREWELL_S,
            )
        except OSError:
            # The client speaks no TLS, speaks another version, or is too slow.
            self._limiter.release(address, admission)
            connection.close()


def peer_address(transport: asyncio.BaseTransport) -> str:
    """The address of the client without its port; empty without TCP."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _plain_reason(error: OSError) -> str:
    """The reason of an error without OpenSSL's place in its source."""
    return (
        (getattr(error, "reason", None) or error.strerror or str(error)).lower().replace("_", " ")
    )
