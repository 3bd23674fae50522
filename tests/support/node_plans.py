"""Plans of published models over several nodes, with addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.domain import Cluster, Decision, Engine, Network, Plan
from gateway.engines.common.planning_input import PlanningInput
from gateway.planner.nodes.over_nodes import decide_over_nodes
from gateway.profiles.cluster_forms import build_cluster
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.published import config, model_from_config

PROFILES = Profiles()
FAST = Network(bytes_s=25e9, latency_s=2e-6, rdma="roce")


def decide_over(
    engine: Engine, machines: Sequence[str], model: str = "qwen3-30b-a3b", **fields: Any
) -> tuple[Decision, Cluster]:
    """The decision for machines at 10.0.0.1, 10.0.0.2 and so on, behind the interface cx7."""
    cluster = build_cluster([PROFILES.hardware(name) for name in machines], FAST)
    nodes = tuple(
        node.evolve(address=f"10.0.0.{number}", interface="cx7")
        for number, node in enumerate(cluster.nodes, start=1)
    )
    cluster = cluster.evolve(nodes=nodes)
    return decide_on(cluster, engine, model, **fields), cluster


def decide_on(cluster: Cluster, engine: Engine, model: str, **fields: Any) -> Decision:
    inputs = PlanningInput(
        model_from_config(config(model)),
        cluster.nodes[0].hardware,
        wish(replicas=fields.get("replicas")),
        promised_bytes=fields.get("promised_bytes", {}),
        gpus=PROFILES.gpus,
        speed_knowledge=PROFILES.speed_knowledge,
        parsers=PROFILES.parsers,
    )
    return decide_over_nodes(inputs, cluster, [engine], PROFILES.rules([engine]))


def spans(decision: Decision) -> list[Plan]:
    return [plan for plan in decision.plans if plan.span > 1]
