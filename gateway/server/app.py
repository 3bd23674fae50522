"""The whole gateway: its parts, how they begin and end together, the admin API and health. Who may
come in: `GatewayApp`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from gateway.controller.events.event_log import EventLog
from gateway.controller.events.observer import Observer
from gateway.controller.events.webhook import webhooks
from gateway.controller.loop import Loop
from gateway.controller.loop_health import LoopHealth
from gateway.controller.steps.launcher import Launcher
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.errors import FitserveError
from gateway.hosts.host import Host
from gateway.logging import Logger
from gateway.machine.gpu_watch import GpuWatch, kept_here
from gateway.measuring.calibration.calibrator import Calibrator
from gateway.measuring.tuning.traffic import ServedTraffic
from gateway.measuring.tuning.tuner import Tuner
from gateway.models.catalog.download import download
from gateway.models.catalog.hub import Hub
from gateway.planner.service.machine_planner import MachinePlanner
from gateway.planner.service.messages import WorkerConfig
from gateway.planner.service.plan_process import PlanProcess
from gateway.profiles.profiles import Profiles
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.failed_logins import FailedLogins
from gateway.proxy.access.keyring import Keyring
from gateway.proxy.access.origins import Origins
from gateway.proxy.access.scopes import Scopes
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.limits import Limits
from gateway.proxy.metrics.access_log import AccessLog
from gateway.proxy.metrics.counters import Metrics
from gateway.proxy.routing.routes import Routes
from gateway.proxy.shared_memory import SharedMemory
from gateway.server import systemd
from gateway.server.admin import (
    backup_routes,
    bench_routes,
    calibration_routes,
    description,
    disk_routes,
    docs,
    event_routes,
    fact_routes,
    key_routes,
    launch_routes,
    model_routes,
    pull_routes,
    request_routes,
    usage_routes,
)
from gateway.server.error_answers import answer_errors
from gateway.server.gateway_app import GatewayApp
from gateway.server.handover import Handing, Handover
from gateway.server.host_choice import choose_host
from gateway.server.idle_memory import give_back
from gateway.server.metrics import gauges
from gateway.server.metrics.engine_series import EngineSeries
from gateway.server.metrics.usage_keeper import UsageKeeper
from gateway.server.models_file_watch import ModelsFileWatch
from gateway.server.page import files, live_stream
from gateway.server.page.live_stream import LiveStream
from gateway.settings import Settings
from gateway.store.recovery import installation_id, open_store
from gateway.tls import Certificate
from gateway.version import __version__

if TYPE_CHECKING:
    from gateway.proxy.workers.supervisor import Workers

log = Logger("fitserve")

# The loop looks at the world at least this often; a longer silence means that the loop hangs.
_STALE_S = 15.0
# Between two looks at whether the server takes connections.
_LOOK_S = 0.02


def create_app(
    settings: Settings,
    host: Host | None = None,
    gpus: GpuWatch | None = None,
    shared: tuple[SharedMemory, list[list[socket.socket]], Path] | None = None,
) -> GatewayApp:
    """The whole gateway: an ASGI application, and the data plane beside it; their parts are made
        when the server starts it.

    host, gpus: another host or machine than the settings and this computer give. shared: where
    there are workers, their memory, the listening sockets of each, and the path at which they ask
    this process; the data plane is theirs then.
    """
    profiles = Profiles(settings.profiles_dir, learned=settings.data / "learned")
    watch = gpus or GpuWatch(kept=kept_here(settings.data, settings.gpus, settings.ram_bytes))
    failed_logins = FailedLogins(memory=shared[0] if shared is not None else None)
    origins = Origins(frozenset(settings.web_origins))
    keys = Keys(
        _secret(settings.admin_key),
        _secret(settings.api_key),
        failed_logins=failed_logins,
        origins=origins,
    )
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
    metrics = AccessLog() if settings.access_log else Metrics()
    workers = None
    if shared is not None:
        from gateway.proxy.workers.supervisor import Workers

        workers = Workers(settings, limits, keys, *shared, metrics.usage)
    routes = (
        workers.routes if workers is not None else Routes(queue_per_model=settings.queue_per_model)
    )
    plane = DataPlane(routes, keys, limits, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = settings.data / "fitserve.db"
        store = await asyncio.to_thread(open_store, database)
        mark = installation_id(database, store)
        changed = (
            workers.publish_keys
            if workers is not None
            else lambda: plane.limiter.keep(keys.table.keys)
        )
        keyring = Keyring(
            store,
            settings.data,
            keys,
            partial(asyncio.get_running_loop().call_soon_threadsafe, changed),
        )
        await asyncio.to_thread(keyring.load)
        app.state.keys, app.state.keyring = keys, keyring
        app.state.metrics, app.state.starts, app.state.plane = metrics, gauges.StartCounter(), plane
        app.state.workers = workers
        app.state.gpus = watch
        usage = app.state.usage = UsageKeeper(metrics.usage, store.usage)
        allowed = profiles.allowed_images(settings.allowed_images)
        chosen = host or await choose_host(settings, mark, allowed)
        hub = Hub(
            settings.hf_endpoint,
            _secret(settings.hf_token),
            settings.data / "hub",
            models=settings.models,
        )
        planning = PlanProcess(
            WorkerConfig(
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
        planner = MachinePlanner(
            settings.data, planning, watch, inquirer, profiles, images, store.fact_texts
        )
        launcher = Launcher(settings, chosen, profiles.of, partial(download, hub))
        ended = partial(gauges.requests_ended, metrics, workers)
        loop = Loop(store, planner, launcher, watch, lambda: profiles.signatures, routes, ended)
        await asyncio.to_thread(loop.load)
        events = app.state.events = EventLog(store)
        await events.begin()
        observer = Observer(events, loop.fleet.models, watch, lambda: keyring.kept, settings)
        gone = await asyncio.to_thread(observer.begin, store)
        loop.passed = observer.look
        observer.start(gone)
        hooks = webhooks(settings, events, store)
        about = {"version": __version__, "host": chosen.kind, "workers": settings.workers}
        in_flight = app.state.in_flight = workers or plane
        live = app.state.live = LiveStream(
            loop.fleet,
            loop.plan_preview,
            loop.health,
            routes,
            partial(gauges.counted_by, metrics, workers),
            in_flight,
            keys,
            about,
        )
        gateway.on_stop = (observer.stop, live.stop)
        watch.start(
            profiles.xids, partial(asyncio.get_running_loop().call_soon_threadsafe, loop.wake)
        )
        app.state.hub, app.state.launcher = hub, launcher
        app.state.settings, app.state.store, app.state.profiles = settings, store, profiles
        app.state.fleet, app.state.orders, app.state.plan_preview = (
            loop.fleet,
            loop.orders,
            loop.plan_preview,
        )
        app.state.health, app.state.evictor, app.state.wake = (
            loop.health,
            loop.evictor,
            loop.wake,
        )
        running = asyncio.create_task(loop.run())
        running.add_done_callback(gateway.loop_ended)
        series = app.state.engine_series = EngineSeries(loop.fleet.models, profiles.of)
        tuner = app.state.tuner = Tuner(
            loop.fleet,
            loop.plan_preview,
            loop.trials,
            launcher,
            store,
            ServedTraffic(loop.fleet.models, routes.working, ended, profiles.of),
        )
        by_file = (
            ModelsFileWatch(settings.models_file.expanduser(), settings.data, app)
            if settings.models_file
            else None
        )

        async def end_loop() -> None:
            """From now on this process changes nothing: neither engines nor the database."""
            if by_file is not None:
                await by_file.close()
            await asyncio.to_thread(watch.close)
            await tuner.close()
            await series.close()
            running.remove_done_callback(gateway.loop_ended)
            running.cancel()
            await asyncio.wait({running})
            await loop.close()
            await observer.close()
            await events.close()
            for hook in hooks:
                await hook.close()
            if not gateway.replaced:
                await _part(loop, chosen, settings)
            await planning.close()
            await chosen.close()
            keyring.close()
            await usage.close()
            store.close()

        async def release() -> list[str]:
            gateway.replaced = True
            if workers is not None:
                workers.handed_over = True
            gateway.stopping()
            gateway.on_stop = ()
            await end_loop()
            return sorted(routed())

        def routed() -> set[str]:
            return {name for name, route in routes.table.models.items() if route.replicas}

        if gateway.taken is not None:
            await gateway.taken.adopted(routed)
        if workers is not None:
            workers.start()
        if gateway.certificate is not None and workers is None:
            gateway.certificate.watch()
        announcing = asyncio.create_task(_announce(gateway, workers))
        handover = None
        if gateway.lock is not None and gateway.leave is not None:
            handing = Handing(
                gateway.lock, gateway.giving_sockets, release, gateway.leave, gateway.fail
            )
            handover = Handover(settings.data, handing)
        try:
            yield
        finally:
            announcing.cancel()
            if gateway.certificate is not None:
                await gateway.certificate.close()
            if handover is not None:
                await handover.close()
            if workers is not None:
                await workers.close()
            plane.close()
            if not gateway.replaced:
                systemd.notify("STOPPING=1")
                await end_loop()

    app = FastAPI(
        title="fitserve",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/admin/openapi.json",
    )
    app.openapi = cache(partial(description.description, app))  # type: ignore[method-assign]
    routers = (
        gauges.router,
        docs.router,
        calibration_routes.router,
        disk_routes.router,
        event_routes.router,
        fact_routes.router,
        key_routes.router,
        backup_routes.router,
        launch_routes.router,
        bench_routes.router,
        pull_routes.router,
        request_routes.router,
        usage_routes.router,
        model_routes.router,
        live_stream.router,
        files.router,
    )
    for router in routers:
        app.include_router(router)
    answer_errors(app)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """As engines tell theirs, in the same shape."""
        return {"version": __version__}

    @app.head("/health", include_in_schema=False)
    @app.head("/healthz", include_in_schema=False)
    @app.get(
        "/health",
        response_model=dict[str, str],
        responses={503: {"model": dict[str, str], "description": "It is not"}},
    )
    @app.get(
        "/healthz",
        response_model=dict[str, str],
        responses={503: {"model": dict[str, str], "description": "It is not"}},
    )
    async def healthz() -> JSONResponse:
        """Inference is answered, and the loop lives. No I/O, so that it stays true while a disk or
        Docker hangs."""
        status = (
            "no worker"
            if workers is not None and workers.alive == 0
            else "no loop"
            if gateway.failure
            else "ok"
        )
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    ready = dict[str, str | list[str]]

    @app.head("/readyz", include_in_schema=False)
    @app.get(
        "/readyz",
        response_model=ready,
        responses={503: {"model": ready, "description": "It cannot"}},
    )
    async def readyz() -> JSONResponse:
        """The gateway can do its work: the loop runs, the store and the host answer."""
        health: LoopHealth = app.state.health
        problems = [
            problem
            for problem in (health.store_problem and "store", health.host_problem and "host")
            if problem
        ]
        if gateway.failure or health.problem or time.monotonic() - health.last_pass > _STALE_S:
            problems.append("loop")
        return JSONResponse(
            {"status": "not ready" if problems else "ok", "problems": problems},
            503 if problems else 200,
        )

    scopes = Scopes([*app.routes, *(route for router in routers for route in router.routes)])
    gateway = GatewayApp(app, keys, scopes, plane, workers, access_log=settings.access_log)
    if settings.tls_cert is not None:
        # Workers have their own; here it is looked at before anything is started.
        gateway.certificate = Certificate(settings.tls_cert, settings.tls_key)
    return gateway


async def _announce(gateway: GatewayApp, workers: Workers | None) -> None:
    """Once clients are answered, the gateway before may go, and the service manager knows."""
    while not gateway.started() or (workers is not None and workers.answering < workers.count):  # noqa: ASYNC110 - once, and soon over
        await asyncio.sleep(_LOOK_S)
    if gateway.taken is not None:
        gateway.taken.serving()
    give_back()
    systemd.notify(f"MAINPID={os.getpid()}", "READY=1")


async def _part(loop: Loop, host: Host, settings: Settings) -> None:
    """The last word on engines: they end with the gateway, or the log says that they go on, and
    what ends them."""
    try:
        if settings.stop_engines:
            await loop.end_engines()
            return
        running = await loop.left_running()
        if host.kind == "process":
            processes = [one for name in running for one in await host.processes(name)]
            command = ["kill", *(str(one.pid) for one in processes)]
        else:
            command = ["docker", "rm", "-f", *running]
    except FitserveError as error:
        log.warning("whether engines go on cannot be told", reason=str(error))
        return
    if running:
        log.warning(
            f"the gateway has ended; {len(running)} of its engines go on, and the next gateway"
            f" adopts them; to end them: {' '.join(command)}"
        )


def _secret(value: Any) -> str | None:
    return value.get_secret_value() if value is not None else None
