"""What the planner decides from, for all engine versions alike. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gateway.core.chat.parsers import ParserTable, Writing
from gateway.core.facts.known_facts import KnownFacts
from gateway.core.kernels.gpus import GpuTable
from gateway.core.speed.correction import Corrections
from gateway.core.speed.machine import Pace
from gateway.core.speed.measured import Measured
from gateway.core.variables import words
from gateway.domain import EngineAnswer, Gpu, Hardware, Link, ModelSpec, Question, Sharing, Wish
from gateway.domain.plan import ALONE
from gateway.domain.units import MIB

# What the driver keeps of a card: 615 MiB of an H200. CUDA's total, of which the engine takes its share, is NVML's less this.
_DRIVER = 640 * MIB
_DRIVER_SHARE = 50


@dataclass(frozen=True)
class PlanningInput:
    """What all variants share. `claims`: bytes per GPU UUID that other engines were promised. `answers`: what engines said of this
    model. `pace`: what is known of how fast GPUs and engines are. `parsers`: how models write tool calls and thoughts. `everywhere`:
    environment variables that the gateway's settings give to all engines; what one engine gets of them is in its `wish` (`under`).
    `sharing`: what the model keeps to for the sake of others, and who they are."""

    spec: ModelSpec
    hardware: Hardware
    wish: Wish
    facts: KnownFacts = field(default_factory=KnownFacts)
    claims: Mapping[str, int] = field(default_factory=dict)
    gpus: GpuTable | None = None
    answers: Mapping[Question, EngineAnswer] = field(default_factory=dict)
    pace: Pace | None = None
    parsers: ParserTable | None = None
    everywhere: Mapping[str, str] = field(default_factory=dict)
    sharing: Sharing = ALONE
    # What was timed once, by work and GPUs: the Clocks of core/planner/copies.py.
    clocks: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def under(self, env: Mapping[str, str]) -> PlanningInput:
        """For an engine with these variables, the gateway's among them."""
        facts = self.facts.under(words(env))
        if facts is self.facts and env == self.wish.env:
            return self
        return replace(self, wish=self.wish.evolve(env=dict(env)), facts=facts)

    @cached_property
    def links(self) -> Mapping[frozenset[int], Link]:
        """How two GPUs reach each other, by their indices."""
        return {frozenset((link.a, link.b)): link for link in self.hardware.links}

    @cached_property
    def writing(self) -> Writing | None:
        """How the model writes tool calls and thoughts; None: no table of dialects is at hand."""
        return self.parsers.of(self.spec) if self.parsers else None

    @cached_property
    def corrections(self) -> Corrections:
        """What measurements say of expected speeds."""
        return Corrections(self.facts.of("speed_ratio"))

    @cached_property
    def measured(self) -> Measured:
        """What was measured of this machine's GPUs."""
        return Measured(self.facts.of("machine_speed"))


def available_bytes(gpu: Gpu, claims: Mapping[str, int]) -> int:
    """Bytes that a new engine may count on: what is free now, less what our engines were promised and may not use yet."""
    total = gpu.total_bytes or 0
    free = total if gpu.free_bytes is None else gpu.free_bytes
    promised = claims.get(gpu.uuid, 0)
    return max(0, min(free, total - promised - (driver_bytes(gpu) if promised else 0)))


def driver_bytes(gpu: Gpu) -> int:
    """What the driver keeps for itself of a card's memory, as NVML tells that: read where the card is idle, else bounded."""
    total = gpu.total_bytes or 0
    most = min(_DRIVER, total // _DRIVER_SHARE)
    if gpu.memory_kind != "dedicated":
        return 0
    if gpu.processes == () and gpu.free_bytes is not None:
        return min(max(0, total - gpu.free_bytes), total // _DRIVER_SHARE)
    return most
