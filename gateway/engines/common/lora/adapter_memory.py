"""Memory of LoRA adapters on one rank. Pure.

vLLM reserves room for every adapter in every linear layer: create_lora_weights of
BaseLinearLayerWithLoRA and its subclasses (vllm/lora/layers/ of 0.18.0 to 0.33.0). SGLang reserves
room only in the layers that adapters change (srt/lora/mem_pool.py), which is less.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import Adapter, Engine, ModelSpec
from gateway.engines.common.kind import EngineKind
from gateway.engines.common.layers.built_model import BuiltModel, rank_shape
from gateway.engines.common.lora.adapter_flags import supported_rank

_ITEM_BYTES = 2  # lora_dtype is that of the activations


def bytes_on_rank(
    engine: Engine,
    kind: EngineKind,
    adapters: Sequence[Adapter],
    stage: BuiltModel,
    spec: ModelSpec,
    tp: int,
) -> int:
    """Bytes that one rank reserves for all adapters."""
    if not adapters:
        return 0
    rank = supported_rank(engine, adapters) or 0
    slots = kind.adapter_slots(len(adapters))
    numbers = 0
    for layer in stage.linears:
        if layer.experts or (cut_sizes := rank_shape(layer, tp)) is None:
            continue
        inputs, outputs = cut_sizes
        merged_count = len(layer.parts) if layer.shard in ("qkv", "merged") else 1
        numbers += layer.count * (merged_count * inputs + outputs)
    numbers += 2 * (spec.vocab + spec.hidden)  # embedding and output head
    return numbers * rank * slots * _ITEM_BYTES
