"""The server process: one gateway for a data folder and a port, from start to stop."""

from __future__ import annotations

import ipaddress
import math
import os
import signal
import socket
import subprocess
import sys
import time
from bisect import bisect_right
from functools import partial

import uvicorn

from gateway.errors import FitserveError, SettingsError, listen_error
from gateway.garbage import exempt_start_objects
from gateway.hosts.process import open_files
from gateway.logging import Logger
from gateway.proxy.client_connection import client_protocol, inner_protocol
from gateway.proxy.limits import limit_send_buffer, refusal_capacity
from gateway.proxy.ollama.ollama_app import OllamaApp
from gateway.proxy.upstream_connection import watch_peer
from gateway.proxy.uvicorn_config import uvicorn_config
from gateway.server import handover, systemd
from gateway.server.app import create_app
from gateway.server.gateway_app import GatewayApp
from gateway.server.handover import Takeover
from gateway.server.idle_memory import share_arena
from gateway.settings import Settings
from gateway.store.data_folder import lock, own_lock

log = Logger("fitserve")

# Seconds to wait for orphaned workers. Workers check their signals ten times a second, then close
# their sockets.
_ORPHAN_TIMEOUT_S = 30.0
# Open files without any client: 20 at rest, and more while engines are started and inspected.
_OWN_FILES = 32
_MIN_CONNECTIONS = 8
# Seconds after the grace time for the end of other parts.
_FINAL_TIMEOUT_S = 30


