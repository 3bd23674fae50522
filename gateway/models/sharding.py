"""Tensor parallel sharding of a checkpoint's weights, by their names."""

from __future__ import annotations

import re

from gateway.domain import Shard

# The first pattern that matches decides. Source: the parallel layers of vLLM's model files
# (vllm/model_executor/layers/linear.py, mamba/mamba_mixer.py, mamba_mixer2.py and short_conv.py,
# and of vllm/model_executor/models/: llama, qwen2, qwen3_moe, mixtral, granitemoe, phi3, gpt2,
# gptj, gpt_neox, falcon, starcoder2, opt, bert, deepseek_v2, lfm2, zamba2, siglip, clip,
# interns1_vit, qwen2_vl).
_SHARDS: tuple[tuple[str, Shard], ...] = (
    (r"\.experts\.(\*\.)?(gate_proj|up_proj|gate_up_proj|w1|w3)(\.|$)", "expert_column"),
    (r"\.experts\.(\*\.)?(down_proj|w2)(\.|$)", "expert_row"),
    (r"\.block_sparse_moe\.input_linear\.", "expert_column"),
    (r"\.block_sparse_moe\.output_linear\.", "expert_row"),
    (r"\.encoder\.layer\.\*\.attention\.[qkv]_proj\.", "replicated"),  # InternVL's own tower
    # A tower has as many KV heads as heads.
    (r"\.(vision_tower|vision_model|audio_tower|encoder)\.(.*\.)?(k_proj|v_proj)\.", "column"),
    (r"\.(k_proj|v_proj)\.", "kv"),
    (
        r"\.(q_proj|qkv_proj|query_key_value|c_attn|query|key|value|gate_proj|up_proj"
        r"|gate_up_proj)\.",
        "column",
    ),
    (r"\.(q_b_proj|kv_b_proj|w1|w3|fc1|fc_in|c_fc|dense_h_to_4h|intermediate\.dense)\.", "column"),
    (r"\.(mamba|mixer)\.(in_proj|conv1d|dt_proj|norm|A_log|D|dt_bias)(\.|$)", "column"),
    (r"\.linear_attn\.(in_proj_\w+|conv1d|A_log|dt_bias)(\.|$)", "column"),
    (r"\.conv\.(in_proj|conv)\.", "column"),
    (r"\.visual\.(blocks\.\*\.attn\.qkv|.*\.linear_fc1)\.", "column"),
    (r"\.gate_up_proj_adapter_list\.", "column"),
    (r"\.(mamba|mixer)\.x_proj\.", "row"),
    (r"\.visual\.(blocks\.\*\.attn\.proj|merger\.mlp\.\*|.*\.linear_fc2)\.", "row"),
    (
        r"\.(o_proj|out_proj|down_proj|w2|fc2|fc_out|c_proj|dense_4h_to_h|output\.dense"
        r"|(self_)?attention\.dense|self_attn\.dense)\.",
        "row",
    ),
    (
        r"\.(embed_tokens|lm_head|wte|word_embeddings|embed_in|embed_out|backbone\.embeddings)\.",
        "vocab",
    ),
)


def parse_shard(name: str) -> Shard:
    """The sharding of the weight `name` (numbers as `*`); replicated where no pattern matches."""
    for pattern, shard in _SHARDS:
        if re.search(pattern, f".{name}"):
            return shard
    return "replicated"
