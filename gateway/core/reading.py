"""From config.json and tensor headers to a ModelSpec.

Shapes follow from the headers where there are any, else from the config for families whose layout the config
fixes. Everything downstream works on tensor groups: a weight name with its layer and expert numbers as `*`, how
often it occurs, its shape, and how tensor parallelism cuts it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from gateway.domain import AttentionGroup, Experts, ModelSpec, Quant, Shard, TensorGroup
from gateway.errors import BadModel


class Tensor(NamedTuple):
    """One tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]


# How tensor parallelism cuts a weight, by the last named module of its path. Source: the parallel linear classes
# that vLLM's model files use (vllm/model_executor/layers/linear.py and models/{llama,qwen2,qwen3_moe,mixtral}.py).
_SHARDS: tuple[tuple[str, Shard], ...] = (
    (r"experts\.\*\.(gate_proj|up_proj|w1|w3)\.|experts\.gate_up_proj", "expert_column"),
    (r"experts\.\*\.(down_proj|w2)\.|experts\.down_proj", "expert_row"),
    (r"\.(k_proj|v_proj)\.", "kv"),
    (r"\.(q_proj|gate_proj|up_proj|gate_up_proj|fc1|c_fc)\.", "column"),
    (r"\.(o_proj|out_proj|down_proj|fc2)\.", "row"),
    (r"(embed_tokens|lm_head|wte|word_embeddings)\.", "vocab"),
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

# Families whose tensors the config fixes: plain decoder, with the parts that differ.
_DENSE = {"llama", "mistral", "qwen2", "qwen3", "granite"}
_MOE = {"mixtral", "qwen2_moe", "qwen3_moe"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_QK_NORM = {"qwen3", "qwen3_moe"}
# Encoders attend in both directions and generate nothing, so engines keep no KV cache for them.
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "nomic_bert"}


def read_model(
    source: str,
    revision: str | None,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
    file_bytes: int | None,
    remote_code: tuple[str, ...],
    task_hint: Literal["generate", "embed"] | None,
) -> ModelSpec:
    """Raises BadModel naming the field of config.json that is missing or cannot be."""
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    fields = _Fields(cast("Mapping[str, Any]", text), source)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise BadModel(
            f"config.json of {source} does not name an architecture.",
            hint="It needs `architectures`, as transformers writes it.",
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadModel(f"config.json of {source} has no `model_type`.", hint="Is this a transformers model folder?")
    attention = _attention(fields, encoder=model_type in _ENCODERS)
    experts = _experts(fields)
    dtype = _dtype(config, fields, tensors)
    quant = config.get("quantization_config", fields.config.get("quantization_config"))
    if quant is not None and (not isinstance(quant, dict) or not isinstance(quant.get("quant_method"), str)):
        raise BadModel(f"`quantization_config` of {source} has no `quant_method`.", hint="Repair config.json.")
    if tensors is None:
        groups, origin = _from_config(fields, model_type, attention[0], experts, dtype), "config"
    else:
        groups, origin = group_tensors(tensors), "headers"
    return ModelSpec(
        source=source,
        revision=revision,
        architecture=architectures[0],
        model_type=model_type,
        task=task_hint or "generate",
        dtype=cast("Any", dtype),
        max_position=fields.integer("max_position_embeddings", "n_positions", "max_sequence_length", default=2048),
        hidden=fields.integer("hidden_size", "n_embd", "d_model"),
        vocab=fields.integer("vocab_size"),
        attention=attention,
        experts=experts,
        quant=Quant(method=quant["quant_method"], config=quant) if quant else None,
        tensors=groups,
        tensors_from=cast("Any", origin),
        remote_code=remote_code,
        file_bytes=file_bytes,
    )


def group_tensors(tensors: Mapping[str, Tensor]) -> tuple[TensorGroup, ...]:
    """Fold tensors that differ only in their numbers, dtype and shape being equal."""
    counts: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for name, tensor in tensors.items():
        key = (_NUMBER.sub("*", name), tensor.dtype, tensor.shape)
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        TensorGroup(name=name, count=count, shape=shape, dtype=dtype, shard=shard_of(name))
        for (name, dtype, shape), count in sorted(counts.items())
    )


def shard_of(name: str) -> Shard:
    """How tensor parallelism cuts the weight `name` (numbers as `*`); what no rule knows is replicated."""
    for pattern, shard in _SHARDS:
        if re.search(pattern, f".{name}"):
            return shard
    return "replicated"


class _Fields:
    """Checked access to config.json: a wrong type is the user's to repair, not a traceback."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**40:
                raise BadModel(
                    f"config.json of {self.source} has {name}={str(value)[:80]!r}; it must be a positive number.",
                    hint="Repair config.json.",
                )
            return value
        if default is None:
            raise BadModel(f"config.json of {self.source} has no `{names[0]}`.", hint="Is this a transformers language model?")
        return default

    def flag(self, name: str) -> bool:
        return self.config.get(name) is True


def _attention(fields: _Fields, *, encoder: bool) -> tuple[AttentionGroup, ...]:
    heads = fields.integer("num_attention_heads", "n_head")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    head_dim = fields.integer("head_dim", default=max(1, fields.integer("hidden_size", "n_embd", "d_model") // heads))
    layers = fields.integer("num_hidden_layers", "n_layer")
    if encoder:
        return (AttentionGroup(kind="encoder", layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim),)
    kinds = fields.config.get("layer_types")
    sliding = 0
    window = fields.config.get("sliding_window")
    if isinstance(kinds, list):
        unknown = {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}
        if unknown:
            raise BadModel(
                f"{fields.source} has layers of kind {', '.join(sorted(unknown))}, whose memory these rules do not know yet.",
                hint="Serve it by an engine started elsewhere and add that as an endpoint.",
            )
        sliding = kinds.count("sliding_attention")
        layers = len(kinds)
    elif window is not None and fields.config.get("use_sliding_window", True) is True:
        sliding = layers
    groups = []
    if layers - sliding:
        groups.append(AttentionGroup(kind="full", layers=layers - sliding, heads=heads, kv_heads=kv_heads, head_dim=head_dim))
    if sliding:
        size = fields.integer("sliding_window")
        groups.append(
            AttentionGroup(kind="sliding", layers=sliding, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=size)
        )
    return tuple(groups)


def _experts(fields: _Fields) -> Experts | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if all(fields.config.get(name) is None for name in names):
        return None
    return Experts(
        count=fields.integer(*names),
        per_token=fields.integer("num_experts_per_tok", "experts_per_token"),
        intermediate=fields.integer("moe_intermediate_size", "intermediate_size"),
        shared_intermediate=fields.integer("shared_expert_intermediate_size", default=1)
        if fields.config.get("shared_expert_intermediate_size")
        else 0,
    )


def _dtype(config: Mapping[str, Any], fields: _Fields, tensors: Mapping[str, Tensor] | None) -> str:
    for value in (fields.config.get("dtype"), fields.config.get("torch_dtype"), config.get("dtype"), config.get("torch_dtype")):
        if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
            return value.removeprefix("torch.")
    stored = {tensor.dtype for tensor in (tensors or {}).values()}
    for name, safetensors_name in _DTYPES.items():
        if safetensors_name in stored:
            return name
    return "float16"


def _from_config(
    fields: _Fields, family: str, attention: AttentionGroup, experts: Experts | None, dtype: str
) -> tuple[TensorGroup, ...]:
    if family not in _DENSE | _MOE:
        raise BadModel(
            f"The weights of {fields.source} are not here, and its family {family} is not one whose shapes config.json fixes.",
            hint="Give a folder or repository that has its safetensors files.",
        )
    layers = fields.integer("num_hidden_layers")
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    stored = _DTYPES[dtype]
    groups: list[TensorGroup] = []

    def add(name: str, *shape: int, count: int = layers) -> None:
        groups.append(TensorGroup(name=name, count=count, shape=shape, dtype=stored, shard=shard_of(name)))

    add("model.embed_tokens.weight", vocab, hidden, count=1)
    if not fields.flag("tie_word_embeddings"):
        add("lm_head.weight", vocab, hidden, count=1)
    add("model.norm.weight", hidden, count=1)
    layer = "model.layers.*"
    add(f"{layer}.input_layernorm.weight", hidden)
    add(f"{layer}.post_attention_layernorm.weight", hidden)
    for name, size in (("q", q), ("k", kv), ("v", kv)):
        add(f"{layer}.self_attn.{name}_proj.weight", size, hidden)
        if family in _QKV_BIAS or fields.flag("attention_bias"):
            add(f"{layer}.self_attn.{name}_proj.bias", size)
    add(f"{layer}.self_attn.o_proj.weight", hidden, q)
    if family in _QK_NORM:
        add(f"{layer}.self_attn.q_norm.weight", attention.head_dim)
        add(f"{layer}.self_attn.k_norm.weight", attention.head_dim)
    if experts is None:
        width = fields.integer("intermediate_size")
        add(f"{layer}.mlp.gate_proj.weight", width, hidden)
        add(f"{layer}.mlp.up_proj.weight", width, hidden)
        add(f"{layer}.mlp.down_proj.weight", hidden, width)
        return tuple(groups)
    add(f"{layer}.mlp.gate.weight", experts.count, hidden)
    for name in ("gate_proj", "up_proj"):
        add(f"{layer}.mlp.experts.*.{name}.weight", experts.intermediate, hidden, count=layers * experts.count)
    add(f"{layer}.mlp.experts.*.down_proj.weight", hidden, experts.intermediate, count=layers * experts.count)
    if experts.shared_intermediate:
        add(f"{layer}.mlp.shared_expert.gate_proj.weight", experts.shared_intermediate, hidden)
        add(f"{layer}.mlp.shared_expert.up_proj.weight", experts.shared_intermediate, hidden)
        add(f"{layer}.mlp.shared_expert.down_proj.weight", hidden, experts.shared_intermediate)
        add(f"{layer}.mlp.shared_expert_gate.weight", 1, hidden)
    return tuple(groups)
