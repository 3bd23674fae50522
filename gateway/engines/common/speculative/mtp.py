"""Layers of a checkpoint that draft tokens for it (multi-token prediction): how many, their
attention and their bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gateway.domain import AttentionGroup, ModelSpec, TensorGroup
from gateway.engines.common.layers.built_model import BuiltModel, Linear
from gateway.engines.common.layers.weights import linear_bytes, other_bytes
from gateway.engines.common.memory.kv_cache import ITEM_BYTES
from gateway.engines.common.speculative.speculative_rules import Mtp
from gateway.models.families.config import Fields
from gateway.models.rank import Rank

# Modules that a drafting layer does not have: it is a layer with softmax attention, and experts
# where the model has any.
_RECURRENT = ("linear_attn", "mamba", "mixer.in_proj", "mixer.out_proj")
_DENSE = ("mlp.gate_up_proj", "mlp.down_proj")


class DraftingLayers(NamedTuple):
    """The number of layers that draft, and its source: a field, or the engine's default."""

    layers: int
    source: str


def drafting_layers(spec: ModelSpec, rules: Mtp) -> DraftingLayers | None:
    """The layers that draft; None: this engine version knows none of such a model."""
    fields = Fields(spec.config, spec.source)
    for target in rules.targets:
        if spec.model_type in target.types or spec.architecture in target.architectures:
            inner_fields = Fields(
                {
                    **fields.mapping("text_config", {}),
                    **fields.mapping("mtp_config", {}),
                    **spec.config,
                },
                spec.source,
            )
            if inner_fields.first_name(target.field):
                count = inner_fields.integer(target.field, minimum=0)
                return DraftingLayers(count, f"{target.field} in config.json")
            text = f"the engine's default of {target.field} ({rules.source})"
            return DraftingLayers(target.default or 0, text)
    return None


def drafting_groups(spec: ModelSpec, layers: int) -> tuple[AttentionGroup, ...]:
    """The attention of the drafting layers: that of the model's layers which see everything."""
    group = next(
        (group for group in spec.attention if group.kind in ("full", "mla", "sliding")), None
    )
    return () if group is None else (group.evolve(layers=layers),)


def drafting_bytes(
    spec: ModelSpec, layers: int, rank: Rank, build: Callable[[ModelSpec], BuiltModel]
) -> int | None:
    """Bytes on one rank: of their tensors, else as many as such a layer of the model has; None: not
    known.

    The embedding and the head are the model's own (vllm/v1/spec_decode/llm_base_proposer.py,
    _maybe_share_lm_head), but for a `shared_head` in the files, which is loaded in addition to it.
    """
    if spec.draft_tensors:
        heads = max((group.kv_heads for group in spec.attention), default=1)
        return sum(
            other_bytes(_shared_head(tensor), rank.tp, rank.dtype, heads)
            for tensor in spec.draft_tensors
            if tensor.shard != "vocab"
        )
    drafting_linears = [linear for linear in build(spec).linears if _drafts(linear, spec)]
    sizes = [
        linear_bytes(linear, Rank(tp=rank.tp, dtype=rank.dtype)) for linear in drafting_linears
    ]
    if not sizes or None in sizes:
        return None
    layer_bytes = sum(
        (size or 0) // linear.count for size, linear in zip(sizes, drafting_linears, strict=True)
    )
    # This product joins the token and the hidden state.
    projection_bytes = 2 * spec.hidden * spec.hidden * ITEM_BYTES[rank.dtype]
    return layers * (layer_bytes + projection_bytes)


def vocabulary_bytes(spec: ModelSpec, rank: Rank) -> int:
    """Bytes on one rank of an embedding, and of a head unless both are one tensor."""
    text = spec.config.get("text_config")
    fields = text if isinstance(text, Mapping) else spec.config
    is_tied = bool(fields.get("tie_word_embeddings", spec.config.get("tie_word_embeddings")))
    rows = -(-spec.vocab // rank.tp)
    return (1 if is_tied else 2) * rows * spec.hidden * ITEM_BYTES[rank.dtype]


def _shared_head(tensor: TensorGroup) -> TensorGroup:
    """A shared head is cut like every head. Source: SharedHead in
    vllm/model_executor/models/deepseek_mtp.py."""
    return (
        tensor.evolve(shard="vocab") if tensor.name.endswith("shared_head.head.weight") else tensor
    )


def _drafts(linear: Linear, spec: ModelSpec) -> bool:
    if ".layers.*." not in linear.name or any(name in linear.name for name in _RECURRENT):
        return False
    return spec.experts is None or not linear.name.endswith(_DENSE)
