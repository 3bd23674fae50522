"""Where requests for a model go: an immutable table that is swapped whole, and how busy each replica is.

Only the event loop that serves requests touches `Routes`, so nothing here locks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gateway.errors import ModelNotFound, NotFound, NotReady

SHOWN_NAME = 200
MAKERS = 10_000


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


@dataclass(slots=True)
class Call:
    """What the choice of a replica may look at. `body` is the whole request in JSON, empty where it is a form or has none;
    `previous`: the id of a response that only the replica that made it knows."""

    endpoint: str
    model: str
    body: bytes | bytearray = b""
    streams: bool = False
    previous: str | None = None


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
        self._progress: dict[str, float] = {}
        self._last_pick: dict[str, int] = {}
        self._picks = 0
        self._makers: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._table = table or RouteTable({})

    @property
    def table(self) -> RouteTable:
        return self._table

    @table.setter
    def table(self, table: RouteTable) -> None:
        kept = {replica.id for route in table.models.values() for replica in route.replicas}
        self._last_pick = {id_: turn for id_, turn in self._last_pick.items() if id_ in kept}
        self._table = table

    def pick(self, route: ModelRoute, call: Call | None = None) -> Replica:
        """The replica with the least requests in flight; among equals the one picked longest ago. Raises NotReady.

        What goes on from a response goes to the replica that made it: no other one knows it.
        """
        if not route.replicas:
            raise route.not_ready()
        if call is not None and call.previous is not None and call.previous in self._makers:
            maker = self._makers[call.previous][1]
            for replica in route.replicas:
                if replica.id == maker:
                    return replica
        replica = min(route.replicas, key=lambda r: (self._in_flight.get(r.id, 0), self._last_pick.get(r.id, 0)))
        self._picks += 1
        self._last_pick[replica.id] = self._picks
        return replica

    def made(self, response: str, model: str, replica: Replica) -> None:
        """Remembers who made a response; the oldest ones are forgotten."""
        self._makers[response] = (model, replica.id)
        if len(self._makers) > MAKERS:
            self._makers.popitem(last=False)

    def model_of(self, response: str) -> str:
        """The model that made a response. Raises NotFound."""
        if response not in self._makers:
            raise NotFound(
                f"There is no response {response}.", hint="Responses are kept by the engine that made them, while it runs."
            )
        return self._makers[response][0]

    def begin(self, replica: Replica) -> None:
        """Counts a request to `replica`; every begin has its end, whatever happens between."""
        busy = self._in_flight.get(replica.id, 0)
        self._in_flight[replica.id] = busy + 1
        if not busy:
            self.progress(replica)

    def end(self, replica: Replica) -> None:
        left = self._in_flight[replica.id] - 1
        if left:
            self._in_flight[replica.id] = left
        else:
            del self._in_flight[replica.id]
            self._progress.pop(replica.id, None)

    def progress(self, replica: Replica) -> None:
        """The engine gave a client bytes of its answer."""
        self._progress[replica.id] = time.monotonic()

    def silent_s(self, replica_id: str) -> float | None:
        """Seconds since the replica gave any client a byte; None while nobody waits for one."""
        since = self._progress.get(replica_id)
        return None if since is None else time.monotonic() - since

    def in_flight(self, replica_id: str) -> int:
        return self._in_flight.get(replica_id, 0)

    @property
    def total_in_flight(self) -> int:
        return sum(self._in_flight.values())
