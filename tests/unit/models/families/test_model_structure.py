"""Blueprints from structures: terms over the fields of a config.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import BadModel
from gateway.models.families.config import Fields
from gateway.models.families.model_structure import structure_blueprint
from gateway.models.families.registry import build_blueprint

CONFIG: dict[str, Any] = {
    "architectures": ["MadeUpForCausalLM"],
    "model_type": "made_up",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "first_dense": 2,
    "n_experts": 4,
    "kinds": ["slide", "slide", "full"] * 2,
    "window": 32,
}
LAYERS = {"when": "always", "layers": "all", "of": "num_hidden_layers"}
ROWS: list[dict[str, Any]] = [
    {
        "is": "linear",
        "name": "model.layers.*.attn.qkv_proj",
        **LAYERS,
        "shard": "qkv",
        "k": "hidden_size",
        "parts": ["head*num_attention_heads", "head*num_key_value_heads", "3 + 2*head"],
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "bias": "attention_bias",
        "modules": ["q_proj", "k_proj", "v_proj"],
    },
    {
        "is": "experts",
        "name": "model.layers.*.mlp.experts",
        **LAYERS,
        "layers": "i >= first_dense",
        "count": "n_experts",
        "hidden": "hidden_size",
        "width": "intermediate_size//2",
        "fused": 2,
        "bias": "0",
        "plain": True,
    },
    {
        "is": "parameter",
        "name": "lm_head.weight",
        "when": "not tied",
        "layers": "once",
        "shape": ["vocab_size", "hidden_size"],
        "dtype": "",
        "shard": "vocab",
    },
    {
        "is": "parameter",
        "name": "gate.weight",
        "when": "gated",
        "layers": "once",
        "shape": ["hidden_size"],
        "dtype": "F32",
        "shard": "replicated",
    },
    {
        "is": "attention",
        "name": "model.layers.*.attn.attn",
        "kind": "full",
        **LAYERS,
        "layers": "kinds[i] == 'slide'",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head": "head",
        "window": "window",
        "sinks": "0",
    },
]
STRUCTURE: dict[str, Any] = {
    "architecture": "MadeUpForCausalLM",
    "engine": "vllm==0.33.0",
    "unknown": [],
    "fixed": {"rope_half": 16},
    "absent": {
        "head": {"text": "hidden_size//num_attention_heads"},
        "attention_bias": {"is": False},
        "tied": {"is": False},
        "gated": {"is": True},
        "kinds": {"period": ["slide", "full"]},
    },
    "aliases": {"num_experts": "n_experts"},
    "rows": ROWS,
}


def make_value(config: dict[str, Any], **changes: Any) -> Any:
    return structure_blueprint(json.dumps(STRUCTURE | changes), Fields(config, "m"))


def test_sizes_and_layers_are_the_terms_of_the_config() -> None:
    blueprint = make_value(CONFIG)
    qkv, w13, w2 = blueprint.linears
    assert (qkv.k, qkv.parts, qkv.heads, qkv.kv_heads) == (64, (64, 16, 19), 8, 2)
    assert (qkv.bias, qkv.is_quantizable, len(qkv.numbers)) == (False, True, 6)
    assert (w13.name, w13.k, w13.parts, w13.experts) == (
        "model.layers.*.mlp.experts.w13",
        64,
        (128, 128),
        4,
    )
    assert (w2.k, w2.parts, [*w2.numbers], w2.is_quantizable) == (128, (64,), [2, 3, 4, 5], False)
    head, gate = blueprint.parameters
    assert (gate.dtype, gate.shape) == ("F32", (64,))
    assert (head.shape, head.count, head.shard) == ((1000, 64), 1, "vocab")
    (group,) = blueprint.attention
    assert (group.kind, group.window, group.numbers, group.head_dim) == (
        "sliding",
        32,
        (0, 1, 3, 4),
        8,
    )


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"head": 16}, lambda b: b.linears[0].parts == (128, 32, 35)),
        ({"attention_bias": True}, lambda b: b.linears[0].bias),
        ({"tied": True}, lambda b: len(b.parameters) == 1),
        ({"kinds": None}, lambda b: b.attention[0].numbers == (0, 2, 4)),
        # A null is not an absent field: the engine's constant does not replace it.
        ({"gated": None}, lambda b: len(b.parameters) == 1),
        ({"gated": True}, lambda b: len(b.parameters) == 2),
        ({}, lambda b: len(b.parameters) == 2),
        ({"num_key_value_heads": 0}, lambda b: len(b.linears) == 2),
        ({"n_experts": None, "num_experts": 9}, lambda b: b.linears[1].experts == 9),
        ({"first_dense": 6}, lambda b: len(b.linears) == 1),
        ({"rope_half": 16}, lambda b: len(b.linears) == 3),
    ],
)
def test_a_field_changes_its_part_of_the_structure(changes: dict[str, Any], read: Any) -> None:
    assert read(make_value(CONFIG | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"num_hidden_layers": "many"},
        {"num_hidden_layers": 10**9},
        {"intermediate_size": -4},
        {"intermediate_size": True},
        # Neither a text nor a list is repeated or filled in.
        {"head": "ab"},
        {"head": [1, 2]},
        {"intermediate_size": "%9d"},
        {"num_attention_heads": 0},
        {"kinds": ["slide"]},
        {"kinds": 7},
        {"rope_half": 32},
    ],
)
def test_a_config_outside_the_terms_is_refused_with_a_reason(changes: dict[str, Any]) -> None:
    with pytest.raises(BadModel) as refusal:
        make_value(CONFIG | changes)
    assert "config.json of m" in str(refusal.value)


def test_a_structure_replaces_the_guess_and_names_unknown_parts() -> None:
    guess = build_blueprint(CONFIG, "m")
    assert guess.guessed
    assert not build_blueprint(CONFIG, "m", structure=json.dumps(STRUCTURE)).guessed
    partly = json.dumps(STRUCTURE | {"unknown": ["its attention"]})
    blueprint = build_blueprint(CONFIG, "m", structure=partly)
    assert blueprint.guessed == ("its attention",)
    assert blueprint.attention == guess.attention
    assert blueprint.linears[0].parts == (64, 16, 19)
    # The guess stays where the config lacks fields of the terms.
    assert (
        build_blueprint(CONFIG | {"rope_half": 32}, "m", structure=json.dumps(STRUCTURE)) == guess
    )


@pytest.mark.parametrize("term", ["__import__('os')", "hidden_size.__class__()", "[1]", "f(i)"])
def test_terms_of_structures_cannot_run_code(term: str) -> None:
    rows = [{**ROWS[0], "k": term}]
    with pytest.raises(BadModel):
        make_value(CONFIG, rows=rows)


def test_a_structure_needs_no_guess() -> None:
    """Its fields may have names that no other family has."""
    config = {name: value for name, value in CONFIG.items() if name != "num_attention_heads"}
    structure = STRUCTURE | {"aliases": {"count_of_heads": "num_attention_heads"}}
    with pytest.raises(BadModel):
        build_blueprint(config | {"count_of_heads": 8}, "m")
    blueprint = build_blueprint(
        config | {"count_of_heads": 8}, "m", structure=json.dumps(structure)
    )
    assert blueprint.linears[0].heads == 8
