"""What all connections of the data plane share: routes, keys, limits, the connections to engines, and one clock for time-outs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from gateway.access.auth import Key
from gateway.access.rate_limits import Limiter
from gateway.domain.key import Scope
from gateway.routing.routes import Routes
from gateway.serve.proxy.limits import SWEEP_S, Doorman, Limits, Room
from gateway.serve.proxy.meter import Meter
from gateway.serve.proxy.upstream_pool import Pool


class Admits(Protocol):
    """Who may call: `gateway.access.auth.Keys`. `table`: another value once the keys have changed."""

    @property
    def table(self) -> object: ...

    def who(self, found: Mapping[bytes, bytes], need: Scope, address: str) -> Key: ...


class Watched(Protocol):
    """A connection that is looked at twice a second, and ended when the gateway stops."""

    def sweep(self, now: float) -> None: ...

    def stop(self) -> None: ...


class Plane:
    """One per event loop."""

    def __init__(self, routes: Routes, keys: Admits, limits: Limits, meter: Meter | None = None) -> None:
        self.routes = routes
        self.keys = keys
        self.limits = limits
        self.limiter = Limiter()
        self.meter = meter or Meter()
        self.doorman = Doorman(limits)
        self.room = Room(2 * limits.body_bytes)
        self.fronts: set[Watched] = set()
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # known with the first connection
        self._pools: dict[str, Pool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._dated: list[tuple[bytes, bytes]] = []
        self._date = b""

    def opened(self, front: Watched, loop: asyncio.AbstractEventLoop) -> None:
        self.fronts.add(front)
        if self._timer is None:
            self.loop = loop
            self._timer = loop.call_later(SWEEP_S, self._sweep)

    def pool(self, url: str) -> Pool:
        """The connections to the engine at `url`."""
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = Pool(url, self.loop)
        return pool

    def date(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The server's own headers (`date`), which change once a second, as bytes."""
        if self._dated is not headers:
            self._dated, self._date = headers, b"".join(b"%b: %b\r\n" % pair for pair in headers)
        return self._date

    def close(self) -> None:
        """Ends what is still being answered, and lets go of the engines."""
        for front in list(self.fronts):
            front.stop()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        now = self.loop.time()
        for front in list(self.fronts):
            front.sweep(now)
        for url, pool in list(self._pools.items()):
            if not pool.sweep(now):
                del self._pools[url]
        again = bool(self.fronts or self._pools)
        self._timer = self.loop.call_later(SWEEP_S, self._sweep) if again else None
