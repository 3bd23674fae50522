"""What adapters take on one rank. Pure.

vLLM makes room for every adapter in every linear layer, whichever layers they change:
create_lora_weights of BaseLinearLayerWithLoRA and its heirs (vllm/lora/layers/ of 0.18.0 to
0.33.0). SGLang does so in the layers that they change (srt/lora/mem_pool.py), which is less.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import Adapter, Engine, ModelSpec
from gateway.engines.common.layers.built_model import BuiltModel, per_rank
from gateway.engines.common.lora.served import rank

# Bytes of a number: lora_dtype is that of the activations.
_ITEM = 2


def bytes_on_rank(
    engine: Engine, adapters: Sequence[Adapter], stage: BuiltModel, spec: ModelSpec, tp: int
) -> int:
    """Bytes of the room for all adapters on one rank."""
    if not adapters:
        return 0
    most, places = (
        rank(engine, adapters) or 0,
        len(adapters) + (1 if engine.kind == "sglang" else 0),
    )
    numbers = 0
    for layer in stage.linears:
        if layer.experts or (cut := per_rank(layer, tp)) is None:
            continue
        inputs, outputs = cut
        merged = len(layer.parts) if layer.shard in ("qkv", "merged") else 1
        numbers += layer.count * (merged * inputs + outputs)
    # Embedding and output head.
    numbers += 2 * (spec.vocab + spec.hidden)
    return numbers * most * places * _ITEM
