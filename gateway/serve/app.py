"""The application: who may come in, the OpenAI data plane, the admin API, health. And the server around it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import __version__
from gateway.errors import BadRequest, FitserveError, MethodNotAllowed, NotFound, SettingsError
from gateway.gpuwatch import GpuWatch
from gateway.hosts.host import Host
from gateway.hosts.select import choose_host
from gateway.hub import Hub
from gateway.keyring import Keyring
from gateway.loop import Loop
from gateway.profiles import Profiles
from gateway.runner import Runner
from gateway.salvage import installation, open_store
from gateway.serve import admin, facts, gauges
from gateway.serve import keys as admin_keys
from gateway.serve.access import AccessLog
from gateway.serve.auth import Keys
from gateway.serve.front import front
from gateway.serve.guard import Limits
from gateway.serve.metrics import Metrics
from gateway.serve.plane import Plane
from gateway.serve.protocol import request_id, send_error
from gateway.serve.routes import Routes
from gateway.serve.scopes import Scopes
from gateway.serve.surface import is_inference
from gateway.settings import Settings

if TYPE_CHECKING:
    import httpx

    from gateway.serve.workers import Workers

log = structlog.get_logger("fitserve")

# The loop looks at the world at least this often; longer silence means that it hangs.
_STALE_S = 15.0
# Workers look at their signals ten times a second, and close their sockets at once then.
_ORPHANS_S = 3.0


class Door:
    """Pure ASGI around FastAPI: checks the key before anything reads the request. Inference never comes here, see `front`.

    Authorisation looks at `scope["path"]`, the same value that routing uses, so no spelling of a URL tells them apart.
    """

    def __init__(self, inner: ASGIApp, keys: Keys, scopes: Scopes, plane: Plane, workers: Workers | None = None) -> None:
        self.plane = plane
        self.workers = workers
        self.scopes = scopes
        self._inner = inner
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        try:
            websocket = scope["type"] == "websocket"
            need = "inference" if is_inference(scope["path"]) else "admin" if websocket else self.scopes.needed(scope)
            if need != "open":
                self._keys.admit(scope["headers"], need, scope["client"][0] if scope.get("client") else "")
        except FitserveError as error:
            if websocket:
                await send({"type": "websocket.close", "code": 1008})
            else:
                await send_error(send, error, request_id(scope))
            return
        await self._inner(scope, receive, send)


def create_app(
    settings: Settings,
    host: Host | None = None,
    gpus: GpuWatch | None = None,
    shared: tuple[list[socket.socket], Path] | None = None,
) -> Door:
    """The whole gateway: an ASGI application, and the data plane beside it; their parts are made when the server starts it.

    host, gpus: another host or machine than the settings and this computer give. shared: where there are workers, a listening
    socket for each, and the path at which they ask this process; the data plane is theirs then.
    """
    profiles = Profiles(settings.profiles_dir)
    # Made on first use: importing httpx is a tenth of the whole start.
    client = cache(_control_client)
    keys = Keys(_secret(settings.admin_key), _secret(settings.api_key))
    limits = Limits(
        body_bytes=settings.body_limit_bytes,
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address,
        keep_alive_s=settings.keep_alive_s,
        engine_silence_s=settings.engine_silence_s,
        queue_timeout_s=settings.queue_timeout_s,
        waiting_comment_s=settings.waiting_comment_s,
    )
    workers = None
    if shared is not None:
        from gateway.serve.workers import Workers

        workers = Workers(settings, limits, keys, *shared)
    routes = workers.routes if workers is not None else Routes(queue_per_model=settings.queue_per_model)
    metrics = AccessLog() if settings.access_log else Metrics()
    plane = Plane(routes, keys, limits, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = settings.data / "fitserve.db"
        store = await asyncio.to_thread(open_store, database)
        mark = installation(database, store)
        changed = workers.publish_keys if workers is not None else lambda: plane.limiter.keep(keys.table.keys)
        keyring = Keyring(store, settings.data, keys, partial(asyncio.get_running_loop().call_soon_threadsafe, changed))
        await asyncio.to_thread(keyring.load)
        app.state.keys, app.state.keyring = keys, keyring
        app.state.metrics, app.state.starts, app.state.plane = metrics, gauges.Starts(), plane
        app.state.workers = workers
        chosen = host or await choose_host(settings, mark)
        hub = Hub(settings.hf_endpoint, _secret(settings.hf_token), settings.data / "hub")
        watch = gpus or GpuWatch()
        runner = Runner(settings, profiles, hub, chosen, watch)
        loop = Loop(store, runner, client, routes)
        await asyncio.to_thread(loop.load)
        watch.start(profiles.xids, partial(asyncio.get_running_loop().call_soon_threadsafe, loop.wake))
        app.state.settings, app.state.store, app.state.runner, app.state.loop = settings, store, runner, loop
        warm = asyncio.create_task(asyncio.to_thread(import_module, "httpx"))
        running = asyncio.create_task(loop.run())
        if workers is not None:
            workers.start()
        try:
            yield
        finally:
            if workers is not None:
                await workers.close()
            plane.close()
            await asyncio.to_thread(watch.close)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await loop.close()
            await warm
            await client().aclose()
            await chosen.close()
            store.close()

    app = FastAPI(
        title="fitserve",
        version=__version__,
        lifespan=lifespan,
        docs_url="/admin/docs",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        openapi_url="/admin/openapi.json",
    )
    routers = (gauges.router, facts.router, admin_keys.router, admin.router)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(FitserveError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> JSONResponse:
        """Inference is answered. No I/O, so that it stays true while a disk or Docker hangs."""
        alive = workers is None or workers.alive > 0
        return JSONResponse({"status": "ok" if alive else "no worker"}, 200 if alive else 503)

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        """The gateway can do its work: the loop runs, the store and the host answer."""
        loop: Loop = app.state.loop
        problems = [problem for problem in (loop.store_problem and "store", loop.host_problem and "host") if problem]
        if time.monotonic() - loop.last_pass > _STALE_S:
            problems.append("loop")
        return JSONResponse({"status": "not ready" if problems else "ok", "problems": problems}, 503 if problems else 200)

    scopes = Scopes([*app.routes, *(route for router in routers for route in router.routes)])
    return Door(app, keys, scopes, plane, workers)


def _control_client() -> httpx.AsyncClient:
    """For health checks and verification; inference goes through `gateway.serve.upstream`."""
    import httpx

    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5), follow_redirects=False, trust_env=False)


def _secret(value: Any) -> str | None:
    return value.get_secret_value() if value is not None else None


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, FitserveError):
        raise error
    headers = {"x-gateway-source": "gateway", "x-request-id": request_id(request.scope)}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    return JSONResponse(error.envelope(), error.status, headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:]) or "body"
    bad = BadRequest(f"{where}: {first['msg']}.", hint="GET /admin/openapi.json describes the request.", param=where)
    return await _on_error(request, bad)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    method = request.method
    if error.status_code == 404:
        return await _on_error(
            request,
            NotFound(
                f"There is no {method} {request.url.path[:200]} here.", hint="The API is described at /admin/openapi.json."
            ),
        )
    bad = MethodNotAllowed(
        f"{request.url.path[:200]} does not take {method}.", hint="The API is described at /admin/openapi.json."
    )
    response = await _on_error(request, bad)
    response.headers.update(error.headers or {})
    return response


def lock(data: Path) -> int:
    """Hold the data folder for this process. Raises SettingsError naming the gateway that has it."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        descriptor = _lock_file(data / "gateway.lock")
    except OSError as error:
        raise SettingsError(
            f"The data folder {data} cannot be used: {error.strerror}.", hint="Set FITSERVE_DATA_DIR to a folder you can write."
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = re.sub(r"\D", "", os.read(descriptor, 32).decode(errors="replace")) or "unknown"
        os.close(descriptor)
        busy = SettingsError(
            f"Another gateway (process {owner}) uses the data folder {data}.", hint="Stop it, or set another FITSERVE_DATA_DIR."
        )
        busy.exit_code = 3
        raise busy from None
    # A disk that is full or read-only must not keep a gateway from what runs: the lock holds without our number in it too.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _lock_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def listen(settings: Settings) -> socket.socket:
    """The listening socket, bound before anything else is started. Raises SettingsError when the port is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"Cannot listen on {settings.host} port {settings.port}: {error.strerror}.",
            hint="Stop what uses it, or set FITSERVE_PORT.",
        ) from None
    return listener


def allow_connections(settings: Settings) -> None:
    """Raises the limit on open files, where the system lets us: a client and its engine are two each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * settings.max_connections + 512
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def server_config(settings: Settings, app: Door) -> uvicorn.Config:
    """How uvicorn serves `app`: every connection is a `Front`, which answers inference itself."""
    return uvicorn.Config(
        app,
        http=front(app.plane),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(settings.stop_grace_s),
    )


def _listen(settings: Settings) -> socket.socket:
    """As `listen`, once the workers of a gateway that died have let go of the port."""
    from gateway.serve.orphans import end_orphans

    until = time.monotonic() + _ORPHANS_S
    while True:
        found = end_orphans(settings.data)
        try:
            return listen(settings)
        except SettingsError:
            if not found or time.monotonic() > until:
                raise
        time.sleep(0.05)


def _server(settings: Settings, listener: socket.socket) -> tuple[uvicorn.Server, socket.socket]:
    """The server, and where it listens."""
    if settings.workers == 1:
        return uvicorn.Server(server_config(settings, create_app(settings))), listener
    from gateway.serve import sockets
    from gateway.serve.control import Control

    shared = sockets.share(listener, settings.workers)
    control, path = sockets.listen_control(settings.data)
    app = create_app(settings, shared=(shared, path))
    assert app.workers is not None  # noqa: S101 - it was told what they share
    return Control(settings, app, app.workers), control


def serve(settings: Settings) -> None:
    """Run the gateway until SIGTERM or SIGINT; engines go on running. Raises SettingsError."""
    # uvicorn finishes its work first, then raises the signal again: stopping a service is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    held = lock(settings.data)
    try:
        listener = _listen(settings)
        address, port = listener.getsockname()[:2]
        log.info("listening", url=f"http://{address}:{port}", data=str(settings.data), keys=settings.admin_key is not None)
        allow_connections(settings)
        server, listener = _server(settings, listener)
        server.run(sockets=[listener])
        if not server.started:
            raise SettingsError("The gateway could not start; the lines above say why.")
    finally:
        os.close(held)
