"""Latent attention to the tokens that an indexer picks: DeepSeek V3.2 (models/deepseek_v2.py, Indexer). Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from gateway.core.model.blueprint import Blueprint, Built
from gateway.core.model.config import Fields
from gateway.core.model.families.latent import deepseek
from gateway.core.model.families.parts import layer_numbers, tensor

# vLLM 0.18.0 and 0.19.1: two projections of the hidden state, of which one is quantized; one from 0.26.0 on
# (Indexer in models/deepseek_v2.py).
SPLIT_INDEXER = "split_indexer"


def deepseek_sparse(fields: Fields, family: str, path: str, traits: Collection[str]) -> Blueprint:
    """The indexer is whole on every rank."""
    inner, numbers = deepseek(fields, family, path), layer_numbers(fields)
    hidden, rank = fields.integer("hidden_size"), fields.integer("q_lora_rank")
    heads, size = fields.integer("index_n_heads"), fields.integer("index_head_dim")
    indexer = f"{path}.layers.*.self_attn.indexer"
    linears = [Built(f"{indexer}.wq_b", numbers, rank, (heads * size,), "replicated")]
    if SPLIT_INDEXER in traits:
        linears.append(Built(f"{indexer}.wk", numbers, hidden, (size,), "replicated"))
        linears.append(Built(f"{indexer}.weights_proj", numbers, hidden, (heads,), "replicated", quantizable=False))
    else:
        parts = (size, heads)
        linears.append(Built(f"{indexer}.wk_weights_proj", numbers, hidden, parts, "replicated", quantizable=False))
    others = tuple(tensor(f"{indexer}.k_norm.{name}", len(numbers), size, dtype="F32") for name in ("weight", "bias"))
    attention = tuple(group.evolve(index_dim=size) for group in inner.attention)
    return Blueprint((*inner.linears, *linears), attention, inner.others + others)


VARIED: Mapping[str, Callable[[Fields, str, str, Collection[str]], Blueprint]] = {"deepseek_v32": deepseek_sparse}
