"""What was computed of a variant until it became a plan or was refused. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import EngineAnswer, LayerAttention, LayerKernel, Memory


class Evidence(NamedTuple):
    """`method`: of quantization, by the engine's own name. `answer`: what the engine's own code
    said of the variant."""

    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None
    method: str = ""
    answer: EngineAnswer | None = None

    def sized(self, memory: Memory | None) -> Evidence:
        return Evidence(self.kernels, self.attention, memory, self.method, self.answer)
