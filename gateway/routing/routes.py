"""Where requests for a model go: an immutable table that is swapped whole, how busy each replica is, and who waits for one.

Only the event loop that serves requests touches `Routes`, so nothing here locks.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from gateway.access.auth import ANYONE, Key
from gateway.errors import FitserveError, ModelNotFound, NotReady
from gateway.routing import balance
from gateway.routing.queue import Queue, Waiter, overloaded, places
from gateway.routing.responses import Responses, no_response

SHOWN_NAME = 200
# They take no place in an engine's batch, so they never wait for one.
_LIGHT = frozenset({"tokenize", "detokenize", "count_tokens"})


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine that answers for a model. `url` is its base without /v1, `served_name` what it calls the model.

    `capacity`: how many requests it gets at once; None where that is not known. `seed`: a number for the id.
    """

    url: str
    id: str
    served_name: str
    capacity: int | None = None
    seed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", zlib.crc32(self.id.encode()))


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A model that clients may ask for. It is routed while it has replicas; until then `state` and `detail` say why not.

    `task` is "generate" or "embed"; None when nobody knows, as for an engine that we did not start. `wait_s`: how long a request may
    wait for the first replica; 0 where that is not wanted, or where none can be expected.
    """

    name: str
    state: str
    detail: str
    created: int
    replicas: tuple[Replica, ...]
    task: str | None
    retry_after_s: int = 10
    wait_s: float = 0.0

    def not_ready(self) -> NotReady:
        reason = f"{self.state}: {self.detail}" if self.detail else self.state
        return NotReady(
            f"The model '{self.name}' cannot answer now, it is {reason.rstrip('.')}.",
            hint=f"Try again in {self.retry_after_s} s; `fitserve show {self.name}` tells more.",
            param="model",
            retry_after_s=self.retry_after_s,
        )


class Call(msgspec.Struct):
    """What the choice of a replica looks at. `body` is the whole request in JSON, empty where it is a form or has none; `maker`: the
    seed of the replica that made the response from which this goes on; `tokens` and `prefix`: see `gateway.routing.balance`."""

    endpoint: str
    model: str
    body: bytes | bytearray = b""
    streams: bool = False
    maker: int | None = None
    tokens: int = 1
    prefix: int | None = None

    @property
    def light(self) -> bool:
        """It costs the engine next to nothing: a count of tokens, or a look at a response."""
        return self.endpoint in _LIGHT or (self.maker is not None and not self.body)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Every known model by name, routed or not."""

    models: Mapping[str, ModelRoute]

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))

    def find(self, name: str, key: Key = ANYONE) -> ModelRoute:
        """The route of `name`, for who has `key`. Raises ModelNotFound, also where that one may not know of it."""
        route = self.models.get(name)
        if route is None or not key.sees(name):
            shown = name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "..."
            raise ModelNotFound(
                f"The model '{shown}' does not exist here.",
                hint="GET /v1/models lists the models that are served.",
                param="model",
            )
        return route

    def routed(self, key: Key = ANYONE) -> list[ModelRoute]:
        return [route for route in self.models.values() if route.replicas and key.sees(route.name)]


@dataclass(slots=True)
class _Load:
    """What one replica has to do. `heard`: when it last gave a client a byte, or began to work."""

    requests: int
    tokens: int
    heard: float


