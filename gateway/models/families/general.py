"""The reader of unknown families: layers by the usual names of config fields. Pure.

The result is a forecast that names its guessed parts. Headers give the exact weights, and an
inquiry to the engine gives everything. Source of field names: the configuration classes of
transformers 5.19 and of vllm/transformers_utils/configs of 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gateway.domain import AttentionGroup, Recurrent, TensorGroup
from gateway.models.families.blueprint import Blueprint, Built
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    ENCODERS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    experts,
    mlp,
    norms,
    router,
    tensor,
)

_Kind = Literal["full", "sliding", "recurrent", "both", "none"]

# Fields that hold the config of the text model.
_TEXT = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "text_model_config",
    "thinker_config",
    "decoder",
)
_TOWERS = (
    "vision_config",
    "audio_config",
    "vision_tower_config",
    "audio_encoder_config",
    "encoder",
    "vit_config",
    "sound_config",
)

_LAYERS = (*LAYERS, "decoder_layers", "num_layers", "num_transformer_layers")
_HEADS = (*HEADS, "decoder_attention_heads", "num_heads")
_WIDTH = (
    "intermediate_size",
    "ffn_hidden_size",
    "decoder_ffn_dim",
    "ffn_dim",
    "n_inner",
    "mlp_hidden_size",
)
_DENSE_WIDTH = ("intermediate_size_mlp", "dense_intermediate_size", "block_ff_dim", *_WIDTH)
_COUNT = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_EXPERT_WIDTH = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "moe_ffn_hidden_size",
    "expert_intermediate_size",
    *_WIDTH,
)
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "share_expert_dim",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)
_FUNCTIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
# Activations of MLPs without a gate.
_PLAIN = {"relu", "relu2", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "xielu"}

_STATE_HEADS = (
    "mamba_n_heads",
    "mamba_num_heads",
    "linear_num_value_heads",
    "linear_num_heads",
    "num_linear_heads",
)
_STATE_ROWS = ("mamba_d_head", "mamba_head_dim", "linear_value_head_dim", "linear_head_dim")
_STATE_COLUMNS = ("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim")
_STATE_GROUPS = ("mamba_n_groups", "n_groups", "linear_num_key_heads")
_STATE_KERNEL = (
    "mamba_d_conv",
    "conv_kernel",
    "linear_conv_kernel_dim",
    "conv_L_cache",
    "conv_kernel_size",
    "short_conv_kernel_size",
)
_MAX_LAYERS = 2000
# The width of an MLP in hidden sizes.
_MAX_FACTOR = 1000


class Text(NamedTuple):
    """The part of a config that describes the text model, and whether it stands inside another.

    inner: that part alone; `fields` completes it by the rest of the file.
    """

    fields: Fields
    nested: bool
    inner: Mapping[str, Any]


def text_of(top: Fields) -> Text:
    """The config of the text model, completed by fields of the outer config."""
    config, nested = dict(top.config), False
    text_fields: Mapping[str, Any] = top.config
    for _ in range(2):  # thinker_config.text_config
        inner = next(
            (
                config[name]
                for name in _TEXT
                if isinstance(config.get(name), Mapping) and config[name]
            ),
            None,
        )
        if inner is None:
            break
        plain = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
        config, nested, text_fields = {**plain, **config, **inner}, True, inner
        for name in _TEXT:
            if name not in inner:
                config.pop(name, None)
    return Text(Fields(config, top.source), nested, text_fields)


def decoder(fields: Fields, path: str) -> Blueprint:
    """The text model. Raises BadModel where layers, heads or the hidden size are missing."""
    layers, hidden = layers_of(fields), _size(fields, HIDDEN)
    if layers > _MAX_LAYERS:
        raise fields.wrong(
            next(name for name in _LAYERS if name in fields.config), f"at most {_MAX_LAYERS}"
        )
    kinds = _kinds(fields, layers)
    layer = f"{path}.layers.*"
    numbers_of = {
        kind: [n for n, layer_kind in enumerate(kinds) if layer_kind == kind] for kind in {*kinds}
    }
    attends = sorted(n for kind in ("full", "sliding", "both") for n in numbers_of.get(kind, ()))
    recurs = sorted(n for kind in ("recurrent", "both") for n in numbers_of.get(kind, ()))
    parameters = _ends(fields, path, hidden) + norms(
        layer, layers, hidden, "input_layernorm", "post_attention_layernorm"
    )
    guessed = ["its attention"]
    linears, groups = _attention_layers(fields, layer, attends, kinds)
    if recurs:
        guessed.append("its recurrent layers")
        built, group = _recurrent_layers(fields, layer, recurs, hidden)
        linears += built
        groups.append(group)
    built, count = _mlps(fields, f"{layer}.mlp", _with_mlp(fields, layers), hidden)
    linears += built
    if _paired(fields):
        # A second attention, and two dense MLPs beside the experts: FlashDecoderLayer in
        # vllm/model_executor/models/longcat_flash.py.
        linears += _attention(fields, f"{layer}.self_attn.1", attends, hidden)[0]
        for place in range(2):
            linears += _mlp(
                f"{layer}.mlps.{place}", range(layers), hidden, _width(fields, hidden), gated=True
            )
        groups = [
            group.evolve(layers=2 * group.layers, numbers=tuple(sorted(group.numbers * 2)))
            for group in groups
        ]
    guessed.append("its experts" if count else "its MLPs")
    return Blueprint(tuple(linears), tuple(groups), tuple(parameters), tuple(guessed))


def _attention_layers(
    fields: Fields, layer: str, attends: Sequence[int], kinds: Sequence[_Kind]
) -> tuple[list[Built], list[AttentionGroup]]:
    """The projections and attention groups of the layers `attends`."""
    hidden = _size(fields, HIDDEN)
    linears: list[Built] = []
    groups: list[AttentionGroup] = []
    for config, members in _by_kv_heads(fields, len(kinds), attends):
        built, template = _attention(config, f"{layer}.self_attn", members, hidden)
        linears += built
        slides = [number for number in members if kinds[number] == "sliding"]
        window = _size(
            fields, ("sliding_window", "sliding_window_size", "attention_chunk_size"), default=0
        )
        full = members
        if slides and window:
            full = [number for number in members if number not in {*slides}]
        for kind, numbers, size in (
            ("full", full, None),
            ("sliding", slides if window else (), window),
        ):
            if numbers:
                plain = {} if template.kind == "mla" else {"kind": kind, "window": size}
                groups.append(template.evolve(layers=len(numbers), numbers=tuple(numbers), **plain))
    if any(fields.config.get("model_type") == family for family in ENCODERS):
        groups = [group.evolve(kind="encoder", window=None, causal=False) for group in groups]
    return linears, groups


def _recurrent_layers(
    fields: Fields, layer: str, recurs: Sequence[int], hidden: int
) -> tuple[list[Built], AttentionGroup]:
    linears, state = _recurrent(fields, f"{layer}.mixer", recurs, hidden)
    group = AttentionGroup(
        kind="recurrent",
        layers=len(recurs),
        numbers=tuple(recurs),
        heads=state.heads,
        kv_heads=state.groups,
        head_dim=state.columns,
        value_dim=state.rows,
        recurrent=state,
    )
    return linears, group


def towers(top: Fields) -> Blueprint:
    """Vision and audio towers as layers of attention and an MLP, replicated."""
    configs: list[Any] = [
        top.config,
        *(top.config[name] for name in _TEXT if isinstance(top.config.get(name), Mapping)),
    ]
    towers_found = [
        (name, config[name])
        for config in configs
        for name in _TOWERS
        if isinstance(config.get(name), Mapping)
    ]
    groups, parameters, guessed = [], [], []
    for name, config in dict(towers_found).items():
        fields = Fields(config, top.source)
        words = name.removesuffix("_config").replace("_", " ")
        guessed.append(f"its {words} tower")
        layers = _size(
            fields, ("depth", "encoder_layers", "num_encoder_layers", *_LAYERS), default=0
        )
        hidden = _size(fields, ("embed_dim", "encoder_dim", *HIDDEN, "width"), default=0)
        if not 0 < layers <= _MAX_LAYERS or not hidden:
            continue
        width = _size(fields, ("encoder_ffn_dim", *_WIDTH), default=4 * hidden)
        heads = _size(fields, ("encoder_attention_heads", *_HEADS), default=max(1, hidden // 64))
        parameters.append(
            tensor(
                f"{words.replace(' ', '_')}.layers.*",
                layers,
                4 * hidden * hidden + 2 * hidden * width,
            )
        )
        size = max(1, hidden // heads)
        groups.append(
            AttentionGroup(
                kind="vision",
                layers=layers,
                heads=heads,
                kv_heads=heads,
                head_dim=size,
                causal=False,
            )
        )
    return Blueprint((), tuple(groups), tuple(parameters), tuple(guessed))


def layers_of(fields: Fields) -> int:
    return _size(fields, _LAYERS)


def per_token(fields: Fields) -> int:
    """How many experts compute each token."""
    names = (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "top_k_experts",
    )
    return _size(fields, names, default=1)


def _size(fields: Fields, names: Sequence[str], default: int | None = None) -> int:
    """Fields.integer, or the largest size of a list with one size per layer."""
    for name in names:
        value = fields.config.get(name)
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            return Fields({name: max(value)}, fields.source).integer(
                name, minimum=0 if default is not None else 1
            )
        if isinstance(value, int) and not isinstance(value, bool):
            return fields.integer(name, minimum=0 if default is not None else 1)
    if default is None:
        return fields.integer(*names)
    return default


def _ends(fields: Fields, path: str, hidden: int) -> list[TensorGroup]:
    vocab = fields.integer("vocab_size")
    tensors = [
        tensor(f"{path}.embed_tokens.weight", 1, vocab, hidden, shard="vocab"),
        tensor(f"{path}.norm.weight", 1, hidden),
    ]
    if not fields.flag("tie_word_embeddings") and not fields.flag("use_tied_embeddings"):
        tensors.append(
            tensor(f"{path.removesuffix('model')}lm_head.weight", 1, vocab, hidden, shard="vocab")
        )
    return tensors


# --- kinds of layers ---

_WORDS: tuple[tuple[str, _Kind], ...] = (
    *((word, "sliding") for word in ("sliding", "local", "chunked")),
    *((word, "recurrent") for word in ("linear", "mamba", "conv", "recurrent", "delta", "kda")),
    ("hybrid", "both"),
    *((word, "full") for word in ("attention", "global", "full", "*")),
    ("M", "recurrent"),
)


class _Block(NamedTuple):
    """One layer of a model whose layers differ in size.

    sharing: query heads per KV head; 0: no attention. width: width of the MLP; 0: no MLP.
    """

    sharing: int
    width: int


def _blocks(fields: Fields, layers: int) -> list[_Block]:
    """The `block_configs` of Nemotron Super and Ultra; empty: the config has none.

    Source: vllm/model_executor/models/nemotron_nas.py of 0.33.0: 60, 134 to 187.
    """
    block_configs = fields.config.get("block_configs")
    if (
        not isinstance(block_configs, list)
        or len(block_configs) != layers
        or not all(isinstance(block, Mapping) for block in block_configs)
    ):
        return []
    return [_block(fields, block) for block in block_configs]


def _block(fields: Fields, config: Mapping[str, Any]) -> _Block:
    attention, mlp = (
        Fields(part if isinstance(part, Mapping) else {}, fields.source)
        for part in map(config.get, ("attention", "ffn"))
    )
    absent = attention.flag("no_op") or attention.flag("replace_with_linear")
    sharing = 0 if absent else _size(attention, ("n_heads_in_group",), default=1)
    factor = mlp.config.get("ffn_mult")
    width = _size(mlp, ("intermediate_size",), default=0)
    if isinstance(factor, int | float) and 0 < factor < _MAX_FACTOR:
        width = -(-int(2 * factor * _size(fields, HIDDEN) / 3) // 256) * 256
    return _Block(sharing, 0 if mlp.flag("no_op") else width)


def _by_kv_heads(
    fields: Fields, layers: int, attends: Sequence[int]
) -> Iterator[tuple[Fields, list[int]]]:
    """The attention layers grouped by their number of KV heads, each group with its config."""
    blocks = _blocks(fields, layers)
    if not blocks and attends:
        yield fields, list(attends)
    for sharing in sorted({block.sharing for block in blocks} - {0}):
        heads = {"num_key_value_heads": max(1, _size(fields, _HEADS) // sharing)}
        same_sharing = [number for number in attends if blocks[number].sharing == sharing]
        yield Fields({**fields.config, **heads}, fields.source), same_sharing


def _paired(fields: Fields) -> bool:
    """Whether each layer is a pair with experts in between, as in LongCat."""
    return "zero_expert_num" in fields.config and bool(fields.config.get("kv_lora_rank"))


def _kinds(fields: Fields, layers: int) -> list[_Kind]:
    config = fields.config
    if blocks := _blocks(fields, layers):
        return ["full" if block.sharing else "none" for block in blocks]
    for name in (
        "layer_types",
        "layers_block_type",
        "hybrid_override_pattern",
        "block_types",
        "_block_types",
    ):
        codes = config.get(name)
        if isinstance(codes, list | str) and codes and all(isinstance(code, str) for code in codes):
            repeated = (
                [codes[number % len(codes)] for number in range(layers)]
                if name.endswith("block_types")
                else codes
            )
            if len(repeated) == layers:
                return [
                    next((kind for word, kind in _WORDS if word in code), "none")
                    for code in repeated
                ]
    for name, kind in (("hybrid_layer_pattern", "sliding"), ("attn_type_list", "full")):
        codes = config.get(name)
        if isinstance(codes, list) and len(codes) == layers:
            other_kind: _Kind = "full" if kind == "sliding" else "recurrent"
            return [kind if code == 1 else other_kind for code in codes]  # type: ignore[misc]
    full = _full_layers(fields, layers)
    if full is not None:
        return ["full" if number in full else "recurrent" for number in range(layers)]
    if config.get("attention_chunk_size"):
        step = max(1, _size(fields, ("no_rope_layer_interval",), default=4))
        return ["full" if (number + 1) % step == 0 else "sliding" for number in range(layers)]
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and config.get("sliding_window"):
        return [
            "full" if pattern[number % len(pattern)] == "G" else "sliding"
            for number in range(layers)
        ]
    state = any(config.get(name) for name in (*_STATE_COLUMNS, *_STATE_HEADS))
    if not any(config.get(name) for name in _HEADS):
        return ["recurrent" if state else "full"] * layers
    return ["both" if state else "full"] * layers


def _full_layers(fields: Fields, layers: int) -> set[int] | None:
    """The attention layers among recurrent layers; None: the config does not say."""
    config = fields.config
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        return {one - 1 for one in linear["full_attn_layers"] if type(one) is int}
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if isinstance(config.get(name), list):
            return {one for one in config[name] if type(one) is int}
    if config.get("full_attention_interval"):
        step = fields.integer("full_attention_interval")
        return {number for number in range(layers) if (number + 1) % step == 0}
    if config.get("attn_layer_period"):
        step, first = (
            fields.integer("attn_layer_period"),
            fields.integer("attn_layer_offset", default=0, minimum=0),
        )
        return {number for number in range(layers) if number % step == first}
    return None


def _with_mlp(fields: Fields, layers: int) -> dict[str, list[int]]:
    """The layers with an MLP, and those with experts."""
    kinds = fields.config.get("hybrid_override_pattern") or fields.config.get("layers_block_type")
    numbers = list(range(layers))
    if (
        isinstance(kinds, list | str)
        and len(kinds) == layers
        and {"-", "E", "mlp", "moe"} & {str(code) for code in kinds}
    ):
        plain = [number for number in numbers if kinds[number] in ("-", "mlp")]
        return {
            "plain": plain,
            "sparse": [number for number in numbers if kinds[number] in ("E", "moe")],
        }
    if not _size(fields, _COUNT, default=0) or _size(fields, _COUNT, default=0) == 1:
        return {"plain": numbers, "sparse": []}
    sparse = [number for number in numbers if _sparse(fields, number)]
    return {"plain": sorted(set(numbers) - set(sparse)), "sparse": sparse}


def _sparse(fields: Fields, number: int) -> bool:
    config = fields.config
    layer_numbers = config.get("moe_layers") if isinstance(config.get("moe_layers"), list) else None
    if isinstance(listed := config.get("moe_layers_enum"), str):
        layer_numbers = [
            int(one) for one in listed.split(",") if one.strip().isdecimal() and len(one) < 9
        ]
    if layer_numbers is not None:
        return number in layer_numbers
    for name in ("mlp_layer_types", "moe_layer_freq"):
        one = config.get(name)
        if isinstance(one, list) and number < len(one):
            return one[number] in ("sparse", "moe", 1)
    dense = config.get("mlp_only_layers")
    if isinstance(dense, list) and number in dense:
        return False
    step = max(
        1,
        _size(
            fields,
            ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
            default=1,
        ),
    )
    if period := _size(fields, ("expert_layer_period",), default=0):
        return number % period == _size(fields, ("expert_layer_offset",), default=0)
    return number >= _size(fields, _FIRST, default=0) and (number + 1) % step == 0


# --- parts of a layer ---


def _attention(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int
) -> tuple[list[Built], AttentionGroup]:
    heads = _size(fields, _HEADS)
    if fields.config.get("kv_lora_rank"):
        return _latent(fields, path, numbers, hidden, heads)
    single = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    kv_heads = 1 if single else max(1, _size(fields, KV_HEADS, default=heads))
    size = _size(
        fields, ("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head"), default=0
    ) or max(1, hidden // heads)
    if fields.config.get("q_lora_rank") and fields.config.get("o_lora_rank"):
        return _ranked(fields, path, numbers, hidden, heads, size)
    value = _size(fields, ("v_head_dim",), default=0) or size
    parts = (heads * size, kv_heads * size, kv_heads * value)
    modules = ("q_proj", "k_proj", "v_proj")
    bias = any(fields.flag(name) for name in ("attention_bias", "qkv_bias", "use_qkv_bias"))
    built = [
        Built(
            f"{path}.qkv_proj",
            numbers,
            hidden,
            parts,
            "qkv",
            modules,
            heads=heads,
            kv_heads=kv_heads,
            bias=bias,
        ),
        Built(f"{path}.o_proj", numbers, heads * value, (hidden,), "row"),
    ]
    head_dim = value if value != size else None
    return built, AttentionGroup(
        kind="full", layers=1, heads=heads, kv_heads=kv_heads, head_dim=size, value_dim=head_dim
    )


def _ranked(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int, heads: int, size: int
) -> tuple[list[Built], AttentionGroup]:
    """Low-rank queries and outputs with a single KV head, as in DeepSeek-V4.

    Outputs pass the low rank in groups of heads. The cache counts as keys and values. Source:
    vllm/models/deepseek_v41/attention.py of 0.32.0.
    """
    rank, output_rank = fields.integer("q_lora_rank"), fields.integer("o_lora_rank")
    groups = _size(fields, ("o_groups",), default=1)
    built = [
        Built(f"{path}.q_a_proj", numbers, hidden, (rank,), "replicated"),
        Built(f"{path}.kv_proj", numbers, hidden, (size,), "replicated"),
        Built(f"{path}.q_b_proj", numbers, rank, (heads * size,), "column", heads=heads),
        Built(
            f"{path}.o_a_proj", numbers, heads * size // groups, (groups * output_rank,), "column"
        ),
        Built(f"{path}.o_b_proj", numbers, groups * output_rank, (hidden,), "row"),
    ]
    return built, AttentionGroup(kind="full", layers=1, heads=heads, kv_heads=1, head_dim=size)


def _latent(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int, heads: int
) -> tuple[list[Built], AttentionGroup]:
    """Latent attention: latents are replicated, heads are sharded."""
    latent, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", default=64)
    nope, value = (
        fields.integer("qk_nope_head_dim", default=128),
        fields.integer("v_head_dim", default=128),
    )
    rank = _size(fields, ("q_lora_rank",), default=0)
    built = [
        Built(f"{path}.kv_a_proj_with_mqa", numbers, hidden, (latent + rope,), "replicated"),
        Built(
            f"{path}.q_b_proj",
            numbers,
            rank or hidden,
            (heads * (nope + rope),),
            "column",
            heads=heads,
        ),
        Built(
            f"{path}.kv_b_proj", numbers, latent, (heads * (nope + value),), "column", heads=heads
        ),
        Built(f"{path}.o_proj", numbers, heads * value, (hidden,), "row"),
    ]
    if rank:
        built.append(Built(f"{path}.q_a_proj", numbers, hidden, (rank,), "replicated"))
    index = _size(fields, ("index_head_dim",), default=0)
    if index:
        wide = _size(fields, ("index_n_heads",), default=1) * index
        built.append(
            Built(f"{path}.indexer.wq_b", numbers, rank or hidden, (max(1, wide),), "replicated")
        )
        built.append(Built(f"{path}.indexer.wk", numbers, hidden, (index,), "replicated"))
    group = AttentionGroup(
        kind="mla",
        layers=1,
        heads=heads,
        kv_heads=1,
        head_dim=latent + rope,
        value_dim=latent,
        index_dim=index or None,
    )
    return built, group


def _recurrent(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int
) -> tuple[list[Built], Recurrent]:
    """A recurrent layer in the form of Mamba 2; the matrix of a convolution is negligible."""
    linear = fields.config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        state_fields = {
            "linear_num_heads": linear.get("num_heads"),
            "linear_head_dim": linear.get("head_dim"),
        }
        fields = Fields(
            {**fields.config, **state_fields, "linear_key_head_dim": linear.get("head_dim")},
            fields.source,
        )
    inner = _size(fields, ("mamba_d_ssm", "mamba_intermediate_size"), default=0)
    heads, rows = _size(fields, _STATE_HEADS, default=0), _size(fields, _STATE_ROWS, default=0)
    columns = _size(fields, _STATE_COLUMNS, default=0)
    expand = _size(fields, ("mamba_expand", "expand"), default=2) if columns else 1
    inner = inner or heads * rows or expand * hidden
    rows = rows or max(1, inner // max(1, heads or 1))
    heads = heads or max(1, inner // rows)
    groups = max(1, _size(fields, _STATE_GROUPS, default=1))
    shared = 2 * groups * columns
    kernel = max(1, _size(fields, _STATE_KERNEL, default=4))
    wide = 2 * inner + shared + (heads if columns else inner)
    built = [
        Built(f"{path}.in_proj", numbers, hidden, (-(-wide // 64) * 64,), "column"),
        Built(f"{path}.out_proj", numbers, inner, (hidden,), "row"),
    ]
    if not columns:
        heads, rows, columns, shared = 1, 1, 1, 0
    state = Recurrent(
        kind="mamba2",
        heads=heads,
        rows=rows,
        columns=columns,
        groups=groups,
        conv_channels=inner + shared,
        conv_kernel=kernel,
    )
    return built, state


def _width(fields: Fields, hidden: int) -> int:
    """The width of a dense MLP. Source for LFM2: vllm/model_executor/models/lfm2.py:71 of
    0.33.0."""
    width = _size(fields, _DENSE_WIDTH, default=4 * hidden) or 4 * hidden
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    times = fields.config.get("block_ffn_dim_multiplier")
    times = times if isinstance(times, int | float) and 0 < times < _MAX_FACTOR else 1
    step = max(1, _size(fields, ("block_multiple_of",), default=256))
    return -(-int(times * int(2 * width / 3)) // step) * step


def _mlps(
    fields: Fields, path: str, numbers: Mapping[str, list[int]], hidden: int
) -> tuple[list[Built], int]:
    """The MLPs, and the number of experts."""
    function = next((fields.config[name] for name in _FUNCTIONS if name in fields.config), "silu")
    gated = not (isinstance(function, str) and function in _PLAIN)
    built: list[Built] = []
    plain, sparse = numbers["plain"], numbers["sparse"]
    blocks = _blocks(fields, len(plain))
    for width in sorted({block.width for block in blocks} - {0}):
        built += _mlp(
            path,
            [number for number in plain if blocks[number].width == width],
            hidden,
            width,
            gated=gated,
        )
    if plain and not blocks:
        built += _mlp(path, plain, hidden, _width(fields, hidden), gated=gated)
    if not sparse:
        return built, 0
    count, width = _size(fields, _COUNT), _size(fields, _EXPERT_WIDTH)
    built.append(router(f"{path}.gate", sparse, hidden, count))
    mlp_experts = experts(path, sparse, hidden, width, count)
    built += (
        mlp_experts
        if gated
        else [
            Built(mlp_experts[0].name, sparse, hidden, (width,), "expert_column", experts=count),
            mlp_experts[1],
        ]
    )
    shared_width = _size(fields, _SHARED_WIDTH, default=0)
    shared_count = _size(
        fields,
        _SHARED,
        default=1 if shared_width or "interleave_moe_layer_step" in fields.config else 0,
    )
    if shared_count:
        built += _mlp(
            f"{path}.shared_experts",
            sparse,
            hidden,
            shared_width or shared_count * width,
            gated=gated,
        )
    return built, count


def _mlp(path: str, numbers: Sequence[int], hidden: int, width: int, *, gated: bool) -> list[Built]:
    if gated:
        return mlp(path, numbers, hidden, width)
    up = Built(f"{path}.up_proj", numbers, hidden, (width,), "column")
    return [up, Built(f"{path}.down_proj", numbers, width, (hidden,), "row")]
