"""The plans for a cluster in the form in which a gateway starts them. Pure."""

from __future__ import annotations

from gateway.domain import Decision


def startable_on_nodes(decision: Decision) -> Decision:
    """The decision with engines on a CPU on no node: their host takes the node with the fewest
    engines."""
    plans = tuple(plan if plan.gpus else plan.evolve(nodes=()) for plan in decision.plans)
    return decision.evolve(plans=plans)
