"""Parts that model families share: sizes before sharding, names of the engine. Pure.

The parts include softmax attention, with its sliding layers, and the MLPs of experts.
Sources: vllm/model_executor/models/ of 0.19.1 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gateway.domain import AttentionGroup, Shard, TensorGroup
from gateway.errors import BadModel
from gateway.models.families.blueprint import LinearLayer
from gateway.models.families.config import Fields, quote
from gateway.models.families.field_names import HEADS, HIDDEN_SIZE, KV_HEADS, LAYERS

# Encoders attend in both directions and generate nothing, so engines keep no KV cache for them.
ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "nomic_bert"}

# The head size of a config that names none, where it is not hidden size / heads.
# Source: the defaults of transformers' configuration classes.
_HEAD_DIMS = {
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "qwen3": 128,
    "qwen3_next": 256,
    "gpt_oss": 64,
}
_HEAD_DIMS |= {"qwen3_5_text": 256, "qwen3_5_moe_text": 256}

# Families where every n-th layer is full attention and the rest slide, unless `layer_types` says
# otherwise. Source: the defaults of transformers' configuration classes, which fill `layer_types`
# for the engine.
_FULL_LAYER_INTERVALS = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "gemma3": 6,
    "gemma3_text": 6,
}
# Families where all layers slide. Any other family counts as full attention, which never
# underestimates the cache.
_ALL_SLIDE = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
_LAYER_KINDS = ("full_attention", "attention", "sliding_attention")
# Fields of models whose cache is not keys and values per head and token: latents, recurrent states.
_OTHER_STATE = ("kv_lora_rank", "global_head_dim", "block_configs", "is_encoder_decoder")
_RECURRENT = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "layers_block_type",
    "attn_type_list",
    "hybrid_override_pattern",
)


def read_heads(fields: Fields, family: str) -> tuple[int, int, int]:
    """(query heads, KV heads, head size)."""
    heads = fields.integer(*HEADS)
    hidden = fields.integer(*HIDDEN_SIZE)
    # Multi-query attention has one KV head. Source: FalconModelArchConfigConvertor
    # (vllm/transformers_utils).
    is_single = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    kv_heads = 1 if is_single else fields.integer(*KV_HEADS, default=heads)
    has_head_dim = fields.config.get("head_dim") is not None or family in _HEAD_DIMS
    if heads % kv_heads or (hidden % heads and not has_head_dim):
        raise BadModel(
            f"config.json of {fields.source} has {heads} attention heads, which its {kv_heads} KV"
            f" heads or its hidden size of {hidden} do not divide into.",
            hint="Repair config.json, or take the model from where it was published.",
        )
    return (
        heads,
        kv_heads,
        fields.integer("head_dim", default=_HEAD_DIMS.get(family, max(1, hidden // heads))),
    )


def softmax_groups(
    fields: Fields, family: str, *, has_sinks: bool = False
) -> tuple[AttentionGroup, ...]:
    """The attention groups of all layers: full, sliding, or encoder."""
    heads, kv_heads, head_dim = read_heads(fields, family)
    layers = fields.integer(*LAYERS)
    if family in ENCODERS:
        kind: Literal["encoder"] = "encoder"
        return (
            AttentionGroup(
                kind=kind,
                layers=layers,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                causal=False,
            ),
        )
    kinds = _layer_kinds(fields, layers)
    if kinds is None:
        sliding = _sliding_layers(fields, family, layers)
    else:
        sliding = [number for number, kind in enumerate(kinds) if kind == "sliding_attention"]
    # Some checkpoints write 0 for no window. Source: vllm/config/model.py.
    window = (
        fields.integer("sliding_window")
        if sliding and fields.config.get("sliding_window") != 0
        else None
    )
    # Source: Gemma3TextConfig of transformers, and gemma3.py and llama.py of
    # vllm/model_executor/models/.
    both_ways = (
        fields.flag("use_bidirectional_attention") or fields.config.get("is_causal") is False
    )
    if window is not None and family == "gemma3_text" and both_ways:
        window = window // 2 + 1
    groups: tuple[tuple[Literal["full", "sliding"], Sequence[int], int | None], ...] = (
        ("full", range(layers), None),
    )
    if window is not None:
        slides = {*sliding}
        groups = (
            ("full", [n for n in range(layers) if n not in slides], None),
            ("sliding", sliding, window),
        )
    return tuple(
        AttentionGroup(
            kind=kind,
            layers=len(numbers),
            numbers=tuple(numbers) if len(numbers) < layers else (),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=size,
            has_sinks=has_sinks,
            causal=not both_ways,
        )
        for kind, numbers, size in groups
        if numbers
    )


def _layer_kinds(fields: Fields, layers: int) -> list[str] | None:
    """The checked `layer_types`, or None where the config has none."""
    kinds = fields.config.get("layer_types")
    states = _OTHER_STATE if kinds is not None else _OTHER_STATE + _RECURRENT
    unknown_state = next(
        (name for name in states if fields.config.get(name) and not _attends(fields, name)), None
    )
    if isinstance(kinds, list) and unknown_state is None:
        unknown_state = next(
            (f"layer_types of {quote(kind)}" for kind in kinds if kind not in _LAYER_KINDS), None
        )
    if unknown_state is not None:
        raise BadModel(
            f"{fields.source} has layers whose memory is not known ({unknown_state} in"
            " config.json).",
            hint="Start an engine elsewhere, and add it: `fitserve add NAME --endpoint URL`.",
        )
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise fields.field_error("layer_types", f"a list with one kind for each of {layers} layers")
    return kinds


def _attends(fields: Fields, name: str) -> bool:
    """Whether this field declares every layer as attention.

    Source: `attn_type_list` in MiniMax's configs, where 0 is a layer with a state.
    """
    value = fields.config[name]
    return name == "attn_type_list" and isinstance(value, list) and all(kind == 1 for kind in value)


def _sliding_layers(fields: Fields, family: str, layers: int) -> Sequence[int]:
    """The sliding layers of a config without `layer_types`."""
    if not fields.config.get("sliding_window"):
        return ()
    if "use_sliding_window" in fields.config:
        # Qwen: the layers from `max_window_layers` on.
        is_used = fields.flag("use_sliding_window")
        return (
            range(
                min(layers, fields.integer("max_window_layers", default=layers, minimum=0)), layers
            )
            if is_used
            else ()
        )
    if family in _FULL_LAYER_INTERVALS:
        period = fields.integer("sliding_window_pattern", default=_FULL_LAYER_INTERVALS[family])
        return [number for number in range(layers) if (number + 1) % period]
    return range(layers) if family in _ALL_SLIDE else ()


# No real model has this many layers: a config that says so is damaged or hostile.
_MAX_LAYERS = 2000


def layer_numbers(fields: Fields) -> range:
    layers = fields.integer(*LAYERS)
    if layers > _MAX_LAYERS:
        raise fields.field_error(
            next(name for name in LAYERS if name in fields.config), f"at most {_MAX_LAYERS}"
        )
    return range(layers)


def tensor(
    name: str, count: int, *shape: int, shard: Shard = "replicated", dtype: str = ""
) -> TensorGroup:
    """A parameter outside of linear layers, in `count` layers. dtype "": the model's."""
    return TensorGroup(name=name, count=count, shape=shape, dtype=dtype, shard=shard)


