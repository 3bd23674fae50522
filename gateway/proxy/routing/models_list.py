"""Answers to GET /v1/models, rendered at most once for each route table and set of models."""

from __future__ import annotations

from gateway.proxy.access.auth import Key
from gateway.proxy.api.protocol import dump
from gateway.proxy.routing.routes import Routes
from gateway.proxy.routing.table import RouteTable, models_answer

# Lists of keys with different models. More are rendered again.
_MAX_LISTS = 64


class ModelsList:
    """The lists by the models that a key may use; None for all models."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._table: RouteTable | None = None
        self._lists: dict[frozenset[str] | None, bytes] = {}

    def body(self, name: str, key: Key) -> bytes:
        """The answer for the model `name`, or for all models with an empty name. Raises
        ModelNotFound."""
        table = self._routes.table
        if name:
            return dump(models_answer(table, name, key))
        if table is not self._table or len(self._lists) >= _MAX_LISTS:
            self._table, self._lists = table, {}
        rendered = self._lists.get(key.models)
        if rendered is None:
            rendered = self._lists[key.models] = dump(models_answer(table, name, key))
        return rendered
