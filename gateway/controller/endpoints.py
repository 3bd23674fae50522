"""The watchers of endpoints elsewhere: one for each endpoint of a wish."""

from __future__ import annotations

from collections.abc import Callable

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.watch.endpoint_watcher import EndpointKey, EndpointWatcher
from gateway.controller.watch.engine_client import EngineClient
from gateway.proxy.access.endpoint_keys import EndpointKeys

# Up to this number, endpoints are checked at the configured interval. With more, each is checked
# less often, so that the total cost stays.
_ENDPOINTS_MAX = 300


class Endpoints:
    def __init__(
        self,
        fleet: Fleet,
        client: EngineClient,
        keys: EndpointKeys,
        interval_s: float,
        wake: Callable[[], None],
    ) -> None:
        """`client` serves only endpoints: unreachable ones never delay calls to engines here.

        `interval_s` is the time between two checks of one endpoint.
        """
        self._fleet = fleet
        self._client = client
        self._keys = keys
        self._interval_s = interval_s
        self._wake = wake

    async def update_watchers(self, model: ManagedModel) -> None:
        """Start and close watchers, so that each endpoint of the wish has one."""
        key = EndpointKey(self._keys, model.wish.endpoint_key)
        if model.is_deleting or [
            (watcher.endpoint, watcher.key) for watcher in model.endpoints
        ] == [(url, key) for url in model.wish.endpoints]:
            return
        former_watchers = {watcher.endpoint: watcher for watcher in model.endpoints}
        key_of_watch = (self._client, self._interval_s, self._stretch, self._wake, key)
        model.endpoints = []
        for endpoint in model.wish.endpoints:
            former_watcher = former_watchers.get(endpoint)
            if former_watcher is not None and former_watcher.key == key:
                model.endpoints.append(former_watchers.pop(endpoint))
                continue
            model.endpoints.append(EndpointWatcher(model.wish.name, endpoint, *key_of_watch))
            # Requests go on until the endpoint was checked with the new key.
            if former_watcher is not None:
                model.endpoints[-1].replica = former_watcher.replica
                model.endpoints[-1].state = former_watcher.state
        for watcher in former_watchers.values():
            await watcher.close()

    def _stretch(self) -> float:
        return max(
            1.0, sum(len(model.endpoints) for model in self._fleet.models.values()) / _ENDPOINTS_MAX
        )
