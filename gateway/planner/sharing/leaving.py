"""Offers of models that can sleep or stop, and the offers that a waking model needs. Pure.

sleep_refusal(plan, machine)             why an engine has to stop; "": it can sleep
leave_offers(awake, asleep)              the offers of copies of models that could leave
bytes_promised_away(attempt, ...)        memory of a sleeping engine that others were promised
bytes_occupied(attempt, machine)         memory of a sleeping engine that is not free
offers_to_wake(missing_bytes, offers)    the fewest of these offers that free the missing bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gateway.diagnosis.facts.sleep import expected_bytes
from gateway.domain import Attempt, Hardware, Offer, Plan
from gateway.domain.units import MIB, gib
from gateway.engines.common.planning_input import driver_bytes
from gateway.engines.common.resources import reserved_ram_bytes
from gateway.planner.sharing.offers import bytes_given, minimal_offers

# Part of the weights and KV cache that an offer promises: a little less comes back.
_RETURNED_SHARE = 0.97
# Difference of two readings of unchanged memory.
_NOISE_BYTES = 64 * MIB


def sleep_refusal(plan: Plan, machine: Hardware) -> str:
    """Why the free RAM cannot hold the weights of the sleeping engine; "": it can."""
    needed_bytes = plan.memory.weights_bytes * max(1, len(plan.gpus))
    free_bytes = machine.ram_available_bytes
    if needed_bytes + reserved_ram_bytes(machine.ram_total_bytes) <= free_bytes:
        return ""
    return (
        f"its weights take {gib(needed_bytes)} of RAM, and {gib(free_bytes)} of"
        f" {gib(machine.ram_total_bytes)} are free"
    )


class EvictionCandidate(NamedTuple):
    """A copy of a model that could leave.

    copies: number of copies of the model.
    held_bytes: bytes that the copy holds, by GPU UUID.
    engine: the attempt that can sleep; None if its engine cannot.
    """

    model: str
    replica: int
    copies: int
    held_bytes: Mapping[str, int]
    engine: Attempt | None = None

    @property
    def copy_label(self) -> str:
        return f"{self.model} (copy {self.replica + 1})" if self.copies > 1 else self.model

    def offer(
        self, way: Literal["sleep", "stop"], given_bytes: Mapping[str, int], text: str
    ) -> Offer:
        end_condition = "there is room again" if self.copies > 1 else "it is asked again"
        return Offer(
            model=self.model,
            replica=self.replica,
            kind=way,
            bytes_by_gpu=dict(given_bytes),
            words=f"{self.copy_label}{text}, until {end_condition}",
        )


def leave_offers(
    awake_copies: Iterable[EvictionCandidate], asleep_copies: Iterable[EvictionCandidate]
) -> list[Offer]:
    """The offers to sleep or stop, in the order in which they are taken.

    Models that can sleep offer that first. Stops come last, those of sleeping models first.
    awake_copies: the copies that are awake, in the order of eviction.
    """
    first: list[Offer] = []
    last = [
        leaver.offer("stop", leaver.held_bytes, ", which sleeps, is unloaded")
        for leaver in asleep_copies
    ]
    for leaver in awake_copies:
        stop = leaver.offer("stop", leaver.held_bytes, " is unloaded")
        if leaver.engine is not None and leaver.engine.plan.gpus:
            plan = leaver.engine.plan
            given_bytes = dict.fromkeys(plan.gpus, int(_RETURNED_SHARE * expected_bytes(plan)))
            first.append(leaver.offer("sleep", given_bytes, " sleeps"))
            last.append(stop)
        else:
            first.append(stop)
    return [*first, *last]


def bytes_promised_away(
    attempt: Attempt, promised_bytes: Mapping[str, int], machine: Hardware
) -> dict[str, int]:
    """Bytes of a sleeping engine that others were promised since, by GPU UUID.

    promised_bytes: bytes promised to the other engines.
    """
    missing_bytes: dict[str, int] = {}
    for gpu in machine.gpus:
        if gpu.uuid in attempt.plan.gpus:
            promised_count = promised_bytes.get(gpu.uuid, 0)
            free_bytes = (
                (gpu.total_bytes or 0)
                - promised_count
                - (driver_bytes(gpu) if promised_count else 0)
            )
            missing_bytes[gpu.uuid] = attempt.plan.memory.promised_bytes - free_bytes
    return {uuid: count for uuid, count in missing_bytes.items() if count > 0}


def bytes_occupied(attempt: Attempt, machine: Hardware) -> dict[str, int]:
    """Bytes that a sleeping engine gave and that are not free now, by GPU UUID."""
    freed_bytes = attempt.asleep.freed_bytes if attempt.asleep is not None else None
    free_by_gpu = {
        gpu.uuid: gpu.total_bytes or 0 if gpu.free_bytes is None else gpu.free_bytes
        for gpu in machine.gpus
    }
    missing_bytes = {
        uuid: count - _NOISE_BYTES - free_by_gpu.get(uuid, 0)
        for uuid, count in (freed_bytes or {}).items()
    }
    return {uuid: count for uuid, count in missing_bytes.items() if count > 0}


def offers_to_wake(
    missing_bytes: Mapping[str, int], offers: Sequence[Offer]
) -> tuple[Offer, ...] | None:
    """The fewest first offers that free the missing bytes; None: all offers are too little."""

    def suffices(part: Sequence[Offer]) -> bool:
        freed_bytes = bytes_given(part)
        return all(freed_bytes.get(uuid, 0) >= count for uuid, count in missing_bytes.items())

    count = next((count for count in range(len(offers) + 1) if suffices(offers[:count])), None)
    return None if count is None else minimal_offers(offers[:count], suffices)
