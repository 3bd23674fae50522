"""Plans, caps and bytes that replicas were promised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gateway.domain import Attempt, Cap, Offer, Plan
from gateway.planner.sharing.restore import interrupted_plan, plan_to_restore
from gateway.planner.sharing.surplus import last_cap

if TYPE_CHECKING:
    from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState


def list_attempts(model: ManagedModel, replica: ReplicaState | None = None) -> list[Attempt]:
    """All starts of the model, or of one replica, by its wanted wish, oldest first."""
    replicas = [replica] if replica is not None and replica is not model.trial else model.replicas
    attempts = (
        attempt
        for replica in replicas
        for attempt in replica.attempts
        if attempt.generation == model.wanted_generation
    )
    return sorted(attempts, key=lambda attempt: attempt.id)


def outlived_plan(replica: ReplicaState) -> Plan | None:
    return interrupted_plan(
        [attempt for attempt in replica.history if attempt.generation == replica.generation]
    )


def restorable_plan(model: ManagedModel, replica: ReplicaState, cap: Cap | None) -> Plan | None:
    """The interrupted plan to restore; None for a trial, and for the successor of a serving
    engine."""
    is_serving = replica.attempt is not None and replica.attempt.state == "ready"
    plan = outlived_plan(replica) if not is_serving and replica is not model.trial else None
    return plan_to_restore(plan, cap) if plan is not None else None


def last_caps(model: ManagedModel) -> list[Cap]:
    """The last cap of each copy. Copies have different neighbours."""
    caps = (last_cap(list_attempts(model, replica)) for replica in model.replicas)
    return [cap for cap in caps if cap is not None]


def combined_bytes(offers: Sequence[Offer]) -> int:
    """Bytes of each GPU that one gift needs for all of these offers.

    Each requester counted on the memory that is free in addition to its offer, but that memory
    exists once.
    """
    beside_bytes = [offer.free_bytes_without_offer for offer in offers]
    return (
        sum(max(offer.bytes_by_gpu.values()) for offer in offers)
        + sum(beside_bytes)
        - max(beside_bytes)
    )


def live_promises(replicas: Iterable[ReplicaState]) -> Iterator[tuple[str, int]]:
    """Devices, GPUs by UUID or RAM, and the bytes of each that a live attempt may use."""
    for attempt in (replica.attempt for replica in replicas if replica.attempt is not None):
        yield from attempt.plan.promises(attempt.promised_bytes)
