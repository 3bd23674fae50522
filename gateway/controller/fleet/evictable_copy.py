"""A copy of a model as evictions and the load see it."""

from __future__ import annotations

from gateway.controller.decisions.eviction import Copy
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState


def build_copy(model: ManagedModel, replica: ReplicaState) -> Copy:
    """The copy of a model as evictions see it: its state, since when, and the time to load it."""
    attempt = replica.attempt
    woken = replica.wake_times
    if (
        replica.eviction is None
        and attempt is not None
        and attempt.ready_at is not None
        and attempt.serves
    ):
        # The downloads of a first start do not count.
        load_s = sum(attempt.phases.values()) or attempt.ready_at - attempt.started_at
        load_times = attempt.ready_at - load_s, attempt.ready_at
        start_at, at = woken if woken is not None and woken[1] > attempt.ready_at else load_times
        return Copy(replica.index, "serves", at, at - start_at)
    ended_at = replica.history[-1].ended_at if replica.history else None
    if replica.eviction is not None:
        return Copy(replica.index, "leaves", ended_at or model.created_at)
    if (
        attempt is not None
        and attempt.asleep is not None
        and replica.is_asleep
        and not replica.is_busy
    ):
        return Copy(replica.index, "asleep", attempt.asleep.since)
    return Copy(
        replica.index,
        "loads" if attempt is not None or replica.is_busy else "out",
        ended_at or model.created_at,
    )
