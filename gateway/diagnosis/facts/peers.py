"""The links between the GPUs of an engine, without those that failed in earlier starts. Pure.

    custom all-reduce   the engine's own kernels, which write into each other's memory
    peer-to-peer        NCCL over PCIe or NVLink; without it NCCL uses the host's memory
                        (NCCL_P2P_DISABLE=1)
    NCCL                any link; without it these GPUs share no engine

The fastest link comes first. After a failure the next one is used. Without peer-to-peer access the
engine's own kernels are off too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Engine, Fact, Gpu, Plan

CUSTOM = "custom all-reduce"
P2P = "peer-to-peer"
NCCL = "NCCL"
P2P_SWITCH = ("NCCL_P2P_DISABLE", "1")


def failing_links(facts: KnownFacts, engine: Engine, gpus: Iterable[Gpu]) -> Mapping[str, Fact]:
    """The links that fail between some GPUs of this group, each with its fact."""
    failure_facts = facts.select_kind("peers_fail")
    uuids = {gpu.uuid for gpu in gpus} if failure_facts else set()
    links: dict[str, Fact] = {}
    for fact in failure_facts:
        scope = fact.scope
        if scope.get("engine", engine.ref) == engine.ref and uuids.issuperset(
            scope.get("gpus", "").split(",")
        ):
            links.setdefault(scope.get("by", ""), fact)
    return links


def peers_scope(plan: Plan) -> dict[str, str] | None:
    """The scope of a failure between the ranks of a plan: its fastest link. None for one GPU."""
    if len(plan.gpus) < 2:
        return None
    name, value = P2P_SWITCH
    gpus = {"gpus": ",".join(sorted(plan.gpus))}
    if plan.custom_all_reduce.value and plan.tensor_parallel.value > 1:
        return gpus | {"by": CUSTOM, "engine": str(plan.engine)}
    if plan.env.get(name) != value:
        return gpus | {"by": P2P}
    return gpus | {"by": NCCL, "engine": str(plan.engine)}
