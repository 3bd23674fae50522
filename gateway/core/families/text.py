"""The linear layers of each model family, uncut and before quantization: sizes as config.json fixes them. Pure.

Sources: vllm/model_executor/models/ of 0.19.1 and 0.33.0, the file named at each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.core.blueprint import Built
from gateway.core.fields import Fields


def _attention(fields: Fields, path: str, numbers: Sequence[int], *, fused: bool = False, gated: bool = False) -> list[Built]:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    head = fields.integer("head_dim", default=max(1, hidden // heads))
    parts = (heads * head * (2 if gated else 1), kv_heads * head, kv_heads * head)
    modules = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    return [
        Built(f"{path}.qkv_proj", numbers, hidden, parts, "qkv", modules, heads=heads, kv_heads=kv_heads),
        Built(f"{path}.o_proj", numbers, heads * head, (hidden,), "row"),
    ]


def _mlp(path: str, numbers: Sequence[int], hidden: int, width: int, *, fused: bool = False) -> list[Built]:
    modules = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    return [
        Built(f"{path}.gate_up_proj", numbers, hidden, (width, width), "merged", modules),
        Built(f"{path}.down_proj", numbers, width, (hidden,), "row"),
    ]


def _moe(path: str, numbers: Sequence[int], hidden: int, width: int, experts: int, router: Built) -> list[Built]:
    return [
        router,
        Built(f"{path}.experts.w13", numbers, hidden, (width, width), "expert_column", experts=experts),
        Built(f"{path}.experts.w2", numbers, width, (hidden,), "expert_row", experts=experts),
    ]


def _router(name: str, numbers: Sequence[int], hidden: int, experts: int) -> Built:
    """Routers are whole on every rank and not quantized."""
    return Built(name, numbers, hidden, (experts,), "replicated", quantizable=False)


def _dense(fields: Fields, family: str, layer: str) -> list[Built]:
    numbers, hidden = range(_layers(fields)), fields.integer("hidden_size")
    fused = family == "phi3"
    width = fields.integer("intermediate_size")
    return _attention(fields, f"{layer}.self_attn", numbers, fused=fused) + _mlp(
        f"{layer}.mlp", numbers, hidden, width, fused=fused
    )


def _mixtral(fields: Fields, _: str, layer: str) -> list[Built]:
    numbers, hidden, experts = range(_layers(fields)), fields.integer("hidden_size"), fields.integer("num_local_experts")
    path = f"{layer}.block_sparse_moe"
    router = _router(f"{path}.gate", numbers, hidden, experts)
    moe = _moe(path, numbers, hidden, fields.integer("intermediate_size"), experts, router)
    return _attention(fields, f"{layer}.self_attn", numbers) + moe


def _gpt_oss(fields: Fields, _: str, layer: str) -> list[Built]:
    numbers, hidden, experts = range(_layers(fields)), fields.integer("hidden_size"), fields.integer("num_local_experts")
    router = _router(f"{layer}.mlp.router", numbers, hidden, experts)
    moe = _moe(f"{layer}.mlp", numbers, hidden, fields.integer("intermediate_size"), experts, router)
    return _attention(fields, f"{layer}.attn", numbers) + moe


def _qwen_moe(fields: Fields, family: str, layer: str) -> list[Built]:
    numbers = range(_layers(fields))
    return _attention(fields, f"{layer}.self_attn", numbers) + _qwen_mlps(fields, family, layer, numbers)


def _qwen_mlps(fields: Fields, family: str, layer: str, numbers: Sequence[int]) -> list[Built]:
    """The MLPs of Qwen2-MoE and later: experts every `decoder_sparse_step` layers, with one expert that all tokens take."""
    hidden, path = fields.integer("hidden_size"), f"{layer}.mlp"
    sparse = _sparse_layers(fields, numbers)
    rest = [number for number in numbers if number not in sparse]
    built = _mlp(path, rest, hidden, fields.integer("intermediate_size")) if rest else []
    experts = fields.integer("num_experts")
    # Only Qwen3-MoE hands its router the checkpoint's quantization (models/qwen3_moe.py:176 of 0.19.1, :170 of 0.33.0).
    quantizable = family == "qwen3_moe"
    router = Built(f"{path}.gate", sparse, hidden, (experts,), "replicated", quantizable=quantizable)
    built += _moe(path, sparse, hidden, fields.integer("moe_intermediate_size"), experts, router)
    if fields.config.get("shared_expert_intermediate_size"):
        built += _mlp(f"{path}.shared_expert", sparse, hidden, fields.integer("shared_expert_intermediate_size"))
        built.append(_router(f"{path}.shared_expert_gate", sparse, hidden, 1))
    return built


def _sparse_layers(fields: Fields, numbers: Sequence[int]) -> list[int]:
    """The layers with experts. Source: Qwen3MoeDecoderLayer (models/qwen3_moe.py)."""
    step, dense = fields.integer("decoder_sparse_step", default=1), fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    without = set(dense)
    return [number for number in numbers if (number + 1) % step == 0 and number not in without]


def _qwen_hybrid(fields: Fields, family: str, layer: str) -> list[Built]:
    """Qwen3-Next and Qwen3.5: gated delta nets, and every n-th layer gated full attention (models/qwen3_next.py, qwen3_5.py)."""
    numbers, hidden = range(_layers(fields)), fields.integer("hidden_size")
    full = _full_layers(fields, numbers)
    linear = [number for number in numbers if number not in set(full)]
    gated = fields.config.get("attn_output_gate", True) is not False
    built = _attention(fields, f"{layer}.self_attn", full, gated=gated)
    key = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    heads = fields.integer("linear_num_value_heads")
    value = heads * fields.integer("linear_value_head_dim")
    # Qwen3-Next stores what it computes with, interleaved; Qwen3.5 stores the two halves of each.
    stored = family == "qwen3_next"
    path = f"{layer}.linear_attn"
    built += [
        Built(
            f"{path}.conv1d",
            linear,
            fields.integer("linear_conv_kernel_dim"),
            (key, key, value),
            "merged",
            quantizable=False,
        ),
        Built(
            f"{path}.in_proj_qkvz",
            linear,
            hidden,
            (key, key, value, value),
            "merged",
            () if stored else ("in_proj_qkv", "in_proj_z"),
        ),
        Built(f"{path}.in_proj_ba", linear, hidden, (heads, heads), "merged", () if stored else ("in_proj_b", "in_proj_a")),
        Built(f"{path}.out_proj", linear, value, (hidden,), "row"),
    ]
    if family == "qwen3_5_text":
        return built + _mlp(f"{layer}.mlp", numbers, hidden, fields.integer("intermediate_size"))
    return built + _qwen_mlps(fields, family, layer, numbers)


def _full_layers(fields: Fields, numbers: Sequence[int]) -> list[int]:
    kinds = fields.config.get("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", default=4)
        return [number for number in numbers if (number + 1) % every == 0]
    known = ("full_attention", "linear_attention")
    if not isinstance(kinds, list) or len(kinds) != len(numbers) or not all(kind in known for kind in kinds):
        raise fields.wrong("layer_types", f"a list of {len(numbers)} times full_attention or linear_attention")
    return [number for number, kind in enumerate(kinds) if kind == "full_attention"]


def qwen_vision(fields: Fields) -> list[Built]:
    """The vision tower of Qwen3.5 (models/qwen3_vl.py)."""
    blocks, hidden, width = range(fields.integer("depth")), fields.integer("hidden_size"), fields.integer("intermediate_size")
    merged = hidden * fields.integer("spatial_merge_size", default=2) ** 2
    path, heads = "visual.blocks.*", fields.integer("num_heads")
    return [
        Built(f"{path}.attn.qkv", blocks, hidden, (hidden, hidden, hidden), "qkv", heads=heads, kv_heads=heads),
        Built(f"{path}.attn.proj", blocks, hidden, (hidden,), "row"),
        Built(f"{path}.mlp.linear_fc1", blocks, hidden, (width,), "column"),
        Built(f"{path}.mlp.linear_fc2", blocks, width, (hidden,), "row"),
        Built("visual.merger.linear_fc1", (0,), merged, (merged,), "column"),
        Built("visual.merger.linear_fc2", (0,), merged, (fields.integer("out_hidden_size"),), "row"),
    ]


def _deepseek(fields: Fields, _: str, layer: str) -> list[Built]:
    """Multi-head latent attention (models/deepseek_v2.py): latents are whole on every rank, heads are cut."""
    numbers, hidden, heads = range(_layers(fields)), fields.integer("hidden_size"), fields.integer("num_attention_heads")
    latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    path, query = f"{layer}.self_attn", heads * (nope + rope)
    if fields.config.get("q_lora_rank") is None:
        built = [
            Built(f"{path}.q_proj", numbers, hidden, (query,), "column", heads=heads),
            Built(f"{path}.kv_a_proj_with_mqa", numbers, hidden, (latent + rope,), "replicated"),
        ]
    else:
        rank = fields.integer("q_lora_rank")
        fused = ("q_a_proj", "kv_a_proj_with_mqa")
        built = [
            Built(f"{path}.fused_qkv_a_proj", numbers, hidden, (rank, latent + rope), "replicated", fused),
            Built(f"{path}.q_b_proj", numbers, rank, (query,), "column", heads=heads),
        ]
    built += [
        Built(f"{path}.kv_b_proj", numbers, latent, (heads * (nope + value),), "column", heads=heads),
        Built(f"{path}.o_proj", numbers, heads * value, (hidden,), "row"),
    ]
    return built + _late_moe(fields, layer, numbers)


def _glm_moe(fields: Fields, _: str, layer: str) -> list[Built]:
    numbers = range(_layers(fields))
    return _attention(fields, f"{layer}.self_attn", numbers) + _late_moe(fields, layer, numbers)


def _late_moe(fields: Fields, layer: str, numbers: Sequence[int]) -> list[Built]:
    """Dense MLPs first, then experts, with some that all tokens take (DeepSeek, GLM-4-MoE)."""
    hidden, path = fields.integer("hidden_size"), f"{layer}.mlp"
    first, step = fields.integer("first_k_dense_replace", default=0, least=0), fields.integer("moe_layer_freq", default=1)
    sparse = [number for number in numbers if number >= first and number % step == 0]
    dense = sorted(set(numbers) - set(sparse))
    experts, width = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    built = _mlp(path, dense, hidden, fields.integer("intermediate_size")) if dense else []
    built += _moe(path, sparse, hidden, width, experts, _router(f"{path}.gate", sparse, hidden, experts))
    if fields.config.get("n_shared_experts"):
        built += _mlp(f"{path}.shared_experts", sparse, hidden, width * fields.integer("n_shared_experts"))
    return built


# More layers than any model has: what says so is broken, or made to break us.
_MOST_LAYERS = 2000


def _layers(fields: Fields) -> int:
    layers = fields.integer("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.wrong("num_hidden_layers", f"at most {_MOST_LAYERS}")
    return layers


Family = Callable[[Fields, str, str], list[Built]]
FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "gemma", "gemma2", "gemma3_text", "phi3"), _dense),
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _qwen_moe),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _qwen_hybrid),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "glm4_moe": _glm_moe,
}
# Families around a text model that is configured in `text_config`.
NESTED = {"qwen3_5", "qwen3_5_moe"}
# Module paths of the checkpoint that the engine's model class names otherwise (hf_to_vllm_mapper).
_QWEN_PATHS = (
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)
RENAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "gpt_oss": ((".self_attn.", ".attn."),),
    **dict.fromkeys(NESTED, _QWEN_PATHS),
}
