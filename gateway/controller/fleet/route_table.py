"""The routes of all names, by the fleet and the running instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.fleet.model_state import route
from gateway.domain import Instance
from gateway.proxy.routing.model_route import ModelRoute
from gateway.proxy.routing.route_table import RouteTable


def route_table(
    fleet: Fleet,
    instances: Iterable[Instance],
    load_wait_s: float,
    *,
    waits_for_engine: bool = False,
    resting_routes: Mapping[str, ModelRoute] = MappingProxyType({}),
) -> RouteTable:
    """The routes of all models, with the present instances.

    `load_wait_s` is the wait for a model that is loaded on request. `waits_for_engine`: instances
    are unknown
    yet, so all requests wait. `resting_routes` of models at rest are taken as they are.
    """
    attempts = [replica.attempt for replica in fleet.replicas() if replica.attempt is not None]
    plans = {attempt.instance_name: attempt.fingerprint for attempt in attempts}
    # An engine with another plan than the recorded plan is about to be replaced.
    own_instances = [
        instance for instance in instances if instance.fingerprint == plans.get(instance.name)
    ]
    running_instances = {
        instance.name: instance for instance in own_instances if instance.state == "running"
    }
    routes = {
        name: resting_routes.get(name)
        or _route(model, running_instances, load_wait_s, fleet.keep_alive_s(model.wish))
        for name, model in fleet.models.items()
    }
    if waits_for_engine:
        routes = {
            name: replace(model_route, wait_s=max(model_route.wait_s, load_wait_s))
            for name, model_route in routes.items()
        }
    aliases = {
        alias: name
        for name, model in fleet.models.items()
        for alias in model.wish.aliases
        if alias not in routes
    }
    routes_by_name = {
        alias: replace(routes[name], name=alias, alias_of=name) for alias, name in aliases.items()
    }
    for name, model in fleet.models.items():
        for adapter, source in model.wish.loras.items():
            card = replace(routes[name].card, adapter=source)
            routes_by_name.setdefault(
                adapter, replace(routes[name], name=adapter, alias_of=name, card=card)
            )
    return RouteTable({**routes_by_name, **routes})


def _route(
    model: ManagedModel,
    running_instances: Mapping[str, Instance],
    load_wait_s: float,
    keep_alive_s: float,
) -> ModelRoute:
    """The route of the model. An unexpected error removes only this route."""
    try:
        return route(model, running_instances, load_wait_s, keep_alive_s)
    except Exception as error:
        if not model.setback.rest_s:
            model.setback.record_failure(error)
        return ModelRoute(
            name=model.wish.name,
            state="starting",
            detail=model.setback.problem or "",
            created=int(model.created_at),
            replicas=(),
            task=None,
        )
