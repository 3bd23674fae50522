"""Usual names of config fields, by their meaning. Pure."""

from __future__ import annotations

# Spellings of the same size. Source: CONFIG_FIELD_ALIASES in vllm/transformers_utils/config.py, and
# transformers.
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")


# Fields that hold the config of the text model.
TEXT_CONFIGS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "text_model_config",
    "thinker_config",
    "decoder",
)

LAYER_COUNT = (*LAYERS, "decoder_layers", "num_layers", "num_transformer_layers")

HEAD_COUNT = (*HEADS, "decoder_attention_heads", "num_heads")

MLP_WIDTH = (
    "intermediate_size",
    "ffn_hidden_size",
    "decoder_ffn_dim",
    "ffn_dim",
    "n_inner",
    "mlp_hidden_size",
)

DENSE_WIDTH = ("intermediate_size_mlp", "dense_intermediate_size", "block_ff_dim", *MLP_WIDTH)

EXPERT_COUNT = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)

EXPERT_WIDTH = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "expert_intermediate_size",
    *MLP_WIDTH,
)

SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "share_expert_dim",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")

SHARED_EXPERTS = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
)

FIRST_SPARSE_LAYER = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")

STATE_HEADS = (
    "mamba_n_heads",
    "mamba_num_heads",
    "linear_num_value_heads",
    "linear_num_heads",
    "num_linear_heads",
)

STATE_ROWS = ("mamba_d_head", "mamba_head_dim", "linear_value_head_dim", "linear_head_dim")

STATE_COLUMNS = ("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim")

STATE_GROUPS = ("mamba_n_groups", "n_groups", "linear_num_key_heads")

STATE_KERNEL = (
    "mamba_d_conv",
    "conv_kernel",
    "linear_conv_kernel_dim",
    "conv_L_cache",
    "conv_kernel_size",
    "short_conv_kernel_size",
)

# The width of an MLP in hidden sizes.
MAX_FACTOR = 1000

EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
