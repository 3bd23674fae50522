"""The server: one gateway for a data folder and a port, and how it runs until it is told to
stop."""

from __future__ import annotations

import ipaddress
import math
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import uvicorn

from gateway import open_files
from gateway.errors import FitserveError, SettingsError
from gateway.logging import Logger
from gateway.proxy.client_connection import client_protocol
from gateway.proxy.limits import hold_little, most_refused
from gateway.proxy.upstream_connection import watch_peer
from gateway.proxy.uvicorn_config import uvicorn_config
from gateway.server import handover, systemd
from gateway.server.app import create_app
from gateway.server.gateway_app import GatewayApp
from gateway.server.handover import Taken
from gateway.settings import Settings
from gateway.store.data_folder import lock, own_lock

log = Logger("fitserve")

# Workers look at their signals ten times a second, and close their sockets at once then; where they
# get time to.
_ORPHANED_S = 30.0
# Files that are open without any client: 20 when nothing happens, and some more while engines are
# started and asked.
_OWN_FILES = 32
_LEAST_CONNECTIONS = 8
# After the grace time: for what else has to end.
_LAST_S = 30


def listen(settings: Settings) -> socket.socket:
    """The listening socket, bound before anything else is started. Raises SettingsError when the
    port is taken."""
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
    """Raises the limit on open files, where the system lets us: a client and its engine are two
    each. Where it does not, fewer clients are let
    in, so that there is always a file left for an engine, the database and a log. Raises
    SettingsError when too few are left to serve anybody.
    """
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
            hint=(
                f"Raise the limit (`ulimit -n {wanted}`, or LimitNOFILE={wanted} in a systemd"
                " unit)."
            ),
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
    """How uvicorn serves `app`: every connection is a `ClientConnection`, which answers inference
    itself."""
    tls = app.certificate.context if app.certificate is not None else None
    return uvicorn_config(
        app, client_protocol(app.plane, tls), lifespan="on", grace_s=settings.stop_grace_s
    )


class GatewayServer(uvicorn.Server):
    """The server of a gateway of one process. Streams that would never end do so when it stops."""

    def __init__(self, config: uvicorn.Config, app: GatewayApp) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stopping()
        await super().shutdown(sockets)


def _opened(settings: Settings) -> list[socket.socket]:
    """The sockets that a service manager has opened for us. Raises SettingsError where anyone could
    reach them, and there is no key."""
    found = systemd.opened()
    for listener in found:
        watch_peer(listener)
        hold_little(listener)
        host = (
            listener.getsockname()[0]
            if listener.family in (socket.AF_INET, socket.AF_INET6)
            else "a path"
        )
        try:
            own = ipaddress.ip_address(host).is_loopback
        except ValueError:
            raise SettingsError(
                f"A socket that was opened for us is no TCP socket ({host}).",
                hint="Give `ListenStream=` a port.",
            ) from None
        if not own and settings.admin_key is None:
            raise SettingsError(
                f"Refusing to serve the socket at {host} without a key: anyone who reaches that"
                " address could start programs here.",
                hint="Set FITSERVE_ADMIN_KEY, or have the socket on 127.0.0.1.",
            )
    return found


def _listen(settings: Settings) -> socket.socket:
    """As `listen`, once the workers of a gateway that died have let go of the port."""
    from gateway.proxy.workers.orphaned_workers import end_orphaned_workers

    until = time.monotonic() + _ORPHANED_S
    while True:
        found = end_orphaned_workers(settings.data)
        try:
            return listen(settings)
        except SettingsError:
            if not found or time.monotonic() > until:
                raise
        time.sleep(0.05)


def _server(
    settings: Settings, listeners: list[socket.socket], *, ours: bool
) -> tuple[GatewayApp, uvicorn.Server, list[socket.socket]]:
    """The application, its server, and where that listens. ours: this process has bound the
    listener."""
    if settings.workers == 1:
        app = create_app(settings)
        server = GatewayServer(server_config(settings, app), app)
        app.giving_sockets = listeners
        app.leave = partial(app.plane.leave, server, settings.drain_s)
        return app, server, listeners
    from gateway.proxy.shared_memory import SharedMemory
    from gateway.proxy.workers import sockets
    from gateway.proxy.workers.control_server import ControlServer

    given = (
        [[one] for one in sockets.share(listeners[0], settings.workers)]
        if ours
        else sockets.spread(listeners, settings.workers)
    )
    control, path = sockets.listen_control(settings.data)
    app = create_app(settings, shared=(SharedMemory(), given, path))
    workers = app.workers
    assert workers is not None  # noqa: S101 - it was told what they share
    worked = ControlServer(settings, app, workers, app.stopping)

    async def leave() -> None:
        await workers.leave(settings.drain_s)
        worked.should_exit = True

    app.leave = leave
    app.giving_sockets = workers.listeners
    return app, worked, [control]


def _end(server: uvicorn.Server, settings: Settings) -> None:
    """As SIGTERM does; and where that hangs, because what ended the loop also holds up the end, the
    kernel ends this process."""
    server.should_exit = True
    signal.alarm(math.ceil(settings.stop_grace_s) + _LAST_S)


def _take_over(settings: Settings) -> Taken:
    """What the gateway that runs gives, which goes on until it is told. Raises SettingsError."""
    taken = handover.ask(settings.data)
    host, port = taken.listeners[0].getsockname()[:2]
    if settings.port not in (0, port) or (
        settings.host != host and not {settings.host, host} <= {"localhost", "127.0.0.1"}
    ):
        raise SettingsError(
            f"The gateway that runs listens on {host} port {port}, and this one is to listen on"
            f" {settings.host} port {settings.port}.",
            hint="Another address needs a restart: stop that one first.",
        )
    return taken


def _replace_ourselves(*_: object) -> None:
    """Another process of the program as it is on the disk now takes over from this one."""
    if os.getpid() == 1:
        log.warning("a container ends with its first process, so no other one can take over in it")
        return
    log.info("another process of this program is started to take over")
    subprocess.Popen([sys.executable, "-m", "gateway.__main__", "serve", "--take-over"])


def serve(settings: Settings, *, take_over: bool = False) -> None:
    """Run the gateway until SIGTERM or SIGINT; engines go on running. take_over: from the one that
    runs on the data folder. Raises SettingsError,
    and FitserveError when the loop ends."""
    # uvicorn finishes its work first, then raises the signal again: stopping a service is no
    # failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = allow_connections(settings)
    taken = _take_over(settings) if take_over else None
    held = taken.lock if taken is not None else lock(settings.data)
    try:
        listeners = taken.listeners if taken is not None else _opened(settings)
        ours = not listeners
        listeners = listeners or [_listen(settings)]
        address, port = listeners[0].getsockname()[:2]
        log.info(
            "listening",
            url=f"{'https' if settings.tls_cert else 'http'}://{address}:{port}",
            data=str(settings.data),
            keys=settings.admin_key is not None,
        )
        if taken is not None:
            taken.go()
            own_lock(held)
        app, server, where = _server(settings, listeners, ours=ours)
        app.stop = partial(_end, server, settings)
        app.started = lambda: server.started
        app.lock, app.taken = held, taken
        signal.signal(signal.SIGUSR2, _replace_ourselves)
        server.run(sockets=where)
        if not server.started:
            raise SettingsError("The gateway could not start; the lines above say why.")
        if app.failure is not None:
            raise FitserveError(
                f"The control loop has ended ({app.failure}).",
                hint="The log says why. Engines go on; start the gateway again.",
            )
    finally:
        os.close(held)
