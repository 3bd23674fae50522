"""What the planner decides from, for all engine versions alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.planner.gpus import GpuTable
from gateway.domain import Fact, Gpu, Hardware, ModelSpec, Wish


@dataclass(frozen=True)
class PlanningInput:
    """What all variants share."""

    spec: ModelSpec
    hardware: Hardware
    wish: Wish
    facts: tuple[Fact, ...] = ()
    claims: Mapping[str, int] = field(default_factory=dict)
    gpus: GpuTable | None = None
    groups: dict[int, tuple[Gpu, ...] | None] = field(default_factory=dict, compare=False)
    """The best group of so many GPUs, once it was looked for."""
