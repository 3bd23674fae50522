"""What was computed of a variant until it became a plan or was refused. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.domain import EngineAnswer, LayerAttention, LayerKernel, Memory


@dataclass(frozen=True)
class Evidence:
    """`method`: of quantization, by the engine's own name. `answer`: what the engine's own code said of the variant."""

    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None
    method: str = ""
    answer: EngineAnswer | None = None

    def sized(self, memory: Memory | None) -> Evidence:
        return Evidence(self.kernels, self.attention, memory, self.method, self.answer)
