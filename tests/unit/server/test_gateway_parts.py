"""The parts of a gateway that exist before its event loop, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.proxy.metrics.access_log import AccessLog
from gateway.proxy.routing.model_route import ModelRoute, RoutedReplica
from gateway.proxy.routing.route_table import RouteTable
from gateway.proxy.shared_memory import SharedMemory
from gateway.proxy.workers.shared_parts import SharedParts
from gateway.server.app import build_front
from gateway.settings import Settings


def route(name: str, *urls: str) -> ModelRoute:
    replicas = tuple(RoutedReplica(url, f"{name}-{url}", name) for url in urls)
    return ModelRoute(name, "ready" if urls else "stopped", "", 0, replicas, None)


def test_a_front_of_one_process_routes_by_its_own_table(tmp_path: Path) -> None:
    front = build_front(Settings(data_dir=tmp_path, max_connections=10, queue_per_model=3))
    assert front.workers is None
    assert front.plane.routes is front.routes
    assert front.plane.keys is front.keys
    assert front.plane.limits.connections == 10
    front.routes.table = RouteTable({"a": route("a", "http://a"), "b": route("b")})
    assert front.routed_models() == {"a"}


@pytest.mark.parametrize("logged", [True, False])
def test_the_settings_choose_metrics_with_or_without_a_log(tmp_path: Path, logged: bool) -> None:
    front = build_front(Settings(data_dir=tmp_path, access_log=logged))
    assert isinstance(front.metrics, AccessLog) is logged
    assert front.plane.meter is front.metrics


def test_a_front_with_workers_publishes_its_table_to_them(tmp_path: Path) -> None:
    shared_parts = SharedParts(SharedMemory(), [], tmp_path / "control.sock")
    front = build_front(Settings(data_dir=tmp_path, workers=2), shared_parts=shared_parts)
    assert front.workers is not None
    assert front.routes is front.workers.routes
    assert front.workers.control == tmp_path / "control.sock"
