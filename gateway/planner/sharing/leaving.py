"""How models leave their GPUs for others, and what has to leave before a sleeping model wakes up.
Pure.

awake(plan, machine)     -> why its engine is stopped now and not put to sleep; "": it sleeps
leaving(awake, asleep)   -> the offers of the copies of models that could leave
missing(attempt, ...)    -> what others were promised of a sleeping engine's GPUs
taken(attempt, ...)      -> what of its GPUs is not free, whoever has it
to_wake(missing, offers) -> the fewest of these offers that give it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gateway.diagnosis.facts.sleep import expected
from gateway.domain import Attempt, Hardware, Offer, Plan
from gateway.domain.units import MIB, gib
from gateway.engines.common.planning_input import driver_bytes
from gateway.engines.common.resources import ram_left
from gateway.planner.sharing.enough import given, least

# An offer is kept: a little less comes back than the sizes of weights and KV cache say.
_SURE = 0.97
# What two readings of the same memory differ by.
_STEADY = 64 * MIB


def awake(plan: Plan, machine: Hardware) -> str:
    """Asleep its weights wait in RAM: what its machine has free of it has to hold them."""
    needed, free = plan.memory.weights_bytes * max(1, len(plan.gpus)), machine.ram_available_bytes
    if needed + ram_left(machine.ram_total_bytes) <= free:
        return ""
    return (
        f"its weights take {gib(needed)} of RAM, and {gib(free)} of {gib(machine.ram_total_bytes)}"
        " are free"
    )


class Leaver(NamedTuple):
    """A copy of a model that could leave. copies: how many the model has. held: bytes that it has
    of each GPU. engine: what can be put to sleep."""

    model: str
    replica: int
    copies: int
    held: Mapping[str, int]
    engine: Attempt | None = None

    @property
    def words(self) -> str:
        return f"{self.model} (copy {self.replica + 1})" if self.copies > 1 else self.model

    def offer(self, how: Literal["sleep", "stop"], gives: Mapping[str, int], words: str) -> Offer:
        until = "there is room again" if self.copies > 1 else "it is asked again"
        return Offer(
            model=self.model,
            replica=self.replica,
            how=how,
            gives=dict(gives),
            words=f"{self.words}{words}, until {until}",
        )


def leaving(awake: Iterable[Leaver], asleep: Iterable[Leaver]) -> list[Offer]:
    """awake: in the order in which it is asked of them. Each leaves by the better means that it
    has; to end altogether is asked after that, first of
    those that sleep already."""
    first: list[Offer] = []
    last = [one.offer("stop", one.held, ", which sleeps, is unloaded") for one in asleep]
    for one in awake:
        ends = one.offer("stop", one.held, " is unloaded")
        if one.engine is not None and one.engine.plan.gpus:
            gives = dict.fromkeys(one.engine.plan.gpus, int(_SURE * expected(one.engine.plan)))
            first.append(one.offer("sleep", gives, " sleeps"))
            last.append(ends)
        else:
            first.append(ends)
    return [*first, *last]


def missing(attempt: Attempt, claims: Mapping[str, int], machine: Hardware) -> dict[str, int]:
    """By the UUID of a GPU, what a sleeping engine was promised and others were promised since.
    claims: without its own."""
    found: dict[str, int] = {}
    for gpu in machine.gpus:
        if gpu.uuid in attempt.plan.gpus:
            promised = claims.get(gpu.uuid, 0)
            left = (gpu.total_bytes or 0) - promised - (driver_bytes(gpu) if promised else 0)
            found[gpu.uuid] = attempt.plan.memory.promised_bytes - left
    return {uuid: count for uuid, count in found.items() if count > 0}


def taken(attempt: Attempt, machine: Hardware) -> dict[str, int]:
    """By the UUID of a GPU, what of all that a sleeping engine gave is not free."""
    gave = attempt.asleep.gave if attempt.asleep is not None else None
    free = {
        gpu.uuid: gpu.total_bytes or 0 if gpu.free_bytes is None else gpu.free_bytes
        for gpu in machine.gpus
    }
    found = {uuid: count - _STEADY - free.get(uuid, 0) for uuid, count in (gave or {}).items()}
    return {uuid: count for uuid, count in found.items() if count > 0}


def to_wake(lack: Mapping[str, int], offers: Sequence[Offer]) -> tuple[Offer, ...] | None:
    """The fewest first offers that give it, without those that prove unnecessary; None: all are too
    little."""

    def enough(some: Sequence[Offer]) -> bool:
        free = given(some)
        return all(free.get(uuid, 0) >= wanted for uuid, wanted in lack.items())

    count = next((count for count in range(len(offers) + 1) if enough(offers[:count])), None)
    return None if count is None else least(offers[:count], enough)
