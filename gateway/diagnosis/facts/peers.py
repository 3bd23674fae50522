"""How the GPUs of one engine reach each other: what starts showed not to work is left off, one way
after the other. Pure.

    custom all-reduce   the engine's own kernels, which write into each other's memory
    peer-to-peer        NCCL over PCIe or NVLink; without it, it goes through the memory of the host (NCCL_P2P_DISABLE=1)
    NCCL                any way: then these GPUs share no engine

An order, fastest first: what fails with the first is tried with the second. Where NCCL must not use
peer-to-peer access, the engine's own kernels must not either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Engine, Fact, Gpu, Plan

CUSTOM, P2P, NCCL = "custom all-reduce", "peer-to-peer", "NCCL"
P2P_OFF = ("NCCL_P2P_DISABLE", "1")


def failing(facts: KnownFacts, engine: Engine, group: Iterable[Gpu]) -> Mapping[str, Fact]:
    """The ways that do not work between some GPUs of this group, each with the fact that says
    so."""
    known = facts.of("peers_fail")
    uuids = {gpu.uuid for gpu in group} if known else set()
    found: dict[str, Fact] = {}
    for fact in known:
        about = fact.scope
        if about.get("engine", engine.ref) == engine.ref and uuids.issuperset(
            about.get("gpus", "").split(",")
        ):
            found.setdefault(about.get("by", ""), fact)
    return found


def scope(plan: Plan) -> dict[str, str] | None:
    """What a plan proves whose ranks could not talk to each other: the fastest way that it had.
    None of one GPU."""
    if len(plan.gpus) < 2:
        return None
    name, value = P2P_OFF
    about = {"gpus": ",".join(sorted(plan.gpus))}
    if plan.custom_all_reduce.value and plan.tensor_parallel.value > 1:
        return about | {"by": CUSTOM, "engine": str(plan.engine)}
    if plan.env.get(name) != value:
        return about | {"by": P2P}
    return about | {"by": NCCL, "engine": str(plan.engine)}
