"""The server: one gateway for a data folder and a port, and how it runs until it is told to stop."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from functools import partial

import structlog
import uvicorn

from gateway import open_files
from gateway.errors import FitserveError, SettingsError
from gateway.serve.app import GatewayApp, create_app
from gateway.serve.proxy.client_connection import client_protocol
from gateway.serve.proxy.limits import hold_little, most_refused
from gateway.serve.proxy.upstream_connection import watch_peer
from gateway.serve.proxy.uvicorn_config import uvicorn_config
from gateway.settings import Settings
from gateway.store.data_folder import lock

log = structlog.get_logger("fitserve")

# Workers look at their signals ten times a second, and close their sockets at once then; where they get time to.
_ORPHANED_S = 30.0
# Files that are open without any client: 20 when nothing happens, and some more while engines are started and asked.
_OWN_FILES = 32
_LEAST_CONNECTIONS = 8
# After the grace time: for what else has to end.
_LAST_S = 30


def listen(settings: Settings) -> socket.socket:
    """The listening socket, bound before anything else is started. Raises SettingsError when the port is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    watch_peer(listener)
    hold_little(listener)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}.",
            hint="Stop what uses it, or set FITSERVE_PORT.",
        ) from None
    return listener


def allow_connections(settings: Settings) -> Settings:
    """Raises the limit on open files, where the system lets us: a client and its engine are two each. Where it does not, fewer clients are let
    in, so that there is always a file left for an engine, the database and a log. Raises SettingsError when too few are left to serve anybody."""
    wanted = 2 * settings.max_connections + 512
    allowed = open_files.allow(wanted)
    # Two files for each connection, and one for each of those that are being refused.
    connections = settings.max_connections
    while connections > 0 and 2 * connections + most_refused(connections) > allowed - _OWN_FILES:
        connections -= 1
    if connections < min(_LEAST_CONNECTIONS, settings.max_connections):
        least = _OWN_FILES + 2 * _LEAST_CONNECTIONS + most_refused(_LEAST_CONNECTIONS)
        raise SettingsError(
            f"This process may open {allowed} files, and needs {least} at least.",
            hint=f"Raise the limit (`ulimit -n {wanted}`, or LimitNOFILE={wanted} in a systemd unit).",
        )
    if connections < settings.max_connections:
        log.warning(
            "the limit on open files allows fewer connections than FITSERVE_MAX_CONNECTIONS",
            files=allowed,
            connections=connections,
            hint=f"ulimit -n {wanted}, or LimitNOFILE={wanted} in a systemd unit",
        )
    return settings.model_copy(update={"max_connections": connections})


def server_config(settings: Settings, app: GatewayApp) -> uvicorn.Config:
    """How uvicorn serves `app`: every connection is a `ClientConnection`, which answers inference itself."""
    return uvicorn_config(app, client_protocol(app.plane), lifespan="on", grace_s=settings.stop_grace_s)


def _listen(settings: Settings) -> socket.socket:
    """As `listen`, once the workers of a gateway that died have let go of the port."""
    from gateway.serve.workers.orphaned_workers import end_orphaned_workers

    until = time.monotonic() + _ORPHANED_S
    while True:
        found = end_orphaned_workers(settings.data)
        try:
            return listen(settings)
        except SettingsError:
            if not found or time.monotonic() > until:
                raise
        time.sleep(0.05)


def _server(settings: Settings, listener: socket.socket) -> tuple[GatewayApp, uvicorn.Server, socket.socket]:
    """The application, its server, and where that listens."""
    if settings.workers == 1:
        app = create_app(settings)
        return app, uvicorn.Server(server_config(settings, app)), listener
    from gateway.serve.workers import sockets
    from gateway.serve.workers.control_server import ControlServer
    from gateway.shared_memory import SharedMemory

    listeners = sockets.share(listener, settings.workers)
    control, path = sockets.listen_control(settings.data)
    app = create_app(settings, shared=(SharedMemory(), listeners, path))
    assert app.workers is not None  # noqa: S101 - it was told what they share
    return app, ControlServer(settings, app, app.workers), control


def _end(server: uvicorn.Server, settings: Settings) -> None:
    """As SIGTERM does; and where that hangs, because what ended the loop also holds up the end, the kernel ends this process."""
    server.should_exit = True
    signal.alarm(math.ceil(settings.stop_grace_s) + _LAST_S)


def serve(settings: Settings) -> None:
    """Run the gateway until SIGTERM or SIGINT; engines go on running. Raises SettingsError, and FitserveError when the loop ends."""
    # uvicorn finishes its work first, then raises the signal again: stopping a service is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = allow_connections(settings)
    held = lock(settings.data)
    try:
        listener = _listen(settings)
        address, port = listener.getsockname()[:2]
        log.info("listening", url=f"http://{address}:{port}", data=str(settings.data), keys=settings.admin_key is not None)
        app, server, listener = _server(settings, listener)
        app.stop = partial(_end, server, settings)
        server.run(sockets=[listener])
        if not server.started:
            raise SettingsError("The gateway could not start; the lines above say why.")
        if app.failure is not None:
            raise FitserveError(
                f"The control loop has ended ({app.failure}).", hint="The log says why. Engines go on; start the gateway again."
            )
    finally:
        os.close(held)
