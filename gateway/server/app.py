"""The gateway as one application: construction of its parts from the settings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from gateway.controller.events.event_log import EventLog
from gateway.controller.events.observer import Observer
from gateway.controller.events.webhook import webhooks
from gateway.controller.loop import Loop
from gateway.controller.steps.launcher import Launcher
from gateway.diagnosis.signatures import Signatures
from gateway.domain.facts import Event
from gateway.domain.image_name import AllowedImages
from gateway.engines.inquiry.answer_cache import AnswerCache
from gateway.engines.inquiry.inquirer import Inquirer
from gateway.errors import SettingsError
from gateway.hosts.host import Host
from gateway.keys import UsageRow
from gateway.machine.gpu_watch import GpuWatch, allowed_devices
from gateway.measuring.calibration.calibrator import Calibrator
from gateway.measuring.tuning.automatic_tuning import AutomaticTuning
from gateway.measuring.tuning.engine_traffic import ServedTraffic
from gateway.measuring.tuning.measurements import Measurements
from gateway.measuring.tuning.plan_search import SearchTools
from gateway.measuring.tuning.tuning import Tuning
from gateway.measuring.tuning.tunings import Tunings
from gateway.models.catalog.download import download
from gateway.models.catalog.folder_browser import FolderBrowser
from gateway.models.catalog.hub import Hub
from gateway.planner.service.machine_planner import MachinePlanner
from gateway.planner.service.messages import WorkerConfig
from gateway.planner.service.plan_process import PlanProcess
from gateway.planner.service.search_process import SearchProcess
from gateway.profiles.profiles import Profiles
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.budget_book import BudgetBook
from gateway.proxy.access.budgets import BudgetAdmission
from gateway.proxy.access.failed_logins import FailedLogins
from gateway.proxy.access.keyring import Keyring
from gateway.proxy.access.ledger import Ledger
from gateway.proxy.access.origins import Origins
from gateway.proxy.access.rate_limits import RateLimiter
from gateway.proxy.access.scopes import Scopes
from gateway.proxy.data_plane import DataPlane
from gateway.proxy.limits import Limits
from gateway.proxy.metrics.request_metrics import request_metrics
from gateway.proxy.routing.routes import Routes
from gateway.proxy.tls import Certificate
from gateway.proxy.workers.shared_parts import SharedParts
from gateway.server import health_routes
from gateway.server.admin import (
    backup_routes,
    bench_routes,
    budget_routes,
    calibration_routes,
    description,
    disk_routes,
    docs,
    event_routes,
    fact_routes,
    folder_routes,
    key_routes,
    knowledge_routes,
    launch_routes,
    machine_routes,
    model_routes,
    prepared_routes,
    pull_routes,
    request_routes,
    search_routes,
    tune_routes,
    usage_routes,
)
from gateway.server.admin.changes import history_routes
from gateway.server.batches import batch_routes, file_routes
from gateway.server.batches.batches import Batches
from gateway.server.budget_watch import BudgetWatch
from gateway.server.error_answers import answer_errors
from gateway.server.gateway_app import GatewayApp
from gateway.server.gateway_parts import Gateway, ServingParts
from gateway.server.host_choice import choose_host
from gateway.server.identity import login_routes
from gateway.server.identity.identities import (
    build_identities,
    person_allowance,
    person_scopes,
)
from gateway.server.knowledge_keeper import KnowledgeKeeper
from gateway.server.lifetime import Lifetime
from gateway.server.metrics import gauges
from gateway.server.metrics.engine_series import EngineSeries
from gateway.server.metrics.usage_keeper import UsageKeeper
from gateway.server.page import files, live_stream
from gateway.server.page.live_stream import LiveStream
from gateway.server.price_file import read_prices
from gateway.server.transcripts import transcript_routes
from gateway.server.transcripts.replays import Replays
from gateway.settings import Settings
from gateway.store.recovery import installation_id, open_store
from gateway.store.store import Store
from gateway.version import __version__

if TYPE_CHECKING:
    from gateway.server.network_watch import NetworkWatch
    from gateway.server.telemetry.telemetry import Telemetry
    from gateway.server.transcripts.transcripts import Transcripts

_ROUTERS = (
    gauges.router,
    docs.router,
    budget_routes.router,
    calibration_routes.router,
    disk_routes.router,
    event_routes.router,
    fact_routes.router,
    knowledge_routes.router,
    key_routes.router,
    backup_routes.router,
    launch_routes.router,
    bench_routes.router,
    tune_routes.router,
    pull_routes.router,
    machine_routes.router,
    prepared_routes.router,
    request_routes.router,
    folder_routes.router,
    search_routes.router,
    usage_routes.router,
    history_routes.router,
    model_routes.router,
    live_stream.router,
    files.router,
    health_routes.router,
    login_routes.router,
    file_routes.router,
    batch_routes.router,
    transcript_routes.router,
)


def create_app(
    settings: Settings,
    host: Host | None = None,
    gpus: GpuWatch | None = None,
    shared_parts: SharedParts | None = None,
) -> GatewayApp:
    """The gateway as an ASGI application with its data plane. Most parts are built when a server
    starts it.

    host, gpus: None takes those of the settings and of this machine.
    shared_parts: None serves clients from this process.
    """
    front = build_front(settings, gpus, shared_parts)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with _run_parts(app, front, host):
            yield

    api = FastAPI(
        title="fitserve",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url="/admin/openapi.json",
    )
    api.openapi = cache(partial(description.description, api))  # type: ignore[method-assign]
    # Loading it here reports an error before anything starts.
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    app = GatewayApp(api, front, _add_routes(api), certificate)
    return app


def _add_routes(api: FastAPI) -> Scopes:
    """Add all routes and error handlers; the scopes that the routes need."""
    for router in _ROUTERS:
        api.include_router(router)
    answer_errors(api)
    return Scopes([*api.routes, *(route for router in _ROUTERS for route in router.routes)])


@contextlib.asynccontextmanager
async def _run_parts(
    app: GatewayApp, front: ServingParts, host: Host | None = None
) -> AsyncIterator[None]:
    """Run the parts of a gateway. The routes reach them at `app.api.state.gateway`."""
    gateway = app.api.state.gateway = await build_parts(app, front, host)
    lifetime = Lifetime(gateway)
    await lifetime.start()
    try:
        yield
    finally:
        await lifetime.stop()


def build_front(
    settings: Settings, gpus: GpuWatch | None = None, shared_parts: SharedParts | None = None
) -> ServingParts:
    """The parts that need no event loop. `gpus`: None reads the GPUs of this machine;
    `shared_parts`: None serves clients from this process."""
    keys = Keys(
        settings.admin_key,
        settings.api_key,
        failed_logins=FailedLogins(
            memory=shared_parts.memory if shared_parts is not None else None
        ),
        origins=Origins(frozenset(settings.web_origins)),
        person_scopes=person_scopes(settings),
    )
    limits = _build_limits(settings)
    telemetry = _build_telemetry(settings, has_workers=shared_parts is not None)
    metrics = request_metrics(
        has_access_log=settings.access_log,
        trace_ratio=settings.request_trace_ratio if shared_parts is None else None,
        spans=telemetry.spans if telemetry is not None else None,
    )
    ledger = Ledger(settings.data)
    prices = read_prices(settings.prices)
    transcripts = _build_transcripts(settings)
    workers = None
    if shared_parts is not None:
        # A gateway of one process does without this module.
        from gateway.proxy.workers.supervisor import Workers

        workers = Workers(
            settings,
            limits,
            keys,
            shared_parts=shared_parts,
            usage=metrics.usage,
            prices=prices,
            on_spans=telemetry.spans.extend if telemetry is not None else None,
            transcripts=transcripts.setup if transcripts is not None else None,
        )
    routes = Routes(queue_per_model=settings.queue_per_model) if workers is None else workers.routes
    limiter = RateLimiter(BudgetAdmission(ledger, prices))
    plane = DataPlane(routes, keys, limits, metrics, limiter=limiter)
    if transcripts is not None and workers is None:
        transcripts.copy_requests(plane)
    return ServingParts(
        settings=settings,
        profiles=Profiles(settings.profiles_dir, data=settings.data),
        gpus=gpus or GpuWatch(allowed_devices=allowed_devices(settings.data, settings)),
        keys=keys,
        metrics=metrics,
        routes=routes,
        plane=plane,
        workers=workers,
        ledger=ledger,
        prices=prices,
        identities=build_identities(settings, keys),
        telemetry=telemetry,
        transcripts=transcripts,
    )


def _build_limits(settings: Settings) -> Limits:
    """The limits of clients. Raises SettingsError for a header that no address may send."""
    if settings.proxy_client_header and not settings.proxy_networks:
        raise SettingsError(
            "FITSERVE_PROXY_CLIENT_HEADER is set, and no address may send it.",
            hint="Set FITSERVE_PROXY_ADDRESSES to the addresses of the proxy.",
        )
    return Limits(
        body_bytes=settings.body_limit_bytes,
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address,
        keep_alive_s=settings.keep_alive_s,
        engine_idle_connections=settings.engine_idle_connections,
        engine_silence_s=settings.engine_silence_s,
        queue_timeout_s=settings.queue_timeout_s,
        waiting_comment_s=settings.waiting_comment_s,
        origins=settings.web_origins,
        media_hosts=settings.hosts_of_media,
        end_revoked=settings.end_revoked,
        file_bytes=settings.batch_file_bytes,
        proxy_networks=settings.proxy_networks,
        client_header=settings.proxy_client_header,
    )


def _build_telemetry(settings: Settings, *, has_workers: bool) -> Telemetry | None:
    """The export to a collector; None: none is configured. Raises SettingsError."""
    if not settings.otlp_endpoint:
        return None
    # Not without a collector.
    from gateway.server.telemetry.telemetry import build_telemetry

    return build_telemetry(settings, has_workers=has_workers)


def _build_transcripts(settings: Settings) -> Transcripts | None:
    """The recorder of requests; None: no key encrypts transcripts. Raises SettingsError."""
    if settings.transcript_key_file is None:
        if settings.transcribed_models:
            raise SettingsError(
                "FITSERVE_TRANSCRIPT_MODELS is set, and no key encrypts the transcripts.",
                hint="Set FITSERVE_TRANSCRIPT_KEY_FILE: docs/transcripts.md has the steps.",
            )
        return None
    # Not without transcripts.
    from gateway.server.transcripts.transcripts import build_transcripts

    return build_transcripts(settings)


async def build_parts(app: GatewayApp, front: ServingParts, host: Host | None = None) -> Gateway:
    """All parts, with their stored state loaded. `host`: None chooses one by the settings. Raises
    StoreError where the database cannot be opened."""
    settings, profiles = front.settings, front.profiles
    store = await asyncio.to_thread(open_store, database := settings.data / "fitserve.db")
    instance = installation_id(database, store)
    keyring = await _load_keyring(app, front, store)
    allowed_images = front.profiles.allowed_images(settings.allowed_images)
    host = host or await choose_host(settings, instance, allowed_images)
    hub = Hub(
        settings.hf_endpoint, settings.hf_token, settings.data / "hub", models=settings.models
    )
    config = _planning_start(front, host, hub, allowed_images)
    planning, searches = PlanProcess(config), SearchProcess(config)
    networks = _watch_networks(front, host, store)
    launcher = Launcher(settings, host, profiles.engine_in_image, partial(download, hub))
    requests_ended = partial(gauges.requests_ended, front.metrics, front.workers)
    loop = Loop(
        store=store,
        planner=_build_planner(front, host, planning, allowed_images, store, networks=networks),
        launcher=launcher,
        gpus=front.gpus,
        signatures=_signatures(front, host),
        routes=front.routes,
        ended_counts=requests_ended,
    )
    await asyncio.to_thread(loop.load)
    batches = Batches(app, front)
    await asyncio.to_thread(batches.store.load)
    app.on_keys = batches.review
    events, observer = await _start_events(front, store, keyring, loop)
    return Gateway(
        app=app,
        serving=front,
        store=store,
        keyring=keyring,
        usage=UsageKeeper(front.metrics.usage, store.usage),
        host=host,
        hub=hub,
        planning=planning,
        searches=searches,
        folders=FolderBrowser(settings.browsable_folders),
        calibrator=Calibrator(host, front.profiles, settings.data / "asking"),
        launcher=launcher,
        loop=loop,
        events=events,
        budgets=BudgetWatch(keyring, events),
        observer=observer,
        webhooks=tuple(webhooks(settings, events, store)),
        live=_build_live(front, loop, host, networks),
        networks=networks,
        engine_series=EngineSeries(loop.fleet.models, profiles.engine_in_image),
        tuning=_build_tuning(front, loop, launcher, store, requests_ended),
        starts=gauges.StartCounter(),
        in_flight=front.workers or front.plane,
        batches=batches,
        knowledge=_build_knowledge(front, planning, searches, loop, events),
        replays=Replays(app, front),
    )


def _build_knowledge(
    front: ServingParts,
    planning: PlanProcess,
    searches: SearchProcess,
    loop: Loop,
    events: EventLog,
) -> KnowledgeKeeper:
    """The knowledge bundles. A change of them reaches all readers of profiles, and plans that
    failed are made again."""

    def apply_profiles(event: Event) -> None:
        front.profiles.reload()
        config = planning.config._replace(roots=tuple(map(str, front.profiles.roots)))
        planning.config = searches.config = config
        loop.fleet.forget_failed_plans()
        loop.wake()
        events.append((event,))

    return KnowledgeKeeper(front.settings, apply_profiles)


def _build_tuning(
    front: ServingParts,
    loop: Loop,
    launcher: Launcher,
    store: Store,
    ended_counts: Callable[[], Mapping[str, float]],
) -> Tuning:
    """The parts that measure and tune models."""
    profile = front.profiles.engine_in_image
    traffic = ServedTraffic(loop.fleet.models, front.routes.is_working, ended_counts, profile)
    measurements = Measurements(loop.fleet, loop.plan_preview, store, traffic)
    tools = SearchTools(
        plan_preview=loop.plan_preview,
        trials=loop.trials,
        launcher=launcher,
        traffic=traffic,
        engine=profile,
        measurements=measurements,
    )
    tunings = Tunings(loop.fleet, loop.owner_commands, tools)
    settings = front.settings
    return Tuning(
        measurements,
        tunings,
        AutomaticTuning(loop.fleet, tunings, traffic, settings.auto_tune_quiet_s)
        if settings.auto_tune
        else None,
    )


async def _load_keyring(app: GatewayApp, front: ServingParts, store: Store) -> Keyring:
    """The stored keys. A change of them reaches the workers, the rate limits of this process, and
    its answers under way."""

    def stored_usage(first: int, last: int) -> Iterable[UsageRow]:
        return store.usage.sums(first, last, ("day", "key", "model"), key=None, model=None)

    def apply_sessions() -> None:
        front.plane.limiter.retain(front.keys.table.keys)
        if front.workers is not None:
            front.workers.publish_keys()
        app.answers.close_revoked_answers()

    def apply_keys() -> None:
        apply_sessions()
        app.on_keys()

    call = asyncio.get_running_loop().call_soon_threadsafe
    book = BudgetBook(front.ledger, front.prices, stored_usage, person_allowance(front.settings))
    keyring = Keyring(
        store,
        front.settings.data,
        front.keys,
        partial(call, apply_keys),
        book,
    )
    if front.identities is not None:
        front.identities.adopt_keyring(
            keyring.person_budgets, keyring.refresh_person, apply_sessions
        )
    await asyncio.to_thread(keyring.load)
    return keyring


def _planning_start(
    front: ServingParts, host: Host, hub: Hub, allowed_images: AllowedImages
) -> WorkerConfig:
    settings = front.settings
    return WorkerConfig(
        roots=tuple(map(str, front.profiles.roots)),
        data=str(settings.data),
        hf_endpoint=settings.hf_endpoint,
        hf_token=hub.token,
        installed_only=host.kind == "process",
        allowed_images=allowed_images.patterns if host.kind == "docker" else None,
        engine_env=tuple(settings.engine_env.items()),
        models=str(settings.models),
    )


def _signatures(front: ServingParts, host: Host) -> Callable[[], Signatures]:
    """A reader of known failures, whose cures name engine versions that run on this machine.

    In a cluster an engine may run on any machine, so no version is left out.
    """

    signatures_pair: list[tuple[Signatures, Signatures]] = []

    def read() -> Signatures:
        from gateway.planner.service.cure_versions import signatures_for

        profiles = front.profiles
        # A knowledge bundle changes them.
        if not signatures_pair or signatures_pair[0][0] is not profiles.signatures:
            machine_signatures = (
                signatures_for(front.gpus.hardware(front.settings.data), profiles)
                if host.machines is None
                else profiles.signatures
            )
            signatures_pair[:] = [(profiles.signatures, machine_signatures)]
        return signatures_pair[0][1]

    return read


def _watch_networks(front: ServingParts, host: Host, store: Store) -> NetworkWatch | None:
    """The watch of the networks between machines; None: there is one machine."""
    if host.machines is None:
        return None
    # Not for one machine.
    from gateway.server.network_watch import NetworkWatch

    in_flight = front.workers or front.plane

    async def is_busy() -> bool:
        requests = await in_flight.requests()
        return requests.more > 0 or any(request.replica for request in requests.data)

    return NetworkWatch(host.machines, store, is_busy)


def _build_planner(
    front: ServingParts,
    host: Host,
    planning: PlanProcess,
    allowed_images: AllowedImages,
    store: Store,
    networks: NetworkWatch | None,
) -> MachinePlanner:
    """The planner of this machine or cluster, with the engines that may start here."""
    data = front.settings.data
    inquirer = Inquirer(host, AnswerCache(data / "answers"))
    images = allowed_images if host.kind != "process" else None
    cluster = host.machines.cluster if host.machines is not None else None
    return MachinePlanner(
        data=data,
        process=planning,
        gpus=front.gpus,
        inquirer=inquirer,
        profiles=front.profiles,
        images=images,
        facts=store.fact_texts,
        cluster=cluster,
        key_classes=lambda: front.keys.priority_classes,
        settle=networks.settle if networks is not None else None,
    )


async def _start_events(
    front: ServingParts, store: Store, keyring: Keyring, loop: Loop
) -> tuple[EventLog, Observer]:
    events = EventLog(store)
    await events.start()
    observer = Observer(
        events, loop.fleet.models, front.gpus, lambda: keyring.stored_keys, front.settings
    )
    removed_events = await asyncio.to_thread(observer.load_position, store)
    loop.on_pass = observer.report_changes
    observer.start(removed_events)
    return events, observer


def _build_live(
    front: ServingParts, loop: Loop, host: Host, networks: NetworkWatch | None
) -> LiveStream:
    return LiveStream(
        loop=loop,
        samples=partial(gauges.request_samples, front.metrics, front.workers),
        in_flight=front.workers or front.plane,
        keys=front.keys,
        machine_facts={
            "version": __version__,
            "host": host.kind,
            "workers": front.settings.workers,
        },
        links=lambda: networks.links if networks is not None else (),
        recorded_models=front.transcripts.setup.models if front.transcripts is not None else None,
    )