class Routes:
    """The table in force; the requests in flight per replica id, which outlive the table they were picked from; and the queues.

    `queue_per_model`: how many requests may wait; 0: none; None: see `gateway.routing.queue.places`.
    """

    def __init__(
        self, table: RouteTable | None = None, queue_per_model: int | None = None, responses: Responses | None = None
    ) -> None:
        self._loads: dict[str, _Load] = {}
        self._last_pick: dict[str, int] = {}
        self._picks = 0
        self.responses = responses or Responses()
        self._queues: dict[str, Queue] = {}
        self._queue_per_model = queue_per_model
        self._called = False
        self._table = table or RouteTable({})

    @property
    def table(self) -> RouteTable:
        return self._table

    @table.setter
    def table(self, table: RouteTable) -> None:
        kept = {replica.id for route in table.models.values() for replica in route.replicas}
        self._last_pick = {id_: turn for id_, turn in self._last_pick.items() if id_ in kept}
        for queue in self._queues.values():
            for waiter in queue.waiting:
                waiter.avoid = waiter.avoid if waiter.avoid in kept else None
        self._table = table
        self._call()

    # --- choosing ---

    def pick(self, route: ModelRoute, call: Call, avoid: str | None = None) -> Replica | None:
        """The replica for a call, `avoid` excepted; None: it has to `wait`. Raises NotReady, Overloaded.

        What goes on from a response goes to the replica that made it: no other one knows it.
        """
        if len(route.replicas) == 1 and avoid is None and not self._queues and self._has_room(route.replicas[0]):
            return route.replicas[0]
        queue = self._queues.get(call.model)
        replica = self._choose(route, call, avoid) if queue is None or call.light else None
        if replica is None:
            ready = any(replica.id != avoid for replica in route.replicas)
            if not ready and not route.wait_s:
                raise route.not_ready()
            if (len(queue.waiting) if queue is not None else 0) >= self._places(route):
                raise self.refusal(route, "as many requests wait for them as may") if ready else route.not_ready()
        return replica

    def _places(self, route: ModelRoute) -> int:
        """How many may wait for a model."""
        return places(route, self._queue_per_model)

    def _choose(self, route: ModelRoute, call: Call, avoid: str | None) -> Replica | None:
        """The replica that can take the call now."""
        maker = self._maker(route, call)
        if maker is not None and maker.id != avoid:
            return maker if call.light or self._has_room(maker) else None
        free = [one for one in route.replicas if (self._has_room(one) or call.light) and one.id != avoid]
        if len(free) < 2:
            return free[0] if free else None
        loads = [load.tokens if (load := self._loads.get(one.id)) is not None else 0 for one in free]
        if call.prefix is not None:
            chosen = free[balance.affine(loads, [one.seed for one in free], call.tokens, call.prefix)]
        else:
            chosen = free[balance.least(loads, [self._last_pick.get(one.id, 0) for one in free])]
        self._picks += 1
        self._last_pick[chosen.id] = self._picks
        return chosen

    def _has_room(self, replica: Replica) -> bool:
        return replica.capacity is None or self.in_flight(replica.id) < replica.capacity

    def _maker(self, route: ModelRoute, call: Call) -> Replica | None:
        """The replica that made the response from which the call goes on."""
        if call.maker is None:
            return None
        return next((replica for replica in route.replicas if replica.seed == call.maker), None)

    # --- waiting ---

    def wait(self, waiter: Waiter) -> None:
        """For who got no replica from `pick`: `waiter.go` is called with one when it can."""
        queue = self._queues.setdefault(waiter.call.model, Queue())
        queue.waiting[waiter] = None
        if len(queue.waiting) > 1:
            self._call()  # those before it may wait for one replica only, while another has room

    def forget(self, waiter: Waiter) -> None:
        """It does not wait any more."""
        queue = self._queues.get(waiter.call.model)
        if queue is not None:
            queue.waiting.pop(waiter, None)
            if not queue.waiting:
                del self._queues[waiter.call.model]

    def waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return len(queue.waiting) if queue is not None else 0

    def refusal(self, route: ModelRoute, why: str) -> FitserveError:
        """For a request that every replica is too busy for."""
        queue = self._queues.get(route.name)
        return overloaded(route, queue.retry_after_s() if queue is not None else 1, why)

    def _call(self) -> None:
        """Something has changed: those who wait are called, but not from within what changed it."""
        if self._queues and not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._call_queues)

    def _call_queues(self) -> None:
        self._called = False
        for name, queue in list(self._queues.items()):
            for waiter in list(queue.waiting):
                try:
                    route = self._table.find(name)
                    if not route.replicas and not route.wait_s:
                        raise route.not_ready()
                except FitserveError as error:
                    self.forget(waiter)
                    waiter.give_up(error)
                    continue
                replica = self._choose(route, waiter.call, waiter.avoid)
                if replica is not None:
                    queue.pace.went()
                    self.forget(waiter)
                    waiter.go(replica)
                elif waiter.avoid is None and self._maker(route, waiter.call) is None:
                    break

    def model_of(self, response: str, maker: int) -> str:
        """The model of the replica that made the response. Raises NotFound where it is gone."""
        for route in self._table.models.values():
            if any(replica.seed == maker for replica in route.replicas):
                return route.name
        raise no_response(response)

    # --- in flight ---

    def begin(self, replica: Replica, tokens: int = 1) -> None:
        """Counts a request to `replica`; every begin has its end, whatever happens between."""
        load = self._loads.get(replica.id)
        if load is None:
            self._loads[replica.id] = _Load(1, tokens, time.monotonic())
        else:
            load.requests += 1
            load.tokens += tokens

    def end(self, replica: Replica, tokens: int = 1) -> None:
        load = self._loads[replica.id]
        if load.requests == 1:
            del self._loads[replica.id]
        else:
            load.requests -= 1
            load.tokens -= tokens
        if self._queues:
            self._call()

    def progress(self, replica: Replica) -> None:
        """The engine gave a client bytes of its answer."""
        load = self._loads.get(replica.id)
        if load is not None:
            load.heard = time.monotonic()

    def silent_s(self, replica_id: str) -> float | None:
        """Seconds since the replica gave any client a byte; None while nobody waits for one."""
        load = self._loads.get(replica_id)
        return time.monotonic() - load.heard if load is not None else None

    def in_flight(self, replica_id: str) -> int:
        load = self._loads.get(replica_id)
        return load.requests if load is not None else 0

    @property
    def total_in_flight(self) -> int:
        return sum(load.requests for load in self._loads.values())
