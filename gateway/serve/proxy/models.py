"""What the gateway itself answers in OpenAI's API: which models it serves."""

from __future__ import annotations

from gateway.access.auth import Key
from gateway.routing.routes import ModelRoute, RouteTable


def models(table: RouteTable, name: str, key: Key) -> dict[str, object]:
    """All routed models that who has `key` may ask, or the one of that name. Raises ModelNotFound, NotReady."""
    if not name:
        return {"object": "list", "data": [_model(route) for route in table.routed(key)]}
    route = table.find(name, key)
    if not route.replicas:
        raise route.not_ready()
    return _model(route)


def _model(route: ModelRoute) -> dict[str, object]:
    return {"id": route.name, "object": "model", "created": route.created, "owned_by": "fitserve"}
