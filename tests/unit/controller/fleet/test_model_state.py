"""The route of a model, and the reason for which it takes no requests."""

from __future__ import annotations

import pytest

from gateway.controller.decisions.copies import CopyChange
from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_state import copies_text, route
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


def test_copies_by_the_load_are_shown_with_their_reason() -> None:
    replica = ReplicaState("m", 0, attempt(state="ready"), status=NoAction("ready"))
    model = ManagedModel(wish(name="m", copies="1-4"), 0.0, replicas=[replica])
    assert copies_text(model) == "1 of 1-4 copies"
    model.copy_change = CopyChange(1, 2, "calm", "fewer carry the load")
    model.copy_hold_reason = "no room: 3 GiB are missing"
    assert copies_text(model) == (
        "1 of 1-4 copies; fewer carry the load; one more is needed: no room: 3 GiB are missing"
    )
    model.wish = wish(name="m", replicas=1)
    assert copies_text(model) == ""


@pytest.mark.parametrize(
    ("copies", "count", "wanted_count"),
    [("1-4", None, 3), ("4-6", None, 4), ("1-2", None, 2), ("1-4", 2, 2), ("1-4", 9, 4)],
)
def test_the_wanted_copies_stay_within_the_bounds_of_the_wish(
    copies: str, count: int | None, wanted_count: int
) -> None:
    replicas = [ReplicaState("m", index) for index in range(3)]
    model = ManagedModel(wish(name="m", copies=copies), 0.0, replicas=replicas)
    if count is not None:
        model.copy_change = CopyChange(count, 1, "queue", "")
    assert model.wanted_copies == wanted_count
    assert [model.is_surplus(replica) for replica in replicas] == [
        index >= wanted_count for index in range(3)
    ]
