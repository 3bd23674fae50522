"""The immutable table of models and their replicas, and the call that is routed by it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.errors import ModelNotFound, NotReady, near_name
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key
from gateway.secret import Secret, bearer_line

SHOWN_NAME = 200
# Names that an unknown one is compared with, and their length. The data plane waits meanwhile: for
# a millisecond at most, if all are long and alike.
_MAX_COMPARED_NAMES, _MAX_COMPARED_CHARACTERS = 8, 64
# Calls of these endpoints take no place in an engine's batch, so they never wait.
_LIGHT_ENDPOINTS = frozenset({"tokenize", "detokenize", "count_tokens"})

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

    capacity: how many requests it gets at once; None if unknown.
    key: its key for callers.
    adapters: names of adapters with the engine's names.
    seed: a number for the id.
    key_line: the key as a line of a request's head.
    is_remote: not started by this gateway, and perhaps another gateway.
    thoughts: the name of thoughts in its chat answers.
    """

    url: str
    id: str
    served_name: str
    capacity: int | None = None
    key: Secret | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    is_remote: bool = False
    thoughts: str = "reasoning"
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
    """Facts of a model in GET /v1/models beside its name and state. `tools` to `json_schema`:
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


class Call(msgspec.Struct):
    """The part of a request that the choice of a replica needs.

    body: the whole request in JSON, empty for a form or no body.
    maker: the seed of the replica that made the response to continue.
    tokens, prefix: see `gateway.proxy.routing.balance`.
    requested_name: the alias in the body.
    stores: the response may be continued and retrieved (/v1/responses).
    """

    endpoint: str
    model: str
    body: bytes | bytearray = b""
    streams: bool = False
    maker: int | None = None
    tokens: int = 1
    prefix: int | None = None
    requested_name: str = ""
    stores: bool = False

    @property
    def is_light(self) -> bool:
        """Whether the call costs the engine nearly nothing: a token count, or the retrieval of a
        response."""
        return self.endpoint in _LIGHT_ENDPOINTS or (self.maker is not None and not self.body)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Every known model by name, routed or not. `frozen`: ids of the frozen replicas of all
    models."""

    models: Mapping[str, ModelRoute]
    frozen: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))
        object.__setattr__(
            self, "frozen", frozenset(id_ for route in self.models.values() for id_ in route.frozen)
        )

    def find(self, name: str, key: Key = ANONYMOUS_KEY) -> ModelRoute:
        """The route of the model `name`. Raises ModelNotFound, also where `key` may not use the
        model."""
        route = self.models.get(name)
        if route is None or not key.may_use(route.alias_of or name):
            displayed = name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "..."
            is_short = len(name) <= _MAX_COMPARED_CHARACTERS
            usable_names = [
                model.name
                for model in self.models.values()
                if len(model.name) <= _MAX_COMPARED_CHARACTERS and model.is_visible_to(key)
            ]
            suggestion = near_name(name, usable_names[:_MAX_COMPARED_NAMES]) if is_short else ""
            raise ModelNotFound(
                f"The model '{displayed}' does not exist here.",
                hint=(f"Did you mean '{suggestion}'? " if suggestion else "")
                + "GET /v1/models lists the served models.",
                param="model",
            )
        return route


def models_answer(table: RouteTable, name: str, key: Key) -> dict[str, Any]:
    """The answer to GET /v1/models: all models that `key` may use, in any state, or the model of
    that name. Fields of OpenAI and Anthropic stand side by side, for SDKs of both. Raises
    ModelNotFound."""
    if name:
        return _model(table.find(name, key))
    data = [_model(route) for route in table.models.values() if route.is_visible_to(key)]
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": data, "has_more": False, **ends}


def _model(route: ModelRoute) -> dict[str, Any]:
    card = route.card
    return {
        "id": route.name,
        "object": "model",
        "created": route.created,
        "owned_by": "fitserve",
        "type": "model",
        "display_name": route.name,
        "created_at": datetime.fromtimestamp(route.created, UTC).isoformat(),
        "state": route.state,
        "wait_s": route.wait_s,
        "task": route.task,
        **({"parent": route.alias_of, "root": card.adapter} if card.adapter else {}),
        "max_model_len": card.max_model_len,
        "modalities": {"input": card.inputs, "output": _OUTPUTS.get(route.task or "", ())},
        "tools": card.tools,
        "required_tools": card.required_tools,
        "reasoning": card.reasoning,
        "json_schema": card.json_schema,
    }


# Kinds of content in answers, by task.
_OUTPUTS = {
    "generate": ("text",),
    "transcribe": ("text",),
    "embed": ("embedding",),
    "rerank": ("score",),
    "classify": ("label",),
}
