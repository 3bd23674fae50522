"""The weights of a model: how tensor parallelism cuts each, and which there are in families that the config fixes."""

from __future__ import annotations

import re

from gateway.core.fields import Fields
from gateway.domain import AttentionGroup, Experts, Shard, TensorGroup
from gateway.errors import BadModel

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

# Families whose tensors the config fixes: plain decoders, with the parts that differ.
_DENSE = {"llama", "mistral", "qwen2", "qwen3", "granite"}
_MOE = {"mixtral", "qwen2_moe", "qwen3_moe"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_QK_NORM = {"qwen3", "qwen3_moe"}
# Here `attention_bias` also means the output projection, and there is an `mlp_bias`.
_ALL_BIAS = {"llama", "granite"}


def shard_of(name: str) -> Shard:
    """How tensor parallelism cuts the weight `name` (numbers as `*`); what no rule knows is replicated."""
    for pattern, shard in _SHARDS:
        if re.search(pattern, f".{name}"):
            return shard
    return "replicated"


def tensors_of(
    fields: Fields, family: str, attention: AttentionGroup, experts: Experts | None, stored: str, *, headless: bool
) -> tuple[TensorGroup, ...]:
    """The tensor groups that the config says, stored in the dtype `stored`; without the output head when `headless`.

    Raises BadModel for a family whose shapes config.json does not fix.
    """
    if family not in _DENSE | _MOE:
        raise BadModel(
            f"The weights of {fields.source} are not here, and its family {family} is not one whose shapes config.json fixes.",
            hint="Give a folder or repository that has its safetensors files.",
        )
    if (family in _MOE) != (experts is not None):
        raise BadModel(
            f"config.json of {fields.source} is of the family {family}, but "
            f"{'names no number of experts' if family in _MOE else 'names experts'}.",
            hint="Repair config.json, or take the model from where it was published.",
        )
    layers, hidden, vocab = fields.integer("num_hidden_layers"), fields.integer("hidden_size"), fields.integer("vocab_size")
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    groups: list[TensorGroup] = []

    def add(name: str, *shape: int, count: int = layers) -> None:
        if count:
            groups.append(TensorGroup(name=name, count=count, shape=shape, dtype=stored, shard=shard_of(name)))

    def add_mlp(path: str, width: int, count: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            add(f"{path}.{name}.weight", *shape, count=count)
            if family in _ALL_BIAS and fields.flag("mlp_bias"):
                add(f"{path}.{name}.bias", shape[0], count=count)

    add("model.embed_tokens.weight", vocab, hidden, count=1)
    add("lm_head.weight", vocab, hidden, count=0 if headless else 1)
    add("model.norm.weight", hidden, count=1)
    layer = "model.layers.*"
    add(f"{layer}.input_layernorm.weight", hidden)
    add(f"{layer}.post_attention_layernorm.weight", hidden)
    biased = fields.flag("attention_bias")
    for name, size, inputs in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
        add(f"{layer}.self_attn.{name}_proj.weight", size, inputs)
        if (biased and (family in _ALL_BIAS or name != "o")) or (family in _QKV_BIAS and name != "o"):
            add(f"{layer}.self_attn.{name}_proj.bias", size)
    if family in _QK_NORM:
        add(f"{layer}.self_attn.q_norm.weight", attention.head_dim)
        add(f"{layer}.self_attn.k_norm.weight", attention.head_dim)
    if experts is None:
        add_mlp(f"{layer}.mlp", fields.integer("intermediate_size"), layers)
    elif family == "mixtral":
        add(f"{layer}.block_sparse_moe.gate.weight", experts.count, hidden)
        names = ("w1", "w3", "w2")
        add_mlp(f"{layer}.block_sparse_moe.experts.*", experts.intermediate, layers * experts.count, names)
    else:
        sparse = _sparse_layers(fields, layers)
        if sparse < layers:
            add_mlp(f"{layer}.mlp", fields.integer("intermediate_size"), layers - sparse)
        add(f"{layer}.mlp.gate.weight", experts.count, hidden, count=sparse)
        add_mlp(f"{layer}.mlp.experts.*", experts.intermediate, sparse * experts.count)
        if experts.shared_intermediate:
            add_mlp(f"{layer}.mlp.shared_expert", experts.shared_intermediate, sparse)
            add(f"{layer}.mlp.shared_expert_gate.weight", 1, hidden, count=sparse)
    return tuple(sorted(groups, key=lambda group: (group.name, group.dtype, group.shape)))


def _sparse_layers(fields: Fields, layers: int) -> int:
    """How many layers have experts. Source: Qwen3MoeDecoderLayer (vllm/model_executor/models/qwen3_moe.py)."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    return layers // step - len({number for number in dense if 0 <= number < layers and (number + 1) % step == 0})
