"""Mamba 2 with a few layers of attention: Granite 4 and Nemotron-H. Pure.

Sources: models/granitemoehybrid.py, nemotron_h.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.domain import AttentionGroup, Recurrent, TensorGroup
from gateway.models.families.blueprint import Blueprint, LinearLayer
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    LAYER_NORMS,
    attention,
    embedding_and_head,
    experts,
    layer_numbers,
    norms,
    read_heads,
    router,
    tensor,
)

# transformers 5 has other names for the kinds. Source: remap_legacy_layer_types of transformers.
_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
_NEMOTRON = _KINDS | {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mlp": "mlp",
    "moe": "moe",
}


def granite_hybrid(fields: Fields, family: str, path: str) -> Blueprint:
    """Granite 4: every layer has an MLP, and experts where the config has them."""
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    kinds = _layer_kinds(fields, fields.config.get("layer_types"), _KINDS)
    if len(kinds) != len(numbers):
        raise fields.field_error(
            "layer_types", f"a list of {len(numbers)} times mamba or attention"
        )
    head = fields.integer("mamba_d_head", default=0, minimum=0)
    heads = fields.integer("mamba_n_heads", default=128)
    inner_size = fields.integer("mamba_expand", default=2) * hidden
    state = _recurrent_state(
        heads=heads,
        rows=head or max(1, inner_size // heads),
        columns=fields.integer("mamba_d_state", default=256),
        groups=fields.integer("mamba_n_groups", default=1),
        kernel=fields.integer("mamba_d_conv", default=4),
        dtype=None,
        chunk=fields.integer("mamba_chunk_size", default=256),
    )
    parameters = embedding_and_head(fields, path) + norms(layer, len(numbers), hidden, *LAYER_NORMS)
    biases = (
        fields.config.get("mamba_conv_bias", True) is not False,
        fields.flag("mamba_proj_bias"),
    )
    linears, groups = _mixers(
        fields, family, kinds, state, biases, parameters, (f"{layer}.mamba", f"{layer}.self_attn")
    )
    count = fields.integer("num_local_experts", default=0, minimum=0)
    if count:
        block = f"{layer}.block_sparse_moe"
        linears.append(router(f"{block}.gate", numbers, hidden, count))
        linears += experts(block, numbers, hidden, fields.integer("intermediate_size"), count)
    shared_size = fields.integer("shared_intermediate_size", default=1024, minimum=0)
    if shared_size:
        linears.append(
            LinearLayer(
                f"{layer}.shared_mlp.input_linear",
                numbers,
                hidden,
                (shared_size, shared_size),
                "merged",
            )
        )
        linears.append(
            LinearLayer(f"{layer}.shared_mlp.output_linear", numbers, shared_size, (hidden,), "row")
        )
    return Blueprint(tuple(linears), groups, tuple(parameters))


def nemotron(fields: Fields, family: str, path: str) -> Blueprint:
    """Nemotron-H: a layer is Mamba, attention, an MLP or experts."""
    kinds = _layer_kinds(
        fields,
        fields.config.get("hybrid_override_pattern") or fields.config.get("layers_block_type"),
        _NEMOTRON,
    )
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    state = _recurrent_state(
        heads=fields.integer("mamba_num_heads"),
        rows=fields.integer("mamba_head_dim"),
        columns=fields.integer("ssm_state_size"),
        groups=fields.integer("n_groups"),
        kernel=fields.integer("conv_kernel"),
        # The default of NemotronHForCausalLMConfig (models/config.py:607 of 0.26.0); 0.18.0 and
        # 0.19.1 would take half of it.
        dtype=(
            "float32"
            if fields.config.get("mamba_ssm_cache_dtype") is None
            else fields.word("mamba_ssm_cache_dtype")
        ),
        chunk=fields.integer("mamba_chunk_size", "chunk_size", default=128),
    )
    embedding, last, *head = embedding_and_head(fields, path)
    parameters = [
        embedding,
        *head,
        *norms(path, 1, last.shape[0], "norm_f"),
        *norms(layer, len(kinds), hidden, "norm"),
    ]
    biases = (fields.config.get("use_conv_bias", True) is not False, fields.flag("use_bias"))
    mixer = f"{layer}.mixer"
    linears, groups = _mixers(fields, family, kinds, state, biases, parameters, (mixer, mixer))
    plain_numbers = _layers_of(kinds, "mlp")
    sparse_numbers = _layers_of(kinds, "moe")
    if plain_numbers:
        linears += _mlp_layers(
            mixer,
            plain_numbers,
            hidden,
            fields.integer("intermediate_size"),
            bias=fields.flag("mlp_bias"),
        )
    if sparse_numbers:
        linears += _nemotron_experts(fields, mixer, sparse_numbers, hidden)
        parameters.append(
            tensor(
                f"{mixer}.gate.e_score_correction_bias",
                len(sparse_numbers),
                fields.integer("n_routed_experts"),
                dtype="F32",
            )
        )
    return Blueprint(tuple(linears), groups, tuple(parameters))


def _nemotron_experts(
    fields: Fields, mixer: str, numbers: Sequence[int], hidden: int
) -> list[LinearLayer]:
    """Experts without a gate; latent experts stand between two projections (NemotronHMoE)."""
    count = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    inner_size = fields.integer("moe_latent_size", default=hidden)
    linears = [
        router(f"{mixer}.gate", numbers, hidden, count, is_exact=True),
        LinearLayer(
            f"{mixer}.experts.w13", numbers, inner_size, (width,), "expert_column", experts=count
        ),
        LinearLayer(
            f"{mixer}.experts.w2", numbers, width, (inner_size,), "expert_row", experts=count
        ),
    ]
    if fields.config.get("moe_latent_size") is not None:
        bias = fields.flag("mlp_bias")
        linears.append(
            LinearLayer(
                f"{mixer}.fc1_latent_proj", numbers, hidden, (inner_size,), "replicated", bias=bias
            )
        )
        linears.append(
            LinearLayer(
                f"{mixer}.fc2_latent_proj", numbers, inner_size, (hidden,), "replicated", bias=bias
            )
        )
    if shared_count := fields.integer("n_shared_experts", default=0, minimum=0):
        size = fields.integer("moe_shared_expert_intermediate_size") * shared_count
        linears += _mlp_layers(f"{mixer}.shared_experts", numbers, hidden, size)
    return linears


def _mlp_layers(
    path: str, numbers: Sequence[int], hidden: int, width: int, *, bias: bool = False
) -> list[LinearLayer]:
    return [
        LinearLayer(f"{path}.up_proj", numbers, hidden, (width,), "column", bias=bias),
        LinearLayer(f"{path}.down_proj", numbers, width, (hidden,), "row", bias=bias),
    ]


def _layer_kinds(fields: Fields, names: object, table: Mapping[str, str]) -> list[str]:
    if (
        not isinstance(names, str | list)
        or not all(isinstance(kind, str) and kind in table for kind in names)
        or not names
    ):
        raise fields.field_error(
            "layer_types" if "layer_types" in fields.config else "hybrid_override_pattern",
            "kinds of layers",
        )
    layer_numbers(Fields({"num_hidden_layers": len(names)}, fields.source))
    return [table[kind] for kind in names]


def _layers_of(kinds: Sequence[str], kind: str) -> list[int]:
    return [number for number, layer_kind in enumerate(kinds) if layer_kind == kind]


def _recurrent_state(
    *, heads: int, rows: int, columns: int, groups: int, kernel: int, dtype: str | None, chunk: int
) -> Recurrent:
    """Source: mamba2_state_shape in vllm/model_executor/layers/mamba/mamba_utils.py;
    get_mamba_chunk_size in config/model.py."""
    return Recurrent(
        kind="mamba2",
        heads=heads,
        rows=rows,
        columns=columns,
        groups=groups,
        conv_channels=heads * rows + 2 * groups * columns,
        conv_kernel=kernel,
        dtype=dtype,
        chunk=chunk,
    )


def _mixers(
    fields: Fields,
    family: str,
    kinds: Sequence[str],
    state: Recurrent,
    biases: tuple[bool, bool],
    parameters: list[TensorGroup],
    paths: tuple[str, str],
) -> tuple[list[LinearLayer], tuple[AttentionGroup, ...]]:
    """Mamba and attention under `paths`; `biases` of (convolution, projections). Adds to
    `parameters`."""
    linears: list[LinearLayer] = []
    groups: list[AttentionGroup] = []
    if recurrent := _layers_of(kinds, "mamba"):
        linears += mixer(paths[0], recurrent, fields.integer("hidden_size"), state, biases)
        parameters += mixer_parameters(paths[0], len(recurrent), state)
        groups.append(mixer_group(recurrent, state))
    if full_numbers := _layers_of(kinds, "attention"):
        bias = fields.flag("attention_bias")
        linears += attention(fields, family, paths[1], full_numbers, biases=(bias, bias))
        heads, kv_heads, head_dim = read_heads(fields, family)
        size = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        groups.append(
            AttentionGroup(
                kind="full", layers=len(full_numbers), numbers=tuple(full_numbers), **size
            )
        )
    return linears, tuple(groups)


def mixer_group(numbers: Sequence[int], state: Recurrent) -> AttentionGroup:
    size = {
        "heads": state.heads,
        "kv_heads": state.groups,
        "head_dim": state.columns,
        "value_dim": state.rows,
    }
    return AttentionGroup(
        kind="recurrent", layers=len(numbers), numbers=tuple(numbers), **size, recurrent=state
    )


def mixer(
    path: str, numbers: Sequence[int], hidden: int, state: Recurrent, biases: tuple[bool, bool]
) -> list[LinearLayer]:
    """The projections of MambaMixer2 (layers/mamba/mamba_mixer2.py).

    A rank has whole groups. A single group is replicated, like a single KV head; several groups
    never are.
    """
    inner_size, shared_size = state.heads * state.rows, state.groups * state.columns
    gated = 2 * inner_size + state.heads
    conv_bias, bias = biases
    kernel = state.conv_kernel
    output = LinearLayer(f"{path}.out_proj", numbers, inner_size, (hidden,), "row", bias=bias)
    name, conv = f"{path}.in_proj", f"{path}.conv1d"
    if state.groups == 1:
        shared_dims = (shared_size, shared_size)
        return [
            LinearLayer(
                conv,
                numbers,
                kernel,
                (inner_size, *shared_dims),
                "qkv",
                is_quantizable=False,
                heads=state.heads,
                kv_heads=1,
                bias=conv_bias,
            ),
            LinearLayer(
                name,
                numbers,
                hidden,
                (gated, *shared_dims),
                "qkv",
                ("in_proj",),
                heads=state.heads,
                kv_heads=1,
                bias=bias,
            ),
            output,
        ]
    widths = (inner_size, inner_size, shared_size, shared_size, state.heads)
    return [
        LinearLayer(
            conv,
            numbers,
            kernel,
            (inner_size, shared_size, shared_size),
            "merged",
            is_quantizable=False,
            heads=state.groups,
            bias=conv_bias,
        ),
        LinearLayer(
            name, numbers, hidden, widths, "merged", ("in_proj",), heads=state.groups, bias=bias
        ),
        output,
    ]


def mixer_parameters(path: str, layers: int, state: Recurrent) -> list[TensorGroup]:
    return [
        tensor(f"{path}.A", layers, state.heads, shard="column", dtype="F32"),
        tensor(f"{path}.D", layers, state.heads, shard="column"),
        tensor(f"{path}.dt_bias", layers, state.heads, shard="column"),
        tensor(f"{path}.norm.weight", layers, state.heads * state.rows, shard="column"),
    ]


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = {
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron,
}
