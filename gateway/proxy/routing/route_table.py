"""The immutable table of models and their routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from gateway.errors import ModelNotFound, near_name
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key
from gateway.proxy.routing.model_route import ModelRoute

_MAX_NAME_CHARACTERS = 200
# Names that an unknown one is compared with, and their length. The data plane waits meanwhile: for
# a millisecond at most, if all are long and alike.
_MAX_COMPARED_NAMES = 8
_MAX_COMPARED_CHARACTERS = 64


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
            displayed = (
                name if len(name) <= _MAX_NAME_CHARACTERS else name[:_MAX_NAME_CHARACTERS] + "..."
            )
            suggestion = self._near_name(name, key)
            raise ModelNotFound(
                f"The model '{displayed}' does not exist here.",
                hint=(f"Did you mean '{suggestion}'? " if suggestion else "")
                + "GET /v1/models lists the served models.",
                param="model",
            )
        return route

    def _near_name(self, name: str, key: Key) -> str:
        """The nearest of the first models that `key` may use; "": none is near, or it is long."""
        if len(name) > _MAX_COMPARED_CHARACTERS:
            return ""
        usable_names = (
            model.name
            for model in self.models.values()
            if len(model.name) <= _MAX_COMPARED_CHARACTERS and model.is_visible_to(key)
        )
        return near_name(name, islice(usable_names, _MAX_COMPARED_NAMES))
