"""Encoders without a cache: BERT, RoBERTa, XLM-R, ModernBERT, Nomic. Pure.

Sources: models/bert.py, roberta.py, modernbert.py, bert_with_rope.py. Engines never load the head
of masked words. Missing fields have the defaults of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from gateway.domain import AttentionGroup, Shard, TensorGroup
from gateway.models.families.blueprint import Blueprint, LinearLayer
from gateway.models.families.config import Fields
from gateway.models.families.field_names import HEADS, HIDDEN_SIZE
from gateway.models.families.parts import layer_numbers, mlp, norms, tensor

# vLLM 0.18.0 and 0.19.1: RoBERTa's positions and token types are replicated, unlike BERT's
# (models/roberta.py).
WHOLE_POSITIONS = "whole_positions"
# vLLM before 0.33.0: the first product of ModernBERT's MLPs is torch's, and replicated
# (ModernBertMLP).
WHOLE_MODERN_MLP = "whole_modern_mlp"


def bert(fields: Fields, family: str, path: str, traits: Collection[str]) -> Blueprint:
    """BERT and RoBERTa: positions and token types are sharded like words."""
    numbers, (hidden, heads) = layer_numbers(fields), _hidden_and_heads(fields)
    width = fields.integer("intermediate_size")
    layer = f"{path}.encoder.layer.*"
    linears = (
        _qkv_layers(
            f"{layer}.attention.self.qkv_proj",
            numbers,
            hidden,
            heads,
            ("query", "key", "value"),
            bias=True,
        ),
        LinearLayer(
            f"{layer}.attention.output.dense", numbers, hidden, (hidden,), "row", bias=True
        ),
        LinearLayer(f"{layer}.intermediate.dense", numbers, hidden, (width,), "column", bias=True),
        LinearLayer(f"{layer}.output.dense", numbers, width, (hidden,), "row", bias=True),
    )
    word_table = {"word_embeddings": fields.integer("vocab_size")}
    rows = {
        "position_embeddings": fields.integer("max_position_embeddings"),
        "token_type_embeddings": fields.integer("type_vocab_size", default=2),
    }
    parameters = _embedding_tensors(f"{path}.embeddings", word_table, hidden) + _layer_norm(
        f"{path}.embeddings.LayerNorm", 1, hidden
    )
    parameters += _embedding_tensors(
        f"{path}.embeddings", rows, hidden, is_whole=family != "bert" and WHOLE_POSITIONS in traits
    )
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        parameters += _layer_norm(f"{layer}.{name}", len(numbers), hidden)
    return Blueprint(linears, (_attention_group(len(numbers), hidden, heads),), tuple(parameters))


def modern_bert(fields: Fields, _: str, __: str, traits: Collection[str]) -> Blueprint:
    """ModernBERT: every third layer attends to all tokens, the rest to a window."""
    numbers = layer_numbers(fields)
    layer = "encoder_layer.layers.*"
    hidden, heads = _hidden_and_heads(fields)
    width = fields.integer("intermediate_size")
    biased = fields.flag("attention_bias")
    gated = (width, width)
    bias = fields.flag("mlp_bias")
    linears = [
        _qkv_layers(f"{layer}.attn.Wqkv", numbers, hidden, heads, modules=(), bias=biased),
        LinearLayer(f"{layer}.attn.Wo", numbers, hidden, (hidden,), "row", bias=biased),
        LinearLayer(f"{layer}.mlp.Wo", numbers, width, (hidden,), "row", bias=bias),
    ]
    if WHOLE_MODERN_MLP in traits:
        parameters = [tensor(f"{layer}.mlp.Wi.weight", len(numbers), sum(gated), hidden)]
        parameters += [tensor(f"{layer}.mlp.Wi.bias", len(numbers), sum(gated))] if bias else []
    else:
        parameters = []
        linears.append(
            LinearLayer(
                name=f"{layer}.mlp.Wi",
                numbers=numbers,
                k=hidden,
                parts=gated,
                shard="merged",
                modules=("Wi",),
                bias=bias,
            )
        )
    parameters += _embedding_tensors(
        "embeddings", {"tok_embeddings": fields.integer("vocab_size")}, hidden
    )
    # The first layer's input is already normed.
    counts = {
        "embeddings.norm": 1,
        f"{layer}.attn_norm": len(numbers) - 1,
        f"{layer}.mlp_norm": len(numbers),
        "final_norm": 1,
    }
    names = ("weight", "bias") if fields.flag("norm_bias") else ("weight",)
    parameters += [
        tensor(f"{name}.{part}", count, hidden)
        for name, count in counts.items()
        if count
        for part in names
    ]
    period = fields.integer("global_attn_every_n_layers", default=3)
    full_layers = len(range(0, len(numbers), period))
    window = fields.integer("local_attention", default=128)
    groups = [_attention_group(full_layers, hidden, heads)]
    if len(numbers) > full_layers:
        groups.append(_attention_group(len(numbers) - full_layers, hidden, heads, window))
    return Blueprint(tuple(linears), tuple(groups), tuple(parameters))


def nomic(fields: Fields, _: str, __: str) -> Blueprint:
    """Rotary positions and a gated MLP. Source: NomicBertModel in models/bert_with_rope.py."""
    numbers = layer_numbers(fields)
    layer = "encoder.layers.*"
    hidden, heads = _hidden_and_heads(fields)
    if (
        fields.config.get("num_experts")
        or fields.config.get("activation_function", "swiglu") != "swiglu"
    ):
        raise fields.field_error("activation_function", "swiglu, without experts")
    width = fields.integer("intermediate_size", "n_inner", default=4 * hidden)
    projected = fields.flag("qkv_proj_bias")
    bias = fields.flag("mlp_fc1_bias")
    linears = (
        _qkv_layers(f"{layer}.attn.qkv_proj", numbers, hidden, heads, ("Wqkv",), bias=projected),
        LinearLayer(f"{layer}.attn.out_proj", numbers, hidden, (hidden,), "row", bias=projected),
        *mlp(f"{layer}.mlp", numbers, hidden, width, bias=bias),
    )
    rows = {"word_embeddings": fields.integer("vocab_size")}
    if types := fields.integer("type_vocab_size", default=2, minimum=0):
        rows["token_type_embeddings"] = types
    parameters = _embedding_tensors("embeddings", rows, hidden) + _layer_norm(
        "embeddings.LayerNorm", 1, hidden
    )
    for name in ("attn_ln", "mlp_ln"):
        parameters += _layer_norm(f"{layer}.{name}", len(numbers), hidden)
    return Blueprint(linears, (_attention_group(len(numbers), hidden, heads),), tuple(parameters))


def _hidden_and_heads(fields: Fields) -> tuple[int, int]:
    """(hidden size, heads)."""
    hidden = fields.integer(*HIDDEN_SIZE)
    heads = fields.integer(*HEADS)
    if hidden % heads:
        raise fields.field_error(
            next(name for name in HEADS if name in fields.config),
            f"a divisor of the hidden size, {hidden}",
        )
    return hidden, heads


def _qkv_layers(
    name: str,
    numbers: Sequence[int],
    hidden: int,
    heads: int,
    modules: tuple[str, ...],
    *,
    bias: bool,
) -> LinearLayer:
    return LinearLayer(
        name=name,
        numbers=numbers,
        k=hidden,
        parts=(hidden,) * 3,
        shard="qkv",
        modules=modules,
        heads=heads,
        kv_heads=heads,
        bias=bias,
    )


def _embedding_tensors(
    path: str, rows: Mapping[str, int], hidden: int, *, is_whole: bool = False
) -> list[TensorGroup]:
    shard: Shard = "replicated" if is_whole else "vocab"
    return [
        tensor(f"{path}.{name}.weight", 1, count, hidden, shard=shard)
        for name, count in rows.items()
    ]


def _layer_norm(name: str, count: int, size: int) -> list[TensorGroup]:
    return [
        *norms(name.rpartition(".")[0], count, size, name.rpartition(".")[2]),
        tensor(f"{name}.bias", count, size),
    ]


def _attention_group(
    layers: int, hidden: int, heads: int, window: int | None = None
) -> AttentionGroup:
    size = {"heads": heads, "kv_heads": heads, "head_dim": hidden // heads}
    return AttentionGroup(kind="encoder", layers=layers, **size, window=window, causal=False)


FAMILIES: Mapping[str, Callable[[Fields, str, str], Blueprint]] = {"nomic_bert": nomic}
VARIED_FAMILIES: Mapping[str, Callable[[Fields, str, str, Collection[str]], Blueprint]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), bert),
    "modernbert": modern_bert,
}