def listen(settings: Settings) -> socket.socket:
    """The listening socket, bound before anything else starts. Raises SettingsError if the port is
    taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    watch_peer(listener)
    limit_send_buffer(listener)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise listen_error(settings.host, settings.port, error.strerror) from None
    return listener


def limit_connections(settings: Settings) -> Settings:
    """Settings with as many connections as open files allow, after raising the limit if possible. A
    client and its engine take two files. Files for engines, the database and logs are reserved.

    Raises SettingsError if too few files remain.
    """
    target = 2 * settings.max_connections + 512
    allowed_files = open_files.raise_fd_limit(target)
    # Two files for each connection, and one for each connection being refused.
    allowed_connections = bisect_right(
        range(1, settings.max_connections + 1),
        allowed_files - _OWN_FILES,
        key=lambda connections: 2 * connections + refusal_capacity(connections),
    )
    if allowed_connections < min(_MIN_CONNECTIONS, settings.max_connections):
        minimum = _OWN_FILES + 2 * _MIN_CONNECTIONS + refusal_capacity(_MIN_CONNECTIONS)
        raise SettingsError(
            f"This process may open {allowed_files} files, but needs at least {minimum}.",
            hint=(
                f"Raise the limit (`ulimit -n {target}`, or LimitNOFILE={target} in a systemd"
                " unit)."
            ),
        )
    if allowed_connections < settings.max_connections:
        log.warning(
            "the limit on open files allows fewer connections than FITSERVE_MAX_CONNECTIONS",
            files=allowed_files,
            connections=allowed_connections,
            hint=f"ulimit -n {target}, or LimitNOFILE={target} in a systemd unit",
        )
    return settings.model_copy(update={"max_connections": allowed_connections})


def server_config(settings: Settings, app: GatewayApp) -> uvicorn.Config:
    """Configuration of uvicorn for `app`: every connection is a `ClientConnection`, which answers
    inference itself."""
    tls = app.certificate.context if app.certificate is not None else None
    application = OllamaApp(app, app.plane)
    return uvicorn_config(
        application, client_protocol(app.plane, tls), lifespan="on", grace_s=settings.stop_grace_s
    )


class GatewayServer(uvicorn.Server):
    """The server of a gateway of one process, which ends endless streams when it stops."""

    def __init__(self, config: uvicorn.Config, app: GatewayApp) -> None:
        super().__init__(config)
        self._app = app
        app.inner_protocol = inner_protocol(app.plane, config, self.server_state)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        exempt_start_objects()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.close_streams()
        await super().shutdown(sockets)


def _service_sockets(settings: Settings) -> list[socket.socket]:
    """The sockets that a service manager opened for this process. Raises SettingsError for a socket
    that is reachable from outside, without a key."""
    listeners = systemd.opened_sockets()
    for listener in listeners:
        watch_peer(listener)
        limit_send_buffer(listener)
        host = (
            listener.getsockname()[0]
            if listener.family in (socket.AF_INET, socket.AF_INET6)
            else "a path"
        )
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            raise SettingsError(
                f"The socket given by the service manager is not a TCP socket ({host}).",
                hint="Give `ListenStream=` a port.",
            ) from None
        if not loopback and settings.admin_key is None:
            raise SettingsError(
                f"Refusing to serve the socket at {host} without a key: any client of that"
                " address could start programs here.",
                hint="Set FITSERVE_ADMIN_KEY, or bind the socket to 127.0.0.1.",
            )
    return listeners


def _listen(settings: Settings) -> socket.socket:
    """The listening socket, after orphaned workers have released the port. Raises SettingsError."""
    from gateway.proxy.workers.orphaned_workers import stop_orphaned_workers

    deadline = time.monotonic() + _ORPHAN_TIMEOUT_S
    while True:
        orphans = stop_orphaned_workers(settings.data)
        try:
            return listen(settings)
        except SettingsError:
            if not orphans or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _server(
    settings: Settings, listeners: list[socket.socket], *, is_bound_here: bool
) -> tuple[GatewayApp, uvicorn.Server, list[socket.socket]]:
    """The application, its server, and the sockets of that server. `is_bound_here`: this process
    has bound the listener."""
    if settings.workers == 1:
        app = create_app(settings)
        server = GatewayServer(server_config(settings, app), app)
        app.client_sockets = listeners
        app.drain = partial(app.plane.drain, server, settings.drain_s)
        return app, server, listeners
    from gateway.proxy.shared_memory import SharedMemory
    from gateway.proxy.workers import sockets
    from gateway.proxy.workers.control_server import ControlServer
    from gateway.proxy.workers.shared_parts import SharedParts

    shares = (
        [[listener] for listener in sockets.bind_shared_sockets(listeners[0], settings.workers)]
        if is_bound_here
        else sockets.assign_sockets(listeners, settings.workers)
    )
    control, path = sockets.listen_control(settings.data)
    app = create_app(settings, shared_parts=SharedParts(SharedMemory(), shares, path))
    workers = app.workers
    assert workers is not None  # noqa: S101 - given above
    control_server = ControlServer(settings, app, workers, app.close_streams)

    async def drain() -> None:
        await workers.hand_over(settings.drain_s)
        control_server.should_exit = True

    app.drain = drain
    app.client_sockets = workers.listeners
    return app, control_server, [control]


def _stop(server: uvicorn.Server, settings: Settings) -> None:
    """Stop the server like SIGTERM. The kernel ends the process if that hangs, because the cause
    of the failure may also block the end."""
    server.should_exit = True
    signal.alarm(math.ceil(settings.stop_grace_s) + _FINAL_TIMEOUT_S)


def _handover_offer(settings: Settings) -> Takeover:
    """The offer of the running gateway. Raises SettingsError."""
    takeover = handover.request_takeover(settings.data)
    host, port = takeover.listeners[0].getsockname()[:2]
    if settings.port not in (0, port) or (
        settings.host != host and not {settings.host, host} <= {"localhost", "127.0.0.1"}
    ):
        raise SettingsError(
            f"The running gateway listens on {host} port {port}, and this one should listen on"
            f" {settings.host} port {settings.port}.",
            hint="Stop the running gateway first; another address needs a restart.",
        )
    return takeover


def _replace_ourselves(*_: object) -> None:
    """Start another process of the installed program, which takes over from this one."""
    if os.getpid() == 1:
        log.warning(
            "a container ends with its first process, so another process cannot take over in it"
        )
        return
    log.info("starting another process of this program to take over")
    subprocess.Popen([sys.executable, "-m", "gateway.__main__", "serve", "--take-over"])


def serve(settings: Settings, *, take_over: bool = False) -> None:
    """Run the gateway until SIGTERM or SIGINT; engines keep running. `take_over`: from the running
    gateway of the data folder. Raises SettingsError, and FitserveError when the loop ends."""
    # uvicorn finishes its work, then raises the signal again. A stop of the service is not a
    # failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    share_arena()  # before the first thread
    settings = limit_connections(settings)
    takeover = _handover_offer(settings) if take_over else None
    data_lock = takeover.lock if takeover is not None else lock(settings.data)
    try:
        listeners = takeover.listeners if takeover is not None else _service_sockets(settings)
        owns_listeners = not listeners
        listeners = listeners or [_listen(settings)]
        address, port = listeners[0].getsockname()[:2]
        log.info(
            "listening",
            url=f"{'https' if settings.tls_cert else 'http'}://{address}:{port}",
            page=f"{settings.own_url}/",
            data=str(settings.data),
            keys=settings.admin_key is not None,
        )
        if takeover is not None:
            takeover.wait_for_release()
            own_lock(data_lock)
        app, server, sockets = _server(settings, listeners, is_bound_here=owns_listeners)
        app.stop = partial(_stop, server, settings)
        app.has_started = lambda: server.started
        app.lock = data_lock
        app.takeover = takeover
        signal.signal(signal.SIGUSR2, _replace_ourselves)
        server.run(sockets=sockets)
        if not server.started:
            raise SettingsError(
                "The gateway could not start; the lines above have the cause.",
                hint="Remove the cause, then start the gateway again.",
            )
        if app.failure is not None:
            raise FitserveError(
                f"The control loop has ended ({app.failure}).",
                hint="See the log. Engines keep running; start the gateway again.",
            )
    finally:
        os.close(data_lock)
