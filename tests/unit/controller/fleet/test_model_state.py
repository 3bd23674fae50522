"""The route of a model, and the reason for which it takes no requests."""

from __future__ import annotations

import pytest

from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_state import route
from gateway.domain import Instance
from tests.support.makers import attempt, wish


@pytest.mark.parametrize("runs", [True, False])
def test_a_model_whose_engine_is_gone_is_not_refused_as_ready(runs: bool) -> None:
    serving = attempt(state="ready")
    replica = ReplicaState("m", 0, serving, status=NoAction("ready"))
    model = ManagedModel(wish(name="m"), 0.0, replicas=[replica])
    engine = Instance(
        name=serving.instance_name,
        model="m",
        attempt=serving.id,
        fingerprint=serving.fingerprint,
        state="running",
        url="http://127.0.0.1:9",
    )
    model_route = route(model, {engine.name: engine} if runs else {})
    assert (model_route.state, bool(model_route.replicas)) == (
        ("ready", True) if runs else ("starting", False)
    )
    if not runs:
        assert "it is starting: none of its engines" in str(model_route.not_ready_error())
    # Spans of requests name the engine.
    engines = [routed_replica.engine for routed_replica in model_route.replicas]
    assert engines == ([str(serving.plan.engine)] if runs else [])
