"""The ports that an engine takes on its host."""

from __future__ import annotations

from gateway.domain import Plan
from gateway.engines.registry import engine_kind


def engine_ports(plan: Plan, port: int) -> frozenset[int]:
    """The ports of an engine with this plan that listens on `port`."""
    return engine_kind(plan.engine.kind).ports(port, plan.data_parallel.value)
