"""The route of a model: its replicas, its facts for clients, and why it cannot answer."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from gateway.errors import NotReady
from gateway.proxy.access.auth import Key
from gateway.secret import Secret, bearer_line

# Most characters of a model's state detail that a client sees.
_MAX_DETAIL_CHARACTERS = 300
# States that waiting does not end, and their remedies.
_REMEDIES = {
    "no_plan": "Change the model, its settings or the machine",
    "quarantined": "It failed too often; the operator can retry it with `fitserve retry {name}`",
    "stopped": "`fitserve start {name}` loads it again",
    "stopping": "`fitserve start {name}` loads a stopped model again",
}


@dataclass(frozen=True, slots=True)
class RoutedReplica:
    """An engine that answers for a model. `url` is its base without /v1, `served_name` its name for
    the model.

    capacity: most concurrent requests that it gets; None: unknown.
    key: its key for callers.
    adapters: names of adapters with the engine's names.
    seed: a number for the id.
    key_line: the key as a line of a request's head.
    is_remote: not started by this gateway, and perhaps another gateway.
    thoughts: the name of thoughts in its chat answers.
    priority_factor: the factor of a priority in the engine's own queue; 0: that queue ignores
        priorities.
    has_default_priority: a request without a priority is one of priority 0 there.
    gpus: number of its GPUs; 0: none, or not known.
    engine: its kind and version; "": not known.
    """

    url: str
    id: str
    served_name: str
    capacity: int | None = None
    key: Secret | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    is_remote: bool = False
    thoughts: str = "reasoning"
    priority_factor: int = 0
    has_default_priority: bool = False
    gpus: int = 0
    engine: str = ""
    seed: int = field(init=False, repr=False, compare=False)
    key_line: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", zlib.crc32(self.id.encode()))
        object.__setattr__(self, "key_line", bearer_line(self.key))

    def name_of(self, requested_name: str) -> str:
        """The engine's name for the model or adapter of this name."""
        return next(
            (name for adapter, name in self.adapters if adapter == requested_name), self.served_name
        )


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of a model in GET /v1/models other than its name and state. `tools` to `json_schema`:
    "proven", "not proven" or "unknown", as `gateway.domain.running.Abilities`.

    adapter: source of an adapter.
    inputs: kinds of content in a message; empty: unknown.
    family, quantization: "" if unknown; `parameters`, `weights_bytes` of one copy and
        `memory_bytes` of all: None if unknown.
    is_on_gpu: the memory is that of GPUs.
    keep_alive_s: time until it is unloaded without a request; below 0: for ever.
    """

    max_model_len: int | None = None
    inputs: tuple[str, ...] = ()
    tools: str = "unknown"
    required_tools: str = "unknown"
    reasoning: str = "unknown"
    json_schema: str = "unknown"
    adapter: str = ""
    family: str = ""
    parameters: int | None = None
    quantization: str = ""
    weights_bytes: int | None = None
    memory_bytes: int | None = None
    is_on_gpu: bool = False
    keep_alive_s: float = -1.0


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A model that clients may use. A model without replicas is not routed; `state` and `detail`
    say why.

    task: domain/value.py; None if unknown, as for an external engine.
    wait_s: how long a request may wait for the first replica; 0: not at all.
    frozen: ids of running replicas without a sign of life for seconds, whose clients are moved or
        refused.
    toolless: why requests with tools are refused; "": they are accepted.
    """

    name: str
    state: str
    detail: str
    created: int
    replicas: tuple[RoutedReplica, ...]
    task: str | None
    retry_after_s: int = 10
    wait_s: float = 0.0
    frozen: tuple[str, ...] = ()
    alias_of: str = ""
    card: ModelCard = ModelCard()
    toolless: str = ""

    def is_visible_to(self, key: Key) -> bool:
        """Whether `key` may use the model. A key for a model is valid for all its names."""
        return key.may_use(self.alias_of or self.name)

    def not_ready_error(self) -> NotReady:
        first, *other_lines = self.detail.splitlines() or [""]
        says_more = first and first.rstrip(".") != self.state
        reason = (
            f"{self.state}: {first[:_MAX_DETAIL_CHARACTERS].rstrip()}" if says_more else self.state
        )
        reason = (
            f"{reason} ..."
            if other_lines or len(first) > _MAX_DETAIL_CHARACTERS
            else reason.rstrip(".") + "."
        )
        # While requests wait, another model may be evicted for this one.
        remedy = None if self.wait_s else _REMEDIES.get(self.state)
        advice = remedy.format(name=self.name) if remedy else f"Try again in {self.retry_after_s} s"
        return NotReady(
            f"The model '{self.name}' cannot answer now, it is {reason}",
            hint=f"{advice}; `fitserve show {self.name}` has details.",
            param="model",
            retry_after_s=None if remedy else self.retry_after_s,
        )
