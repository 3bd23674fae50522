"""State that all client connections share: routes, keys, limits, connections to engines, one
timer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import uvicorn

from gateway.proxy import refusals
from gateway.proxy.access.auth import ANONYMOUS_KEY, Keys
from gateway.proxy.access.media_hosts import MediaHosts
from gateway.proxy.access.origins import Origins
from gateway.proxy.access.rate_limits import RateLimiter
from gateway.proxy.access.trusted_proxies import TrustedProxies
from gateway.proxy.bodies.body_budget import BodyBudget
from gateway.proxy.limits import DRAIN_TIMEOUT_S, SWEEP_S, ConnectionLimiter, Limits
from gateway.proxy.meter import Meter
from gateway.proxy.routing.in_flight import RequestsInFlight, oldest
from gateway.proxy.routing.models_list import ModelsList
from gateway.proxy.routing.routes import Routes
from gateway.proxy.upstream_pool import UpstreamPool

if TYPE_CHECKING:
    from gateway.proxy.client_connection import ClientConnection

log = logging.getLogger(__name__)

# A step of the system clock above this is followed. A smaller step would shift every request in
# each listing.
_STEP_S = 1.0


class DataPlane:
    """The data plane of one event loop."""

    def __init__(
        self,
        routes: Routes,
        keys: Keys,
        limits: Limits,
        meter: Meter | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        """limiter: the limits of keys; None where no key has a budget."""
        self.routes = routes
        self.models_list = ModelsList(routes)
        self.keys = keys
        self.limits = limits
        self.proxies = TrustedProxies.parse(limits.proxy_networks, limits.client_header)
        self.origins = Origins(frozenset(limits.origins)) if limits.origins else None
        self.media_hosts = MediaHosts(limits.media_hosts)
        self.limiter = limiter or RateLimiter()
        self.meter = meter or Meter()
        self.connection_limiter = ConnectionLimiter(limits)
        self.body_budget = BodyBudget(limits.body_bytes, limits.queue_timeout_s)
        self.connections: set[ClientConnection] = set()
        # each request is the last one of its connection, because another gateway takes new
        # connections
        self.is_draining = False
        self.keep_alive_s = limits.keep_alive_s  # how long an idle connection is kept
        # Set with the first connection.
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]
        self._pools: dict[str, UpstreamPool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._dated_headers: list[tuple[bytes, bytes]] = []
        self._date = b""
        self._checked = keys.table  # the keys whose requests were looked at last
        self._clock_lead = 0.0  # seconds by which Unix time is ahead of the loop's clock

    def add_connection(self, connection: ClientConnection, loop: asyncio.AbstractEventLoop) -> None:
        self.connections.add(connection)
        if self._timer is None:
            self.loop = loop
            self._timer = loop.call_later(SWEEP_S, self._sweep)

    async def drain(self, server: uvicorn.Server, within_s: float) -> None:
        """Stop accepting, finish the present requests, and end the server once all connections
        are closed, or after `within_s`."""
        for listener in server.servers:
            listener.close()
        self.is_draining, self.keep_alive_s = True, min(self.keep_alive_s, DRAIN_TIMEOUT_S)
        for connection in list(self.connections):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.connections or self.connection_limiter.admitted_count:  # noqa: ASYNC110
                    await asyncio.sleep(SWEEP_S)
        server.should_exit = True

    def pool(self, url: str) -> UpstreamPool:
        """The connections to the engine at `url`."""
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = UpstreamPool(
                url, self.loop, self.limits.engine_idle_connections
            )
        return pool

    def date(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The server's own headers (`date`), which change once a second, as bytes."""
        if self._dated_headers is not headers:
            self._dated_headers = headers
            self._date = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        return self._date

    async def requests(self) -> RequestsInFlight:
        """The inference requests in flight."""
        exchanges = [
            exchange
            for connection in self.connections
            if (exchange := connection.exchange) is not None
        ]
        if (
            exchanges
            and abs((clock_lead := time.time() - self.loop.time()) - self._clock_lead) > _STEP_S
        ):
            self._clock_lead = clock_lead
        return oldest(exchanges, self.routes.table, self._clock_lead)

    async def cancel(self, id_: str) -> int:
        exchanges = [
            exchange
            for connection in self.connections
            if (exchange := connection.exchange) is not None and exchange.id == id_
        ]
        for exchange in exchanges:
            exchange.cancel()
        return len(exchanges)

    def _cancel_revoked_requests(self) -> None:
        """End the requests whose keys may no longer send them."""
        self._checked = table = self.keys.table
        for exchange in [connection.exchange for connection in self.connections]:
            if exchange is None or exchange.key is ANONYMOUS_KEY:
                continue
            key = table.keys.get(exchange.key.digest)
            if (
                key is None
                or key.has_ended()
                or "inference" not in key.scopes
                or (exchange.model and not key.may_use(exchange.model))
            ):
                exchange.fail(refusals.revocation_error())

    def close(self) -> None:
        """End all requests and connections to engines."""
        for connection in list(self.connections):
            connection.stop()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in list(self.connections):
            try:
                connection.sweep(now)
            except Exception:
                # An error in one connection leaves the limits of the others in force.
                log.exception("internal error in the data plane")
        if self.limits.end_revoked and self.keys.table is not self._checked:
            self._cancel_revoked_requests()
        self.body_budget.sweep(now)
        self.routes.sweep()
        for url, pool in list(self._pools.items()):
            if not pool.sweep(now):
                del self._pools[url]
        is_active = bool(self.connections or self._pools)
        self._timer = self.loop.call_later(SWEEP_S, self._sweep) if is_active else None
