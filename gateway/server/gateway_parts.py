"""The parts of a running gateway, as the routes of the admin API reach them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from gateway.server.shared_answer import SharedAnswer

if TYPE_CHECKING:
    from gateway.controller.events.event_log import EventLog
    from gateway.controller.events.observer import Observer
    from gateway.controller.events.webhook import Webhook
    from gateway.controller.loop import Loop
    from gateway.controller.steps.launcher import Launcher
    from gateway.hosts.host import Host
    from gateway.machine.gpu_watch import GpuWatch
    from gateway.measuring.calibration.calibrator import Calibrator
    from gateway.measuring.tuning.tuning import Tuning
    from gateway.models.catalog.folder_browser import FolderBrowser
    from gateway.models.catalog.hub import Hub
    from gateway.planner.service.plan_process import PlanProcess
    from gateway.planner.service.search_process import SearchProcess
    from gateway.profiles.profiles import Profiles
    from gateway.proxy.access.auth import Keys
    from gateway.proxy.access.keyring import Keyring
    from gateway.proxy.access.ledger import Ledger
    from gateway.proxy.access.prices import Prices
    from gateway.proxy.data_plane import DataPlane
    from gateway.proxy.metrics.counters import Metrics
    from gateway.proxy.routing.in_flight import InFlightSource
    from gateway.proxy.routing.routes import Routes
    from gateway.proxy.workers.supervisor import Workers
    from gateway.server.batches.batches import Batches
    from gateway.server.budget_watch import BudgetWatch
    from gateway.server.gateway_app import GatewayApp
    from gateway.server.identity.identities import Identities
    from gateway.server.knowledge_keeper import KnowledgeKeeper
    from gateway.server.metrics.engine_series import EngineSeries
    from gateway.server.metrics.gauges import StartCounter
    from gateway.server.metrics.usage_keeper import UsageKeeper
    from gateway.server.network_watch import NetworkWatch
    from gateway.server.page.live_stream import LiveStream
    from gateway.server.telemetry.telemetry import Telemetry
    from gateway.server.transcripts.replays import Replays
    from gateway.server.transcripts.transcripts import Transcripts
    from gateway.settings import Settings
    from gateway.store.store import Store


@dataclass(frozen=True, slots=True)
class ServingParts:
    """The parts that exist before the event loop runs.

    workers: None in a gateway of one process.
    identities: None without a proxy or provider that names people.
    telemetry: None without a collector of OpenTelemetry.
    transcripts: None without a key file for them.
    """

    settings: Settings
    profiles: Profiles
    gpus: GpuWatch
    keys: Keys
    metrics: Metrics
    routes: Routes
    plane: DataPlane
    workers: Workers | None
    ledger: Ledger
    prices: Prices
    identities: Identities | None = None
    telemetry: Telemetry | None = None
    transcripts: Transcripts | None = None

    def routed_models(self) -> set[str]:
        """The names of models with a replica that takes requests."""
        return {name for name, route in self.routes.table.models.items() if route.replicas}


@dataclass(frozen=True, slots=True)
class Gateway:
    """All parts of a running gateway."""

    app: GatewayApp
    serving: ServingParts
    store: Store
    keyring: Keyring
    usage: UsageKeeper
    host: Host
    hub: Hub
    planning: PlanProcess
    searches: SearchProcess
    folders: FolderBrowser
    calibrator: Calibrator
    launcher: Launcher
    loop: Loop
    events: EventLog
    budgets: BudgetWatch
    observer: Observer
    webhooks: tuple[Webhook, ...]
    live: LiveStream
    networks: NetworkWatch | None
    engine_series: EngineSeries
    tuning: Tuning
    starts: StartCounter
    in_flight: InFlightSource
    batches: Batches
    knowledge: KnowledgeKeeper
    replays: Replays
    answers: dict[str, SharedAnswer] = field(default_factory=dict)

    async def shared_answer(self, name: str, render: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer of that name, which all requests of that time share."""
        if name not in self.answers:
            self.answers[name] = SharedAnswer(render)
        return await self.answers[name].body()


def gateway_of(request: Request) -> Gateway:
    """The gateway that answers `request`."""
    gateway: Gateway = request.app.state.gateway
    return gateway
