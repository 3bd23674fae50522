"""Bytes against the engine's own: weights per rank and KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.memory import (
    GIB,
    activation_bytes,
    kv_bytes_for,
    kv_bytes_per_token,
    largest_context,
    memory,
    position_bytes,
    weights_bytes,
)
from gateway.core.reading import Tensor, read_model
from gateway.domain import ModelSpec

pytestmark = pytest.mark.unit

MODELS = Path(__file__).parent / "models"
SIZES = (1, 2, 4, 8)
# Parameter bytes of rank 0 and bytes of one KV cache block (16 tokens) of one layer, for 1, 2, 4 and 8 ranks (None:
# refused), in bfloat16. Read from vLLM's own model classes, built without data for an imaginary GPU of compute capability
# 9.0; versions 0.18.0, 0.19.1, 0.26.0 and 0.33.0 agree. There is one exception elsewhere: with FlashInfer's TensorRT-LLM
# kernels for experts (compute capability 10), 0.33.0 pads the expert size of a rank to a multiple of 128.
ENGINE: dict[str, tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    "llama-3.1-8b": ((16060522496, 8030527488, 4015529984, 2008031232), (65536, 32768, 16384, 8192)),
    "llama-3.2-1b": ((2471628800, 1235881984, 618008576, 309071872), (32768, 16384, 8192, 4096)),
    "mistral-7b-v0.1": ((14483464192, 7241998336, 3621265408, 1810898944), (65536, 32768, 16384, 8192)),
    "mistral-7b-v0.3": ((14496047104, 7248289792, 3624411136, 1812471808), (65536, 32768, 16384, 8192)),
    "qwen2.5-7b": ((15231233024, 7615820800, 3808114688, None), (32768, 16384, 8192, None)),
    "qwen2.5-1.5b": ((3087428608, 1543801856, 783005696, None), (16384, 8192, 8192, None)),
    "qwen3-8b": ((16381470720, 8191043584, 4095830016, 2048223232), (65536, 32768, 16384, 8192)),
    "qwen3-30b-a3b": ((61064245248, 30544916480, 15285252096, 7680585728), (32768, 16384, 8192, 8192)),
    "mixtral-8x7b": ((93405585408, 46704107520, 23353368576, 11677999104), (65536, 32768, 16384, 8192)),
    "granite-3.1-2b": ((5067313152, 2533822464, 1267077120, 633704448), (32768, 16384, 8192, 4096)),
    "qwen1.5-moe-a2.7b": ((28631568384, 14318882816, 7162540032, 3584368640), (0, 0, 0, 0)),
}
