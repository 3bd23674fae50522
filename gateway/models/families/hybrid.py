"""Gated delta nets with some layers of gated attention: Qwen3-Next and Qwen3.5. Pure.

Sources: models/qwen3_next.py, qwen3_5.py.
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
    layer_numbers,
    mlp,
    norms,
    qwen_mlps,
    read_heads,
    tensor,
)


def qwen_hybrid(fields: Fields, family: str, path: str) -> Blueprint:
    """The layers of Qwen models with delta nets and, in some layers, full attention."""
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    full_numbers = _full_layers(fields, numbers)
    recurrent = sorted(set(numbers) - set(full_numbers))
    parameters = embedding_and_head(fields, path) + norms(layer, len(numbers), hidden, *LAYER_NORMS)
    linears: list[LinearLayer] = []
    groups: list[AttentionGroup] = []
    heads, kv_heads, head_dim = read_heads(fields, family)
    if full_numbers:
        is_gated = fields.config.get("attn_output_gate", True) is not False
        bias = fields.flag("qkv_bias")
        linears += attention(
            fields,
            family,
            f"{layer}.self_attn",
            full_numbers,
            is_gated=is_gated,
            biases=(bias, False),
        )
        parameters += norms(f"{layer}.self_attn", len(full_numbers), head_dim, "q_norm", "k_norm")
        is_causal = fields.config.get("is_causal") is not False
        size = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        groups.append(
            AttentionGroup(
                kind="full",
                layers=len(full_numbers),
                numbers=tuple(full_numbers),
                **size,
                causal=is_causal,
            )
        )
    if recurrent:
        state = delta_net_state(fields)
        net, inner_groups = delta_net(
            fields, f"{layer}.linear_attn", recurrent, state, is_interleaved=family == "qwen3_next"
        )
        linears += net
        parameters += inner_groups
        groups.append(
            AttentionGroup(
                kind="recurrent",
                layers=len(recurrent),
                numbers=tuple(recurrent),
                heads=state.heads,
                kv_heads=state.groups,
                head_dim=state.columns,
                value_dim=state.rows,
                recurrent=state,
            )
        )
    if family == "qwen3_5_text":
        linears += mlp(f"{layer}.mlp", numbers, hidden, fields.integer("intermediate_size"))
    else:
        linears += qwen_mlps(fields, family, layer, numbers)
    return Blueprint(tuple(linears), tuple(groups), tuple(parameters))


def delta_net_state(fields: Fields) -> Recurrent:
    """Source: gated_delta_net_state_shape in vllm/model_executor/layers/mamba/mamba_utils.py."""
    groups = fields.integer("linear_num_key_heads")
    columns = fields.integer("linear_key_head_dim")
    heads = fields.integer("linear_num_value_heads")
    rows = fields.integer("linear_value_head_dim")
    state_dtype = fields.config.get("mamba_ssm_dtype")
    return Recurrent(
        kind="gdn",
        heads=heads,
        rows=rows,
        columns=columns,
        groups=groups,
        conv_channels=2 * groups * columns + heads * rows,
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
        dtype=None if state_dtype is None else fields.word("mamba_ssm_dtype"),
    )


def delta_net(
    fields: Fields, path: str, numbers: Sequence[int], state: Recurrent, *, is_interleaved: bool
) -> tuple[list[LinearLayer], list[TensorGroup]]:
    """The projections of a delta net.

    is_interleaved: the checkpoint stores the fused projections (Qwen3-Next), else the two halves of
    each (Qwen3.5).
    """
    hidden = fields.integer("hidden_size")
    key = state.groups * state.columns
    heads = state.heads
    value = heads * state.rows
    mixed = () if is_interleaved else ("in_proj_qkv", "in_proj_z")
    gates = () if is_interleaved else ("in_proj_b", "in_proj_a")
    ba = (2 * heads,) if is_interleaved else (heads, heads)
    linears = [
        LinearLayer(
            f"{path}.conv1d",
            numbers,
            state.conv_kernel,
            (key, key, value),
            "merged",
            is_quantizable=False,
        ),
        LinearLayer(
            name=f"{path}.in_proj_qkvz",
            numbers=numbers,
            k=hidden,
            parts=(key, key, value, value),
            shard="merged",
            modules=mixed,
        ),
        LinearLayer(
            name=f"{path}.in_proj_ba",
            numbers=numbers,
            k=hidden,
            parts=ba,
            shard="merged",
            modules=gates,
            heads=heads,
        ),
        LinearLayer(f"{path}.out_proj", numbers, value, (hidden,), "row"),
    ]
    parameters = norms(path, len(numbers), state.rows, "norm")
    parameters.append(tensor(f"{path}.A_log", len(numbers), heads, shard="column", dtype="F32"))
    parameters.append(tensor(f"{path}.dt_bias", len(numbers), heads, shard="column"))
    return linears, parameters


def _full_layers(fields: Fields, numbers: Sequence[int]) -> list[int]:
    kinds = fields.config.get("layer_types")
    if kinds is None:
        period = fields.integer("full_attention_interval", default=4)
        return [number for number in numbers if (number + 1) % period == 0]
    layer_types = ("full_attention", "linear_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(numbers)
        or not all(kind in layer_types for kind in kinds)
    ):
        raise fields.field_error(
            "layer_types", f"a list of {len(numbers)} times full_attention or linear_attention"
        )
    return [number for number, kind in enumerate(kinds) if kind == "full_attention"]


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = dict.fromkeys(
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen_hybrid
)
