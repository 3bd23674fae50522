"""Decoders with their own norms, biases or heads: GLM-4, OLMo 2 and 3, Cohere 2, Seed-OSS. Pure.

Sources: models/glm4.py, olmo2.py, commandr.py, and for the rest transformers' own models, which the
engine wraps (models/transformers/). Missing fields have the defaults of transformers' configuration
classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields
from gateway.models.families.parts import (
    LAYER_NORMS,
    attention,
    embedding_and_head,
    layer_numbers,
    mlp,
    norms,
    read_heads,
    softmax_groups,
)


def _decoder(
    fields: Fields,
    family: str,
    path: str,
    *surrounding_names: str,
    bias: bool = False,
    has_out_bias: bool = False,
    has_mlp_bias: bool = False,
    is_tied: bool = False,
) -> Blueprint:
    """A decoder of equal layers with the norms `surrounding_names`."""
    numbers = layer_numbers(fields)
    hidden = fields.integer("hidden_size")
    layer = f"{path}.layers.*"
    linears = attention(fields, family, f"{layer}.self_attn", numbers, biases=(bias, has_out_bias))
    linears += mlp(
        f"{layer}.mlp", numbers, hidden, fields.integer("intermediate_size"), bias=has_mlp_bias
    )
    parameters = embedding_and_head(fields, path, is_tied=is_tied) + norms(
        layer, len(numbers), hidden, *surrounding_names
    )
    return Blueprint(tuple(linears), softmax_groups(fields, family), tuple(parameters))


def _boolean_field(fields: Fields, name: str, default: bool) -> bool:
    return default if fields.config.get(name) is None else fields.flag(name)


def glm4(fields: Fields, family: str, path: str) -> Blueprint:
    bias = _boolean_field(fields, "attention_bias", default=True)
    return _decoder(
        fields,
        family,
        path,
        *LAYER_NORMS,
        "post_self_attn_layernorm",
        "post_mlp_layernorm",
        bias=bias,
    )


def olmo(fields: Fields, family: str, path: str) -> Blueprint:
    """OLMo 2 and 3: one norm over all heads, replicated on every rank."""
    bias = fields.flag("attention_bias")
    plain_blueprint = _decoder(
        fields,
        family,
        path,
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        bias=bias,
        has_out_bias=bias,
    )
    heads, kv_heads, head_dim = read_heads(fields, family)
    layers = len(layer_numbers(fields))
    attention_path = f"{path}.layers.*.self_attn"
    parameters = norms(attention_path, layers, heads * head_dim, "q_norm") + norms(
        attention_path, layers, kv_heads * head_dim, "k_norm"
    )
    return Blueprint(
        plain_blueprint.linears,
        plain_blueprint.attention,
        (*plain_blueprint.parameters, *parameters),
    )


def cohere(fields: Fields, family: str, path: str) -> Blueprint:
    """Cohere 2: attention and MLP read the same normed input, and the head is always tied."""
    bias = fields.flag("attention_bias")
    tied = Fields({**fields.config, "tie_word_embeddings": True}, fields.source)
    return _decoder(tied, family, path, "input_layernorm", bias=bias, has_out_bias=bias)


def seed(fields: Fields, family: str, path: str) -> Blueprint:
    return _decoder(
        fields,
        family,
        path,
        *LAYER_NORMS,
        bias=_boolean_field(fields, "attention_bias", default=True),
        has_out_bias=fields.flag("attention_out_bias"),
        has_mlp_bias=fields.flag("mlp_bias"),
    )


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = {
    "glm4": glm4,
    **dict.fromkeys(("olmo2", "olmo3"), olmo),
    "cohere2": cohere,
    "seed_oss": seed,
}
