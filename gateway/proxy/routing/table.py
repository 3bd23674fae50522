"""Where requests for a model can go: one immutable table of models and their replicas, swapped
whole; and the call that is routed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.errors import ModelNotFound, NotReady
from gateway.proxy.access.auth import ANYONE, Key

SHOWN_NAME = 200
# These endpoints take no place in an engine's batch, so their calls never wait.
_LIGHT = frozenset({"tokenize", "detokenize", "count_tokens"})

# Of why a model cannot answer, a client is told so much.
_MOST_DETAIL = 300
# States that no waiting ends, and what does.
_WHAT_HELPS = {
    "no_plan": "That stays so until the model, its settings or the machine change",
    "quarantined": "It was given up; its owner can try it again with `fitserve retry {name}`",
    "stopped": "Its owner has stopped it, and can load it with `fitserve start {name}`",
    "stopping": (
        "Its owner stops or removes it; `fitserve start {name}` loads again what was stopped"
    ),
}


@dataclass(frozen=True, slots=True)
class RoutedReplica:
    """One engine that answers for a model. `url` is its base without /v1, `served_name` what it
    calls the model.

    `capacity`: how many requests it gets at once; None where that is not known. `key`: what it
    wants of its callers, "" for nothing. `adapters`: names of adapters, and what the engine calls
    them. `seed`: a number for the id. `key_line`: the key as a line of a request's head.
    `elsewhere`: not ours, and perhaps another gateway.
    """

    url: str
    id: str
    served_name: str
    capacity: int | None = None
    key: str = field(default="", repr=False)
    adapters: tuple[tuple[str, str], ...] = ()
    elsewhere: bool = False
    seed: int = field(init=False, repr=False, compare=False)
    key_line: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", zlib.crc32(self.id.encode()))
        object.__setattr__(
            self, "key_line", f"authorization: Bearer {self.key}\r\n".encode() if self.key else b""
        )

    def name_of(self, asked: str) -> str:
        """What the engine calls what a request asks for by this name."""
        return next((name for adapter, name in self.adapters if adapter == asked), self.served_name)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What GET /v1/models says of a model beside its name and state. `tools` to `json_schema`:
    "proven", "not proven" or "unknown", as
    `gateway.domain.running.Abilities`. `adapter`: what is an adapter is loaded from. `inputs`: what
    a message may hold; empty: not known.
    """

    max_model_len: int | None = None
    inputs: tuple[str, ...] = ()
    tools: str = "unknown"
    required_tools: str = "unknown"
    reasoning: str = "unknown"
    json_schema: str = "unknown"
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A model that clients may ask for. The model is routed while it has replicas; without
    replicas, `state` and `detail` say why.

    `task` is "generate" or "embed"; None when nobody knows, as for an engine that we did not start.
    `wait_s`: how long a request may wait for the first replica; 0 where that is not wanted, or
    where none can be expected. `frozen`: ids of replicas that run, and gave no sign of life for
    seconds: their clients wait no longer for them. `toolless`: why requests with tools are refused;
    "" where they are not.
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

    def seen_by(self, key: Key) -> bool:
        """Whoever may ask a model may do so by all its names."""
        return key.sees(self.alias_of or self.name)

    def not_ready(self) -> NotReady:
        first, *more = self.detail.splitlines() or [""]
        reason = f"{self.state}: {first[:_MOST_DETAIL].rstrip()}" if first else self.state
        reason = f"{reason} ..." if more or len(first) > _MOST_DETAIL else reason.rstrip(".") + "."
        # Where requests wait, another model may leave for it.
        does = None if self.wait_s else _WHAT_HELPS.get(self.state)
        said = does.format(name=self.name) if does else f"Try again in {self.retry_after_s} s"
        return NotReady(
            f"The model '{self.name}' cannot answer now, it is {reason}",
            hint=f"{said}; `fitserve show {self.name}` tells more.",
            param="model",
            retry_after_s=None if does else self.retry_after_s,
        )


class Call(msgspec.Struct):
    """The part of a request that the choice of a replica needs. `body` is the whole request in
    JSON, empty where it is a form or has none; `maker`: the
    seed of the replica that made the response from which this goes on; `tokens` and `prefix`: see
    `gateway.proxy.routing.balance`; `asked`: the alias by which the body calls the model.
    """

    endpoint: str
    model: str
    body: bytes | bytearray = b""
    streams: bool = False
    maker: int | None = None
    tokens: int = 1
    prefix: int | None = None
    asked: str = ""

    @property
    def light(self) -> bool:
        """Whether the call costs the engine nearly nothing: a count of tokens, or a look at a
        response."""
        return self.endpoint in _LIGHT or (self.maker is not None and not self.body)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """Every known model by name, routed or not. `frozen`: of all models."""

    models: Mapping[str, ModelRoute]
    frozen: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))
        object.__setattr__(
            self, "frozen", frozenset(id_ for route in self.models.values() for id_ in route.frozen)
        )

    def find(self, name: str, key: Key = ANYONE) -> ModelRoute:
        """The route of the model `name`. Raises ModelNotFound, also where `key` may not know of the
        model."""
        route = self.models.get(name)
        if route is None or not key.sees(route.alias_of or name):
            shown = name if len(name) <= SHOWN_NAME else name[:SHOWN_NAME] + "..."
            raise ModelNotFound(
                f"The model '{shown}' does not exist here.",
                hint="GET /v1/models lists the models that are served.",
                param="model",
            )
        return route

    def routed(self, key: Key = ANYONE) -> list[ModelRoute]:
        return [route for route in self.models.values() if route.replicas and route.seen_by(key)]


def models_answer(table: RouteTable, name: str, key: Key) -> dict[str, Any]:
    """The answer to GET /v1/models: all models that the holder of `key` may ask, in whatever state,
    or the model of that name. OpenAI's and
    Anthropic's fields side by side: both their SDKs read it. Raises ModelNotFound."""
    if name:
        return _model(table.find(name, key))
    data = [_model(route) for route in table.models.values() if route.seen_by(key)]
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
        "modalities": {"input": card.inputs, "output": _GIVES.get(route.task or "", ())},
        "tools": card.tools,
        "required_tools": card.required_tools,
        "reasoning": card.reasoning,
        "json_schema": card.json_schema,
    }


# What a model of a task answers with.
_GIVES = {"generate": ("text",), "embed": ("embedding",), "rerank": ("score",)}