def embedding_and_head(
    fields: Fields, path: str, *, is_tied: bool = False, embedding: str = "embed_tokens"
) -> list[TensorGroup]:
    """Embedding, last norm and output head. is_tied: the default of transformers for the family."""
    vocab = fields.integer("vocab_size")
    hidden = fields.integer("hidden_size")
    tensors = [
        tensor(f"{path}.{embedding}.weight", 1, vocab, hidden, shard="vocab"),
        tensor(f"{path}.norm.weight", 1, hidden),
    ]
    if fields.config.get("tie_word_embeddings", is_tied) is not True:
        tensors.append(
            tensor(f"{path.removesuffix('model')}lm_head.weight", 1, vocab, hidden, shard="vocab")
        )
    return tensors


# The norms of a layer, before attention and before the MLP, as most engines' models name them.
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def norms(path: str, count: int, size: int, *names: str) -> list[TensorGroup]:
    """Norms without bias under `path`, of `size` elements each."""
    return [tensor(f"{path}.{name}.weight", count, size) for name in names] if count else []


def attention(
    fields: Fields,
    family: str,
    path: str,
    numbers: Sequence[int],
    *,
    is_fused: bool = False,
    is_gated: bool = False,
    biases: tuple[bool, bool] = (False, False),
) -> list[LinearLayer]:
    """The projections of softmax attention.

    is_fused: the checkpoint stores one fused projection.
    is_gated: every query has a gate.
    biases: whether (query, key and value; output) projections have a bias.
    """
    heads, kv_heads, head = read_heads(fields, family)
    hidden = fields.integer("hidden_size")
    widths = (heads * head * (2 if is_gated else 1), kv_heads * head, kv_heads * head)
    modules = ("qkv_proj",) if is_fused else ("q_proj", "k_proj", "v_proj")
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "bias": biases[0]}
    return [
        LinearLayer(
            name=f"{path}.qkv_proj",
            numbers=numbers,
            k=hidden,
            parts=widths,
            shard="qkv",
            modules=modules,
            **sizes,
        ),
        LinearLayer(f"{path}.o_proj", numbers, heads * head, (hidden,), "row", bias=biases[1]),
    ]


def mlp(
    path: str,
    numbers: Sequence[int],
    hidden: int,
    width: int,
    *,
    is_fused: bool = False,
    bias: bool = False,
) -> list[LinearLayer]:
    """A gated MLP in the layers `numbers`; empty without layers."""
    if not numbers:
        return []
    modules = ("gate_up_proj",) if is_fused else ("gate_proj", "up_proj")
    return [
        LinearLayer(
            name=f"{path}.gate_up_proj",
            numbers=numbers,
            k=hidden,
            parts=(width, width),
            shard="merged",
            modules=modules,
            bias=bias,
        ),
        LinearLayer(f"{path}.down_proj", numbers, width, (hidden,), "row", bias=bias),
    ]


