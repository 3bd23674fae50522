"""The reader of unknown families: layers by the usual names of config fields. Pure.

The result is a forecast that names its guessed parts. Headers give the exact weights, and an
inquiry to the engine gives everything. Source of field names: the configuration classes of
transformers 5.19 and of vllm/transformers_utils/configs of 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.domain import AttentionGroup, Recurrent, TensorGroup
from gateway.models.families.blueprint import Blueprint, LinearLayer
from gateway.models.families.config import Fields
from gateway.models.families.field_names import (
    ACTIVATIONS,
    DENSE_WIDTH,
    EXPERT_COUNT,
    EXPERT_WIDTH,
    HEAD_COUNT,
    HIDDEN_SIZE,
    KV_HEADS,
    LAYER_COUNT,
    MAX_FACTOR,
    MLP_WIDTH,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    STATE_COLUMNS,
    STATE_GROUPS,
    STATE_HEADS,
    STATE_KERNEL,
    STATE_ROWS,
    TEXT_CONFIGS,
)
from gateway.models.families.layer_kinds import (
    LayerKind,
    group_by_kv_heads,
    is_paired,
    layer_kinds,
    layers_with_mlp,
    sized_blocks,
)
from gateway.models.families.parts import ENCODERS, experts, mlp, norms, router, tensor
from gateway.models.families.text_config import read_layer_count

_TOWERS = (
    "vision_config",
    "audio_config",
    "vision_tower_config",
    "audio_encoder_config",
    "encoder",
    "vit_config",
    "sound_config",
)

_MAX_LAYERS = 2000


def decoder(fields: Fields, path: str) -> Blueprint:
    """The text model. Raises BadModel where layers, heads or the hidden size are missing."""
    layers = read_layer_count(fields)
    hidden = fields.largest(HIDDEN_SIZE)
    if layers > _MAX_LAYERS:
        raise fields.field_error(
            next(name for name in LAYER_COUNT if name in fields.config), f"at most {_MAX_LAYERS}"
        )
    kinds = layer_kinds(fields, layers)
    layer = f"{path}.layers.*"
    numbers_of = {
        kind: [n for n, layer_kind in enumerate(kinds) if layer_kind == kind] for kind in {*kinds}
    }
    attends = sorted(n for kind in ("full", "sliding", "both") for n in numbers_of.get(kind, ()))
    recurs = sorted(n for kind in ("recurrent", "both") for n in numbers_of.get(kind, ()))
    parameters = _outer_tensors(fields, path, hidden) + norms(
        layer, layers, hidden, "input_layernorm", "post_attention_layernorm"
    )
    guessed = ["its attention"]
    linears, groups = _attention_layers(fields, layer, attends, kinds)
    if recurs:
        guessed.append("its recurrent layers")
        built_linears, group = _recurrent_layers(fields, layer, recurs, hidden)
        linears += built_linears
        groups.append(group)
    built_linears, count = _mlps(fields, f"{layer}.mlp", layers_with_mlp(fields, layers), hidden)
    linears += built_linears
    if is_paired(fields):
        # A second attention, and two dense MLPs in addition to the experts: FlashDecoderLayer in
        # vllm/model_executor/models/longcat_flash.py.
        linears += _attention(fields, f"{layer}.self_attn.1", attends, hidden)[0]
        for number in range(2):
            linears += _mlp_layers(
                f"{layer}.mlps.{number}",
                range(layers),
                hidden,
                _width(fields, hidden),
                is_gated=True,
            )
        groups = [
            group.evolve(layers=2 * group.layers, numbers=tuple(sorted(group.numbers * 2)))
            for group in groups
        ]
    guessed.append("its experts" if count else "its MLPs")
    return Blueprint(tuple(linears), tuple(groups), tuple(parameters), tuple(guessed))


def _attention_layers(
    fields: Fields, layer: str, attends: Sequence[int], kinds: Sequence[LayerKind]
) -> tuple[list[LinearLayer], list[AttentionGroup]]:
    """The projections and attention groups of the layers `attends`."""
    hidden = fields.largest(HIDDEN_SIZE)
    linears: list[LinearLayer] = []
    groups: list[AttentionGroup] = []
    for config, members in group_by_kv_heads(fields, len(kinds), attends):
        built_linears, template = _attention(config, f"{layer}.self_attn", members, hidden)
        linears += built_linears
        slides = [number for number in members if kinds[number] == "sliding"]
        window = fields.largest(
            ("sliding_window", "sliding_window_size", "attention_chunk_size"), default=0
        )
        full_numbers = members
        if slides and window:
            full_numbers = [number for number in members if number not in {*slides}]
        for kind, numbers, size in (
            ("full", full_numbers, None),
            ("sliding", slides if window else (), window),
        ):
            if numbers:
                plain_fields = {} if template.kind == "mla" else {"kind": kind, "window": size}
                groups.append(
                    template.evolve(layers=len(numbers), numbers=tuple(numbers), **plain_fields)
                )
    if any(fields.config.get("model_type") == family for family in ENCODERS):
        groups = [group.evolve(kind="encoder", window=None, causal=False) for group in groups]
    return linears, groups


def _recurrent_layers(
    fields: Fields, layer: str, recurs: Sequence[int], hidden: int
) -> tuple[list[LinearLayer], AttentionGroup]:
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
        *(top.config[name] for name in TEXT_CONFIGS if isinstance(top.config.get(name), Mapping)),
    ]
    towers_found = [
        (name, config[name])
        for config in configs
        for name in _TOWERS
        if isinstance(config.get(name), Mapping)
    ]
    groups = []
    parameters = []
    guessed = []
    for name, config in dict(towers_found).items():
        fields = Fields(config, top.source)
        text = name.removesuffix("_config").replace("_", " ")
        guessed.append(f"its {text} tower")
        layers = fields.largest(
            ("depth", "encoder_layers", "num_encoder_layers", *LAYER_COUNT), default=0
        )
        hidden = fields.largest(("embed_dim", "encoder_dim", *HIDDEN_SIZE, "width"), default=0)
        if not 0 < layers <= _MAX_LAYERS or not hidden:
            continue
        width = fields.largest(("encoder_ffn_dim", *MLP_WIDTH), default=4 * hidden)
        heads = fields.largest(
            ("encoder_attention_heads", *HEAD_COUNT), default=max(1, hidden // 64)
        )
        parameters.append(
            tensor(
                f"{text.replace(' ', '_')}.layers.*",
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


def _outer_tensors(fields: Fields, path: str, hidden: int) -> list[TensorGroup]:
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


# Activations of MLPs without a gate.
_PLAIN_ACTIVATIONS = {"relu", "relu2", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "xielu"}


def _attention(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int
) -> tuple[list[LinearLayer], AttentionGroup]:
    """The attention of an unknown family, by the usual names of its fields."""
    heads = fields.largest(HEAD_COUNT)
    if fields.config.get("kv_lora_rank"):
        return _latent(fields, path, numbers, hidden, heads)
    is_single = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    kv_heads = 1 if is_single else max(1, fields.largest(KV_HEADS, default=heads))
    size = fields.largest(
        ("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head"), default=0
    ) or max(1, hidden // heads)
    if fields.config.get("q_lora_rank") and fields.config.get("o_lora_rank"):
        return _low_rank_attention(
            fields=fields, path=path, numbers=numbers, hidden=hidden, heads=heads, size=size
        )
    value = fields.largest(("v_head_dim",), default=0) or size
    widths = (heads * size, kv_heads * size, kv_heads * value)
    modules = ("q_proj", "k_proj", "v_proj")
    bias = any(fields.flag(name) for name in ("attention_bias", "qkv_bias", "use_qkv_bias"))
    linears = [
        LinearLayer(
            name=f"{path}.qkv_proj",
            numbers=numbers,
            k=hidden,
            parts=widths,
            shard="qkv",
            modules=modules,
            heads=heads,
            kv_heads=kv_heads,
            bias=bias,
        ),
        LinearLayer(f"{path}.o_proj", numbers, heads * value, (hidden,), "row"),
    ]
    head_dim = value if value != size else None
    return linears, AttentionGroup(
        kind="full", layers=1, heads=heads, kv_heads=kv_heads, head_dim=size, value_dim=head_dim
    )


def _low_rank_attention(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int, heads: int, size: int
) -> tuple[list[LinearLayer], AttentionGroup]:
    """Low-rank queries and outputs with a single KV head, as in DeepSeek-V4.

    Outputs pass the low rank in groups of heads. The cache has one vector for keys and values.
    Source: vllm/models/deepseek_v41/attention.py of 0.32.0, deepseek_v4/attention.py of 0.33.0.
    """
    rank = fields.integer("q_lora_rank")
    output_rank = fields.integer("o_lora_rank")
    groups = fields.largest(("o_groups",), default=1)
    linears = [
        LinearLayer(f"{path}.q_a_proj", numbers, hidden, (rank,), "replicated"),
        LinearLayer(f"{path}.kv_proj", numbers, hidden, (size,), "replicated"),
        LinearLayer(f"{path}.q_b_proj", numbers, rank, (heads * size,), "column", heads=heads),
        LinearLayer(
            f"{path}.o_a_proj", numbers, heads * size // groups, (groups * output_rank,), "column"
        ),
        LinearLayer(f"{path}.o_b_proj", numbers, groups * output_rank, (hidden,), "row"),
    ]
    rope = fields.largest(("qk_rope_head_dim",), default=0)
    return linears, AttentionGroup(
        kind="mla", layers=1, heads=heads, kv_heads=1, head_dim=size, value_dim=size - rope
    )


def _latent(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int, heads: int
) -> tuple[list[LinearLayer], AttentionGroup]:
    """Latent attention: latents are replicated, heads are sharded."""
    latent = fields.integer("kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim", default=64, minimum=0)  # 0: GLM-5.3-Flash
    nope_dim = fields.integer("qk_nope_head_dim", default=128)
    value = fields.integer("v_head_dim", default=128)
    rank = fields.largest(("q_lora_rank",), default=0)
    linears = [
        LinearLayer(f"{path}.kv_a_proj_with_mqa", numbers, hidden, (latent + rope,), "replicated"),
        LinearLayer(
            f"{path}.q_b_proj",
            numbers,
            rank or hidden,
            (heads * (nope_dim + rope),),
            "column",
            heads=heads,
        ),
        LinearLayer(
            f"{path}.kv_b_proj",
            numbers,
            latent,
            (heads * (nope_dim + value),),
            "column",
            heads=heads,
        ),
        LinearLayer(f"{path}.o_proj", numbers, heads * value, (hidden,), "row"),
    ]
    if rank:
        linears.append(LinearLayer(f"{path}.q_a_proj", numbers, hidden, (rank,), "replicated"))
    index = fields.largest(("index_head_dim",), default=0)
    if index:
        index_size = fields.largest(("index_n_heads",), default=1) * index
        linears.append(
            LinearLayer(
                f"{path}.indexer.wq_b", numbers, rank or hidden, (max(1, index_size),), "replicated"
            )
        )
        linears.append(LinearLayer(f"{path}.indexer.wk", numbers, hidden, (index,), "replicated"))
    group = AttentionGroup(
        kind="mla",
        layers=1,
        heads=heads,
        kv_heads=1,
        head_dim=latent + rope,
        value_dim=latent,
        index_dim=index or None,
    )
    return linears, group


def _recurrent(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int
) -> tuple[list[LinearLayer], Recurrent]:
    """A recurrent layer in the form of Mamba 2; the matrix of a convolution is negligible."""
    linear = fields.config.get("linear_attn_config")
    if isinstance(linear, Mapping) and {"num_heads", "head_dim"} <= linear.keys():
        return _delta_attention(Fields(linear, fields.source), path, numbers, hidden)
    inner_size = fields.largest(("mamba_d_ssm", "mamba_intermediate_size"), default=0)
    heads = fields.largest(STATE_HEADS, default=0)
    rows = fields.largest(STATE_ROWS, default=0)
    columns = fields.largest(STATE_COLUMNS, default=0)
    expand = fields.largest(("mamba_expand", "expand"), default=2) if columns else 1
    inner_size = inner_size or heads * rows or expand * hidden
    rows = rows or max(1, inner_size // max(1, heads or 1))
    heads = heads or max(1, inner_size // rows)
    groups = max(1, fields.largest(STATE_GROUPS, default=1))
    shared_size = 2 * groups * columns
    kernel = max(1, fields.largest(STATE_KERNEL, default=4))
    input_size = 2 * inner_size + shared_size + (heads if columns else inner_size)
    linears = [
        LinearLayer(f"{path}.in_proj", numbers, hidden, (-(-input_size // 64) * 64,), "column"),
        LinearLayer(f"{path}.out_proj", numbers, inner_size, (hidden,), "row"),
    ]
    if not columns:
        heads = 1
        rows = 1
        columns = 1
        shared_size = 0
    state = Recurrent(
        kind="mamba2",
        heads=heads,
        rows=rows,
        columns=columns,
        groups=groups,
        conv_channels=inner_size + shared_size,
        conv_kernel=kernel,
    )
    return linears, state


def _delta_attention(
    fields: Fields, path: str, numbers: Sequence[int], hidden: int
) -> tuple[list[LinearLayer], Recurrent]:
    """Kimi Delta Attention, with gates of low rank.

    Source: vllm/models/glm5next/common/kda.py of 0.33.0, kimi_linear.py of 0.26.0.
    """
    heads = fields.integer("num_heads")
    size = fields.integer("head_dim")
    inner_size = heads * size
    linears = [
        LinearLayer(f"{path}.{name}_proj", numbers, hidden, (inner_size,), "column", heads=heads)
        for name in ("q", "k", "v")
    ]
    for name in ("f", "g"):
        linears += [
            LinearLayer(f"{path}.{name}_a_proj", numbers, hidden, (size,), "replicated"),
            LinearLayer(f"{path}.{name}_b_proj", numbers, size, (inner_size,), "column"),
        ]
    linears += [
        LinearLayer(f"{path}.b_proj", numbers, hidden, (heads,), "column", is_quantizable=False),
        LinearLayer(f"{path}.o_proj", numbers, inner_size, (hidden,), "row"),
    ]
    state = Recurrent(
        kind="kda",
        heads=heads,
        rows=size,
        columns=size,
        groups=heads,
        conv_channels=3 * inner_size,
        conv_kernel=fields.integer("short_conv_kernel_size", default=4),
    )
    return linears, state


def _width(fields: Fields, hidden: int) -> int:
    """The width of a dense MLP. Source for LFM2: vllm/model_executor/models/lfm2.py:71 of
    0.33.0."""
    width = fields.largest(DENSE_WIDTH, default=4 * hidden) or 4 * hidden
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    times = fields.config.get("block_ffn_dim_multiplier")
    times = times if isinstance(times, int | float) and 0 < times < MAX_FACTOR else 1
    step = max(1, fields.largest(("block_multiple_of",), default=256))
    return -(-int(times * int(2 * width / 3)) // step) * step


def _mlps(
    fields: Fields, path: str, numbers: Mapping[str, list[int]], hidden: int
) -> tuple[list[LinearLayer], int]:
    """The MLPs, and the number of experts."""
    function = next((fields.config[name] for name in ACTIVATIONS if name in fields.config), "silu")
    is_gated = not (isinstance(function, str) and function in _PLAIN_ACTIVATIONS)
    linears: list[LinearLayer] = []
    plain_numbers = numbers["plain"]
    sparse_numbers = numbers["sparse"]
    blocks = sized_blocks(fields, len(plain_numbers))
    for width in sorted({block.width for block in blocks} - {0}):
        linears += _mlp_layers(
            path,
            [number for number in plain_numbers if blocks[number].width == width],
            hidden,
            width,
            is_gated=is_gated,
        )
    if plain_numbers and not blocks:
        linears += _mlp_layers(
            path, plain_numbers, hidden, _width(fields, hidden), is_gated=is_gated
        )
    if not sparse_numbers:
        return linears, 0
    count = fields.largest(EXPERT_COUNT)
    width = fields.largest(EXPERT_WIDTH)
    linears.append(router(f"{path}.gate", sparse_numbers, hidden, count))
    mlp_experts = experts(path, sparse_numbers, hidden, width, count)
    linears += (
        mlp_experts
        if is_gated
        else [
            LinearLayer(
                mlp_experts[0].name,
                sparse_numbers,
                hidden,
                (width,),
                "expert_column",
                experts=count,
            ),
            mlp_experts[1],
        ]
    )
    shared_width = fields.largest(SHARED_WIDTH, default=0)
    shared_count = fields.largest(
        SHARED_EXPERTS,
        default=1 if shared_width or "interleave_moe_layer_step" in fields.config else 0,
    )
    if shared_count:
        linears += _mlp_layers(
            f"{path}.shared_experts",
            sparse_numbers,
            hidden,
            shared_width or shared_count * width,
            is_gated=is_gated,
        )
    return linears, count


def _mlp_layers(
    path: str, numbers: Sequence[int], hidden: int, width: int, *, is_gated: bool
) -> list[LinearLayer]:
    if is_gated:
        return mlp(path, numbers, hidden, width)
    up = LinearLayer(f"{path}.up_proj", numbers, hidden, (width,), "column")
    return [up, LinearLayer(f"{path}.down_proj", numbers, width, (hidden,), "row")]
