"""Where requests for a model go: an immutable table that is swapped whole, and how busy each replica is.

Only the event loop that serves requests touches `Routes`, so nothing here locks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gateway.errors import ModelNotFound, NotReady

SHOWN_NAME = 200


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine that answers for a model. `url` is its base without /v1, `served_name` what it calls the model."""

    url: str
    id: str
    served_name: str


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A model that clients may ask for. It is routed while it has replicas; until then `state` and `detail` say why not.

    `task` is "generate" or "embed"; None when nobody knows, as for an engine that we did not start.
    """

    name: str
    state: str
    detail: str
    created: int
    replicas: tuple[Replica, ...]
    task: str | None
    retry_after_s: int = 10

    def not_ready(self) -> NotReady:
        reason = f"{self.state}: {self.detail}" if self.detail else self.state
        return NotReady(
            f"The model '{self.name}' cannot answer now, it is {reason.rstrip('.')}.",
            hint=f"Try again in {self.retry_after_s} s; `fitserve show {self.name}` tells more.",
            param="model",
            retry_after_s=self.retry_after_s,
        )


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Every known model by name, routed or not."""

    models: Mapping[str, ModelRoute]

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))

    def find(self, name: str) -> ModelRoute:
        """The route of `name`. Raises ModelNotFound."""
        route = self.models.get(name)
        if route is None:
            shown = name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "..."
            raise ModelNotFound(
                f"The model '{shown}' does not exist here.",
                hint="GET /v1/models lists the models that are served.",
                param="model",
            )
        return route

    def routed(self) -> list[ModelRoute]:
        return [route for route in self.models.values() if route.replicas]


class Routes:
    """The table in force, and the requests in flight per replica id (they outlive the table they were picked from)."""

    def __init__(self, table: RouteTable | None = None) -> None:
        self._in_flight: dict[str, int] = {}
        self._last_pick: dict[str, int] = {}
        self._picks = 0
        self._table = table or RouteTable({})

    @property
    def table(self) -> RouteTable:
        return self._table

    @table.setter
    def table(self, table: RouteTable) -> None:
        kept = {replica.id for route in table.models.values() for replica in route.replicas}
        self._last_pick = {id_: turn for id_, turn in self._last_pick.items() if id_ in kept}
        self._table = table

    def pick(self, route: ModelRoute) -> Replica:
        """The replica with the least requests in flight; among equals the one picked longest ago. Raises NotReady."""
        if not route.replicas:
            raise route.not_ready()
        replica = min(route.replicas, key=lambda r: (self._in_flight.get(r.id, 0), self._last_pick.get(r.id, 0)))
        self._picks += 1
        self._last_pick[replica.id] = self._picks
        return replica

    def begin(self, replica: Replica) -> None:
        """Counts a request to `replica`; every begin has its end, whatever happens between."""
        self._in_flight[replica.id] = self._in_flight.get(replica.id, 0) + 1

    def end(self, replica: Replica) -> None:
        left = self._in_flight[replica.id] - 1
        if left:
            self._in_flight[replica.id] = left
        else:
            del self._in_flight[replica.id]

    def in_flight(self, replica_id: str) -> int:
        return self._in_flight.get(replica_id, 0)

    @property
    def total_in_flight(self) -> int:
        return sum(self._in_flight.values())
