"""Intermediate results of a variant, until it becomes a plan or is refused. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import EngineAnswer, LayerAttention, LayerKernel, Memory


class Evidence(NamedTuple):
    """Results so far. method: of quantization, by the engine's own name. answer: the engine's own
    answer about the variant."""

    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None
    method: str = ""
    answer: EngineAnswer | None = None

    def sized(self, memory: Memory | None) -> Evidence:
        return Evidence(self.kernels, self.attention, memory, self.method, self.answer)