def experts(
    path: str, numbers: Sequence[int], hidden: int, width: int, count: int, *, bias: bool = False
) -> list[LinearLayer]:
    """`count` gated MLPs after a router, as the two products that engines compute for all."""
    return [
        LinearLayer(
            f"{path}.experts.w13",
            numbers,
            hidden,
            (width, width),
            "expert_column",
            experts=count,
            bias=bias,
        ),
        LinearLayer(
            f"{path}.experts.w2", numbers, width, (hidden,), "expert_row", experts=count, bias=bias
        ),
    ]


def router(
    name: str,
    numbers: Sequence[int],
    hidden: int,
    count: int,
    *,
    bias: bool = False,
    is_exact: bool = False,
) -> LinearLayer:
    """A router: replicated and not quantized."""
    return LinearLayer(
        name,
        numbers,
        hidden,
        (count,),
        "replicated",
        is_quantizable=False,
        bias=bias,
        is_exact=is_exact,
    )


def qwen_mlps(fields: Fields, family: str, layer: str, numbers: Sequence[int]) -> list[LinearLayer]:
    """The MLPs of Qwen2-MoE and later: experts every `decoder_sparse_step` layers, one shared."""
    hidden = fields.integer("hidden_size")
    path = f"{layer}.mlp"
    sparse_numbers = _sparse_layers(fields, numbers)
    dense_numbers = [number for number in numbers if number not in sparse_numbers]
    linears = (
        mlp(path, dense_numbers, hidden, fields.integer("intermediate_size"))
        if dense_numbers
        else []
    )
    if not sparse_numbers:
        return linears
    # transformers 5 reads the first name and writes the second (attribute_map of Qwen3MoeConfig).
    count = fields.integer("num_experts", "num_local_experts")
    # Only Qwen3-MoE hands its router the checkpoint's quantization (models/qwen3_moe.py:176 of
    # 0.19.1, :170 of 0.33.0).
    is_quantizable = family == "qwen3_moe"
    linears.append(
        LinearLayer(
            f"{path}.gate",
            sparse_numbers,
            hidden,
            (count,),
            "replicated",
            is_quantizable=is_quantizable,
        )
    )
    linears += experts(path, sparse_numbers, hidden, fields.integer("moe_intermediate_size"), count)
    has_shared_expert = bool(fields.config.get("shared_expert_intermediate_size"))
    if has_shared_expert:
        linears += mlp(
            f"{path}.shared_expert",
            sparse_numbers,
            hidden,
            fields.integer("shared_expert_intermediate_size"),
        )
    if has_shared_expert or family != "qwen3_moe":
        linears.append(router(f"{path}.shared_expert_gate", sparse_numbers, hidden, 1))
    return linears


def _sparse_layers(fields: Fields, numbers: Sequence[int]) -> list[int]:
    """The layers with experts. Source: Qwen3MoeDecoderLayer (models/qwen3_moe.py)."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise fields.field_error("mlp_only_layers", "a list of layer numbers")
    dense_numbers = set(dense)
    return [
        number for number in numbers if (number + 1) % step == 0 and number not in dense_numbers
    ]


def late_moe(
    fields: Fields, layer: str, numbers: Sequence[int], *, has_float_router: bool = False
) -> tuple[list[LinearLayer], list[TensorGroup]]:
    """Dense MLPs first, then experts with some shared experts (DeepSeek, GLM-4-MoE).

    A router in float32 (Glm4MoE in models/glm4_moe.py) does not count as a linear layer.
    """
    hidden = fields.integer("hidden_size")
    path = f"{layer}.mlp"
    first = fields.integer("first_k_dense_replace", minimum=0)
    step = fields.integer("moe_layer_freq", default=1)
    sparse_numbers = [number for number in numbers if number >= first and number % step == 0]
    dense_numbers = sorted(set(numbers) - set(sparse_numbers))
    linears = (
        mlp(path, dense_numbers, hidden, fields.integer("intermediate_size"))
        if dense_numbers
        else []
    )
    parameters: list[TensorGroup] = []
    if not sparse_numbers:
        return linears, parameters
    count = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    if has_float_router:
        parameters.append(
            tensor(f"{path}.gate.weight", len(sparse_numbers), count, hidden, dtype="F32")
        )
    else:
        linears.append(router(f"{path}.gate", sparse_numbers, hidden, count))
    if has_float_router or fields.config.get("topk_method") == "noaux_tc":
        parameters.append(
            tensor(f"{path}.gate.e_score_correction_bias", len(sparse_numbers), count, dtype="F32")
        )
    linears += experts(path, sparse_numbers, hidden, width, count)
    if "n_shared_experts" not in fields.config:
        raise fields.missing_field_error("n_shared_experts")
    if fields.config["n_shared_experts"]:
        linears += mlp(
            f"{path}.shared_experts",
            sparse_numbers,
            hidden,
            width * fields.integer("n_shared_experts"),
        )
    return linears, parameters
