"""How tensor parallelism cuts a weight of a checkpoint, told by its name."""

from __future__ import annotations

import re

from gateway.domain import Shard

# How tensor parallelism cuts a weight, by the last named modules of its path; the first rule that matches holds.
# Source: the parallel layers that vLLM's model files build (vllm/model_executor/layers/linear.py and, of
# vllm/model_executor/models/: llama, qwen2, qwen3_moe, mixtral, phi3, gpt2, gpt_neox, falcon, starcoder2, opt, bert).
_SHARDS: tuple[tuple[str, Shard], ...] = (
    (r"\.experts\.(\*\.)?(gate_proj|up_proj|gate_up_proj|w1|w3)(\.|$)", "expert_column"),
    (r"\.experts\.(\*\.)?(down_proj|w2)(\.|$)", "expert_row"),
    (r"\.(k_proj|v_proj)\.", "kv"),
    (r"\.(q_proj|qkv_proj|query_key_value|c_attn|query|key|value|gate_proj|up_proj|gate_up_proj)\.", "column"),
    (r"\.(fc1|c_fc|dense_h_to_4h|intermediate\.dense)\.", "column"),
    (
        r"\.(o_proj|out_proj|down_proj|fc2|c_proj|dense_4h_to_h|output\.dense|(self_)?attention\.dense|self_attn\.dense)\.",
        "row",
    ),
    (r"\.(embed_tokens|lm_head|wte|word_embeddings|embed_in|embed_out)\.", "vocab"),
)


def shard_of(name: str) -> Shard:
    """How tensor parallelism cuts the weight `name` (numbers as `*`); what no rule knows is replicated."""
    for pattern, shard in _SHARDS:
        if re.search(pattern, f".{name}"):
            return shard
    return "replicated"
