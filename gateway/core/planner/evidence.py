"""What was computed of a variant until it became a plan or was refused. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.domain import LayerAttention, LayerKernel, Memory


@dataclass
class Evidence:
    """What was computed of a variant, also of a refused variant."""

    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None
    method: str = ""  # of quantization, by the engine's own name
