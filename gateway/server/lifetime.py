"""Start and end of a gateway's parts, in the order that they need one another."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from gateway.errors import FitserveError
from gateway.logging import Logger
from gateway.server import systemd
from gateway.server.gateway_parts import Gateway
from gateway.server.handover import Handover, HandoverOffer
from gateway.server.idle_memory import trim_memory
from gateway.server.lock_watch import LockWatch
from gateway.server.metrics.gauges import all_samples
from gateway.server.models_file_watch import ModelsFileWatch

log = Logger("fitserve")

# Between two checks of whether the server takes connections.
_CHECK_S = 0.02


class Lifetime:
    """The background work of one gateway, from start to end."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._app = gateway.app
        self._front = gateway.serving
        self._loop: asyncio.Task[None] | None = None
        self._models_file: ModelsFileWatch | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._handover: Handover | None = None
        self._lock_watch: LockWatch | None = None

    async def start(self) -> None:
        """Start the control loop, then the workers. After a handover, models have routes first."""
        app = self._app
        front = self._front
        loop = self._gateway.loop
        batches = self._gateway.batches
        app.on_stop = (self._gateway.observer.stop, self._gateway.live.stop, batches.stop)
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, loop.wake)
        front.gpus.start(front.profiles.xids, wake)
        if self._gateway.networks is not None:
            self._gateway.networks.on_change = loop.fleet.schedule_replanning
        self._gateway.live.start()
        self._loop = asyncio.create_task(loop.run())
        self._loop.add_done_callback(app.handle_loop_end)
        settings = front.settings
        if settings.models_file:
            path = settings.models_file.expanduser()
            self._models_file = ModelsFileWatch(path, settings.data, app.api)
        if app.takeover is not None:
            await app.takeover.wait_for_routes(front.routed_models)
        if app.certificate is not None and front.workers is not None:
            front.workers.publish_certificate(app.certificate.pair)
            app.certificate.watch(front.workers.publish_certificate)
        elif app.certificate is not None:
            app.certificate.watch()
        if front.workers is not None:
            front.workers.start()
        if front.transcripts is not None:
            front.transcripts.keeper.start(self._gateway.events)
        if front.telemetry is not None:
            front.telemetry.start(partial(all_samples, self._gateway))
        batches.start()
        self._announcing = asyncio.create_task(self._announce())
        if app.lock is not None and app.drain is not None:
            offer = HandoverOffer(app.lock, app.client_sockets, self._release, app.drain, app.fail)
            self._handover = Handover(settings.data, offer)
        if app.lock is not None:
            self._lock_watch = LockWatch(settings.data, app.lock, self._lose)

    async def stop(self) -> None:
        """End the service of clients, then the control loop."""
        app = self._app
        workers = self._front.workers
        if self._announcing is not None:
            self._announcing.cancel()
        if app.certificate is not None:
            await app.certificate.close()
        for owner in (self._handover, self._lock_watch):
            if owner is not None:
                await owner.close()
        if workers is not None:
            await workers.close()
        self._front.plane.close()
        if self._front.transcripts is not None:
            await self._front.transcripts.close()
        if self._front.telemetry is not None:
            await self._front.telemetry.close()
        if not app.is_replaced:
            systemd.notify("STOPPING=1")
            await self._stop_loop()

    async def _announce(self) -> None:
        """Tell the previous gateway and the service manager, once clients are answered."""
        app = self._app
        workers = self._front.workers
        while not app.has_started():  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_S)
        while workers is not None and workers.answering < workers.count:  # noqa: ASYNC110
            await asyncio.sleep(_CHECK_S)
        if app.takeover is not None:
            app.takeover.confirm()
        trim_memory()
        systemd.notify(f"MAINPID={os.getpid()}", "READY=1")

    async def _release(self) -> list[str]:
        """End the control loop for another gateway; the names of the models that have routes."""
        app = self._app
        workers = self._front.workers
        app.is_replaced = True
        if workers is not None:
            workers.was_handed_over = True
        app.close_streams()
        app.on_stop = ()
        await self._stop_loop()
        return sorted(self._front.routed_models())

    async def _lose(self) -> None:
        """End the control loop and the gateway, because another process owns the data folder."""
        app = self._app
        if not app.is_replaced:
            app.is_replaced = True
            await self._stop_loop()
            app.fail("another gateway owns the data folder")

    async def _stop_loop(self) -> None:
        """End all that changes engines or the database."""
        gateway = self._gateway
        if self._front.telemetry is not None:
            await self._front.telemetry.close_metrics()
        await gateway.batches.close()
        gateway.replays.close()
        if self._models_file is not None:
            await self._models_file.close()
        await asyncio.to_thread(self._front.gpus.close)
        await gateway.tuning.close()
        await gateway.engine_series.close()
        if self._loop is not None:
            self._loop.remove_done_callback(self._app.handle_loop_end)
            self._loop.cancel()
            await asyncio.wait({self._loop})
        await gateway.loop.close()
        await gateway.observer.close()
        await gateway.budgets.close()
        if gateway.networks is not None:
            await gateway.networks.close()
        await gateway.events.close()
        for webhook in gateway.webhooks:
            await webhook.close()
        if not self._app.is_replaced:
            await self._stop_engines()
        await gateway.planning.close()
        await gateway.searches.close()
        await gateway.host.close()
        gateway.keyring.close()
        self._front.ledger.close()
        await gateway.usage.close()
        gateway.store.close()

    async def _stop_engines(self) -> None:
        """End the engines where the settings say so. Otherwise the log has the command for it."""
        loop = self._gateway.loop
        host = self._gateway.host
        try:
            if self._front.settings.stop_engines:
                await loop.stop_engines()
                return
            engines = await loop.running_instances()
            command = await host.stop_command(engines)
        except FitserveError as error:
            log.warning("the running engines could not be listed", reason=str(error))
            return
        if engines:
            log.warning(
                f"the gateway has ended; engines that keep running: {len(engines)}; the next"
                " gateway adopts them" + (f"; to end them: {' '.join(command)}" if command else "")
            )
