"""The application: who may come in, the OpenAI data plane, the admin API, health."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.auth import Keys
from gateway.access.failed_logins import FailedLogins
from gateway.access.keyring import Keyring
from gateway.access.origins import EXPOSED, METHODS, Origins
from gateway.api.endpoints import is_inference
from gateway.api.protocol import request_id, send_error
from gateway.calibration.calibrator import Calibrator
from gateway.catalog.download import download
from gateway.catalog.hub import Hub
from gateway.controller.launcher import Launcher
from gateway.controller.loop import Loop
from gateway.errors import BadRequest, FitserveError, MethodNotAllowed, NotFound
from gateway.hosts.host import Host
from gateway.inquiry.answer_cache import AnswerCache
from gateway.inquiry.inquirer import Inquirer
from gateway.machine.gpu_watch import GpuWatch, kept_here
from gateway.planning.machine_planner import MachinePlanner
from gateway.planning.messages import Start
from gateway.planning.plan_process import PlanProcess
from gateway.profiles import Profiles
from gateway.routing.routes import Routes
from gateway.serve.admin import bench_routes, calibration_routes, disk_routes, docs, fact_routes, key_routes, model_routes
from gateway.serve.admin.scopes import Scopes
from gateway.serve.host_choice import choose_host
from gateway.serve.metrics import gauges
from gateway.serve.metrics.access_log import AccessLog, AdminRequest
from gateway.serve.metrics.counters import Metrics
from gateway.serve.proxy.data_plane import DataPlane
from gateway.serve.proxy.limits import Limits
from gateway.settings import Settings
from gateway.shared_memory import SharedMemory
from gateway.store.recovery import installation_id, open_store
from gateway.tuning.tuner import Tuner
from gateway.version import __version__

if TYPE_CHECKING:
    from gateway.serve.workers.supervisor import Workers

log = structlog.get_logger("fitserve")

# The loop looks at the world at least this often; a longer silence means that the loop hangs.
_STALE_S = 15.0


class GatewayApp:
    """Pure ASGI around FastAPI: checks the key before anything reads the request. Inference never comes here, see `ClientConnection`.

    Authorisation looks at `scope["path"]`, the same value that routing uses, so no spelling of a URL tells them apart.
    """

    def __init__(
        self,
        inner: ASGIApp,
        keys: Keys,
        scopes: Scopes,
        plane: DataPlane,
        workers: Workers | None = None,
        *,
        access_log: bool = False,
    ) -> None:
        """Preflights of browsers are answered before any key is looked for: they have none."""
        self._answer: ASGIApp = self._let_in
        if plane.origins is not None:
            self._answer = CORSMiddleware(
                self._let_in,
                allow_origins=tuple(plane.origins.named),
                allow_methods=METHODS,
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )
        self.plane = plane
        self.workers = workers
        self.scopes = scopes
        self.failure: str | None = None  # why the loop has ended, though nobody ended it
        self.stop: Callable[[], object] | None = None  # ends the server
        self._inner = inner
        self._keys = keys
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
        elif scope["type"] == "http" and self._access_log and self.scopes.needed(scope) != "open":
            visit = AdminRequest(scope, send, self.scopes)
            try:
                await self._answer(scope, receive, visit.send)
            finally:
                visit.tell()
        else:
            await self._answer(scope, receive, send)

    def loop_ended(self, running: asyncio.Task[None]) -> None:
        """Without the loop no engine is watched: whoever supervises this process has to hear of it, and start another one."""
        error = None if running.cancelled() else running.exception()
        self.failure = (
            f"{type(error).__name__}: {error}" if error else "it was cancelled" if running.cancelled() else "it returned"
        )
        log.critical("the control loop has ended, and so does the gateway; engines go on", reason=self.failure, exc_info=error)
        if self.stop is not None:
            self.stop()

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            need = "inference" if is_inference(scope["path"]) else self.scopes.needed(scope)
            if need != "open":
                key = self._keys.admit(scope["headers"], need, scope["client"][0] if scope.get("client") else "")
                scope["key"] = key.name
        except FitserveError as error:
            await send_error(send, error, request_id(scope))
            return
        await self._inner(scope, receive, send)


def create_app(
    settings: Settings,
    host: Host | None = None,
    gpus: GpuWatch | None = None,
    shared: tuple[SharedMemory, list[socket.socket], Path] | None = None,
) -> GatewayApp:
    """The whole gateway: an ASGI application, and the data plane beside it; their parts are made when the server starts it.

    host, gpus: another host or machine than the settings and this computer give. shared: where there are workers, their memory, a
    listening socket for each, and the path at which they ask this process; the data plane is theirs then.
    """
    profiles = Profiles(settings.profiles_dir, learned=settings.data / "learned")
    watch = gpus or GpuWatch(kept=kept_here(settings.data, settings.gpus))
    failed_logins = FailedLogins(memory=shared[0] if shared is not None else None)
    origins = Origins(frozenset(settings.web_origins))
    keys = Keys(_secret(settings.admin_key), _secret(settings.api_key), failed_logins=failed_logins, origins=origins)
    limits = Limits(
        body_bytes=settings.body_limit_bytes,
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address,
        keep_alive_s=settings.keep_alive_s,
        engine_silence_s=settings.engine_silence_s,
        queue_timeout_s=settings.queue_timeout_s,
        waiting_comment_s=settings.waiting_comment_s,
        origins=settings.web_origins,
    )
    workers = None
    if shared is not None:
        from gateway.serve.workers.supervisor import Workers

        workers = Workers(settings, limits, keys, *shared)
    routes = workers.routes if workers is not None else Routes(queue_per_model=settings.queue_per_model)
    metrics = AccessLog() if settings.access_log else Metrics()
    plane = DataPlane(routes, keys, limits, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = settings.data / "fitserve.db"
        store = await asyncio.to_thread(open_store, database)
        mark = installation_id(database, store)
        changed = workers.publish_keys if workers is not None else lambda: plane.limiter.keep(keys.table.keys)
        keyring = Keyring(store, settings.data, keys, partial(asyncio.get_running_loop().call_soon_threadsafe, changed))
        await asyncio.to_thread(keyring.load)
        app.state.keys, app.state.keyring = keys, keyring
        app.state.metrics, app.state.starts, app.state.plane = metrics, gauges.StartCounter(), plane
        app.state.workers = workers
        allowed = profiles.allowed_images(settings.allowed_images)
        chosen = host or await choose_host(settings, mark, allowed)
        hub = Hub(settings.hf_endpoint, _secret(settings.hf_token), settings.data / "hub", models=settings.models)
        planning = PlanProcess(
            Start(
                roots=tuple(map(str, profiles.roots)),
                data=str(settings.data),
                hf_endpoint=settings.hf_endpoint,
                hf_token=hub.token,
                installed_only=chosen.kind == "process",
                allowed_images=allowed.patterns if chosen.kind == "docker" else None,
                engine_env=tuple(settings.engine_env.items()),
                models=str(settings.models),
            )
        )
        inquirer = Inquirer(chosen, AnswerCache(settings.data / "answers"))
        app.state.calibrator = Calibrator(chosen, profiles, settings.data / "asking")
        images = allowed if chosen.kind != "process" else None
        planner = MachinePlanner(settings.data, planning, watch, inquirer, profiles, images)
        launcher = Launcher(settings, chosen, profiles.of, partial(download, hub))
        ended = partial(gauges.requests_ended, metrics, workers)
        loop = Loop(store, planner, launcher, watch, lambda: profiles.signatures, routes, ended)
        await asyncio.to_thread(loop.load)
        watch.start(profiles.xids, partial(asyncio.get_running_loop().call_soon_threadsafe, loop.wake))
        app.state.settings, app.state.store, app.state.profiles, app.state.loop = settings, store, profiles, loop
        running = asyncio.create_task(loop.run())
        running.add_done_callback(gateway.loop_ended)
        tuner = app.state.tuner = Tuner(loop, store, settings, ended, profiles.of)
        if workers is not None:
            workers.start()
        try:
            yield
        finally:
            if workers is not None:
                await workers.close()
            plane.close()
            await asyncio.to_thread(watch.close)
            await tuner.close()
            running.remove_done_callback(gateway.loop_ended)
            running.cancel()
            await asyncio.wait({running})
            await loop.close()
            await planning.close()
            await chosen.close()
            keyring.close()
            store.close()

    app = FastAPI(
        title="fitserve",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/admin/openapi.json",
    )
    routers = (
        gauges.router,
        docs.router,
        calibration_routes.router,
        disk_routes.router,
        fact_routes.router,
        key_routes.router,
        bench_routes.router,
        model_routes.router,
    )
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(FitserveError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)

    @app.get("/version", include_in_schema=False)
    async def version() -> JSONResponse:
        """As engines tell theirs, in the same shape."""
        return JSONResponse({"version": __version__})

    @app.get("/health", include_in_schema=False)
    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> JSONResponse:
        """Inference is answered, and the loop lives. No I/O, so that it stays true while a disk or Docker hangs."""
        status = "no worker" if workers is not None and workers.alive == 0 else "no loop" if gateway.failure else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        """The gateway can do its work: the loop runs, the store and the host answer."""
        loop: Loop = app.state.loop
        problems = [problem for problem in (loop.store_problem and "store", loop.host_problem and "host") if problem]
        if gateway.failure or loop.problem or time.monotonic() - loop.last_pass > _STALE_S:
            problems.append("loop")
        return JSONResponse({"status": "not ready" if problems else "ok", "problems": problems}, 503 if problems else 200)

    scopes = Scopes([*app.routes, *(route for router in routers for route in router.routes)])
    gateway = GatewayApp(app, keys, scopes, plane, workers, access_log=settings.access_log)
    return gateway


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
