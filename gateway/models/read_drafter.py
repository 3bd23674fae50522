"""The reader of drafters: config.json and tensor headers to a Drafter. Pure.

    read_drafter(source, revision, config, tensors) -> Drafter

Formats: speculators (a `speculators_config` around the layers), EAGLE and EAGLE3, DFlash, DSpark,
heads of the MTP kind with a repository of their own, and plain models. Sources:
vllm/config/speculative.py, vllm/transformers_utils/configs/eagle.py and speculators/algos.py, and
vllm/model_executor/models/{llama_eagle,llama_eagle3,qwen3_dflash,qwen3_dspark}.py of 0.33.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.domain import AttentionGroup, ModelSpec, Shard, TensorGroup
from gateway.errors import BadModel
from gateway.models.drafter import Drafter, DraftMethod
from gateway.models.families.config import Fields
from gateway.models.spec import group_tensors, read_model
from gateway.models.tensor import Tensor

# speculators_model_type -> the method that engines run it with.
# Source: build_vllm_speculative_config in vllm/transformers_utils/configs/speculators/base.py.
_SPECULATORS: dict[str, DraftMethod] = {
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "dflash": "dflash",
    "dflash2": "dflash",
    "dspark": "dspark",
}
_BLOCKS = ("dflash", "dspark")  # draft a block of tokens in one pass
_MAX_TOKENS = 64
# Tables between the drafter's vocabulary and the target's. Engines load d2t only.
_UNUSED_TABLES = ("t2d",)


def read_drafter(
    source: str,
    revision: str | None,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
) -> Drafter:
    """The drafter of a config and its tensor headers.

    Raises BadModel that names the missing or wrong field.
    """
    top = Fields(config, source)
    layer = Fields(
        top.mapping("transformer_layer_config", top.mapping("text_config", config)), source
    )
    kind = top.word("speculators_model_type") if "speculators_model_type" in config else ""
    architecture = top.first_word("architectures")
    model_type = layer.word("model_type")
    method = _draft_method(top, kind, architecture, model_type)
    hidden, vocab = layer.integer("hidden_size"), layer.integer("vocab_size")
    tokens, tokens_source = _tokens_of_draft(top, method)
    fields = Fields({**layer.config, **config}, source)
    inner_fields = Fields(
        fields.mapping("dflash_config", fields.mapping("eagle_config", {})), source
    )
    draft_model = None
    if method == "draft_model":
        draft_model = _plain_model(source, revision, config, tensors)
    attention = (
        draft_model.attention if draft_model else _attention_of(layer, fields, inner_fields, method)
    )
    draft_vocab = fields.integer("draft_vocab_size", default=vocab)
    layers = _target_layers(fields, inner_fields)
    if draft_vocab > vocab:
        raise fields.field_error("draft_vocab_size", f"no larger than the vocabulary of {vocab}")
    size = fields.integer("target_hidden_size", default=0, minimum=0) or None
    groups: tuple[TensorGroup, ...] = ()
    if draft_model is None and tensors is not None:
        groups = _used_groups(tensors)
    elif draft_model is None:
        groups = _shapes(layer, fields, method, attention, draft_vocab, size or hidden, len(layers))
    return Drafter(
        source=source,
        revision=revision,
        method=method,
        kind=kind,
        architecture=architecture,
        model_type=model_type,
        tokens=tokens,
        tokens_source=tokens_source,
        is_parallel=kind == "peagle",
        hidden=hidden,
        vocab=vocab,
        draft_vocab=draft_vocab,
        target_hidden=_target_size(method, size, hidden),
        target_layers=layers,
        attention=attention,
        tensors=groups,
        plain=draft_model,
        tensors_from="config" if tensors is None else "headers",
    )


def _plain_model(
    source: str,
    revision: str | None,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
) -> ModelSpec:
    """The model of a drafter that is a whole model."""
    return read_model(
        source, revision, config, tensors, file_bytes=None, remote_code=(), task_hint=None
    )


def _used_groups(tensors: Mapping[str, Tensor]) -> tuple[TensorGroup, ...]:
    """The tensors by name, without tables that the engines do not load."""
    return tuple(
        group for group in group_tensors(tensors) if not group.name.endswith(_UNUSED_TABLES)
    )


def _target_size(method: str, size: int | None, hidden: int) -> int | None:
    """The size of the target's hidden states; None: the drafter reads none.

    size: the config's value, if set. EAGLE and DFlash take the drafter's own size by default.
    """
    if method == "draft_model":
        return None
    return size or (None if method == "mtp" else hidden)


def _draft_method(top: Fields, kind: str, architecture: str, model_type: str) -> DraftMethod:
    if kind:
        if kind not in _SPECULATORS:
            raise top.field_error("speculators_model_type", f"one of {', '.join(_SPECULATORS)}")
        return _SPECULATORS[kind]
    # EAGLE's files name a plain model. Engines too decide by the name of the repository or folder
    # (SpeculativeConfig).
    name = f"{top.source.rstrip('/').rpartition('/')[2]} {architecture}".lower()
    if "dspark" in name:
        return "dspark"
    if "dflash" in name or "dflash_config" in top.config:
        return "dflash"
    if "eagle3" in name or "eagle_config" in top.config or _has_own_vocabulary(top):
        return "eagle3"
    if "eagle" in name:
        return "eagle"
    if (
        "mtp" in name
        or model_type.endswith("_assistant")
        or top.word("model_type").endswith("_assistant")
    ):
        return "mtp"
    return "draft_model"


def _has_own_vocabulary(top: Fields) -> bool:
    """Whether the drafter has its own vocabulary, which only EAGLE3 has."""
    return top.config.get("draft_vocab_size") is not None


def _tokens_of_draft(top: Fields, method: DraftMethod) -> tuple[int | None, str]:
    """The tokens of one draft, and the field that says so."""
    if "speculators_config" in top.config:
        methods = top.mapping("speculators_config", {}).get("proposal_methods")
        first = (
            methods[0]
            if isinstance(methods, list) and methods and isinstance(methods[0], Mapping)
            else None
        )
        if first is None:
            raise top.field_error(
                "speculators_config", "an object with a list `proposal_methods` of objects"
            )
        return (
            _token_count(Fields(first, top.source), "speculative_tokens"),
            "speculators_config.proposal_methods[0].speculative_tokens",
        )
    if method in _BLOCKS and top.config.get("block_size") is not None:
        size = _token_count(top, "block_size")
        # The first token of a DFlash block is the target's own. Source:
        # speculators/algos.py:105 (0.33.0).
        return (max(1, size - 1), "block_size - 1") if method == "dflash" else (size, "block_size")
    if method == "mtp":
        return 1, "one token for each pass of the head (vllm/config/speculative.py, n_predict)"
    return None, ""


def _token_count(fields: Fields, name: str) -> int:
    count = fields.integer(name)
    if count > _MAX_TOKENS:
        raise fields.field_error(name, f"at most {_MAX_TOKENS}")
    return count


def _target_layers(draft: Fields, inner_fields: Fields) -> tuple[int, ...]:
    """Layers of the target whose outputs the drafter reads; empty: the engine chooses three."""
    for fields, name in (
        (draft, "aux_hidden_state_layer_ids"),
        (draft, "eagle_aux_hidden_state_layer_ids"),
        (inner_fields, "eagle_aux_hidden_state_layer_ids"),
        (inner_fields, "target_layer_ids"),
        (draft, "target_layer_ids"),
    ):
        numbers = fields.config.get(name)
        if numbers is None:
            continue
        if not isinstance(numbers, list) or not all(
            type(number) is int and 0 <= number < 10_000 for number in numbers
        ):
            raise fields.field_error(name, "a list of layer numbers")
        return tuple(numbers)
    return ()


def _attention_of(
    layer: Fields, draft: Fields, inner_fields: Fields, method: DraftMethod
) -> tuple[AttentionGroup, ...]:
    """The attention of a drafter by its config. Raises BadModel that names the field."""
    if method == "mtp":
        return ()  # reads the target's own cache (vllm/v1/spec_decode/gemma4.py)
    heads = layer.integer("num_attention_heads")
    layers = layer.integer("num_hidden_layers")
    if layer.config.get("kv_lora_rank") is not None:
        rank = layer.integer("kv_lora_rank")
        width = rank + layer.integer("qk_rope_head_dim")
        return (
            AttentionGroup(
                kind="mla", layers=layers, heads=heads, kv_heads=1, head_dim=width, value_dim=rank
            ),
        )
    kv_heads = layer.integer("num_key_value_heads", default=heads)
    head_dim = layer.integer("head_dim", default=max(1, layer.integer("hidden_size") // heads))
    if heads % kv_heads:
        raise layer.field_error("num_key_value_heads", f"a divisor of the {heads} attention heads")
    kinds = layer.config.get("layer_types") or ["full_attention"] * min(layers, 10_000)
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(isinstance(kind, str) for kind in kinds)
    ):
        raise layer.field_error("layer_types", f"a list with one kind for each of {layers} layers")
    sliding = kinds.count("sliding_attention")
    if method in _BLOCKS and inner_fields.flag("use_swa") and not sliding:
        sliding = layers
    window = None
    if sliding:
        window = inner_fields.integer(
            "swa_window_size",
            default=layer.integer("sliding_window", default=0, minimum=0),
            minimum=0,
        )
        if not window:
            raise layer.missing_field_error("sliding_window")
    causal = _is_causal(draft, inner_fields, sliding == layers) if method in _BLOCKS else True
    common_fields = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "causal": causal}
    groups = (
        AttentionGroup(kind="full", layers=layers - sliding, **common_fields),
        AttentionGroup(kind="sliding", layers=sliding, window=window, **common_fields),
    )
    return tuple(group for group in groups if group.layers)


def _is_causal(draft: Fields, inner_fields: Fields, has_only_windows: bool) -> bool:
    """Whether every layer is causal within its block.

    A single non-causal layer makes the engine require a backend that supports it in all layers.
    Source: dflash_has_any_non_causal in vllm/model_executor/models/qwen3_dflash.py, update_dflash
    in speculators/algos.py.
    """
    for fields, name in ((draft, "is_causal"), (inner_fields, "causal")):
        if fields.config.get(name) is not None:
            return fields.flag(name)
    if "sliding_window_non_causal" in draft.config or "speculators_config" in draft.config:
        return draft.config.get("sliding_window_non_causal") is False
    return has_only_windows and not inner_fields.flag("use_swa")


def _norm_count(method: DraftMethod, layers: int) -> int:
    counts = {
        "eagle": 2 * layers - 1,
        "eagle3": 3 * layers + 1,
        "dflash": 2 * layers + 3,
        "dspark": 2 * layers + 2,
    }
    return counts[method]


def _shapes(
    layer: Fields,
    draft: Fields,
    method: DraftMethod,
    attention: tuple[AttentionGroup, ...],
    draft_vocab: int,
    target_hidden: int,
    read: int,
) -> tuple[TensorGroup, ...]:
    """The tensors of an EAGLE, DFlash or DSpark drafter by its config. Raises BadModel."""
    if method == "mtp" or attention[0].kind == "mla":
        raise BadModel(
            f"The size of the drafter {layer.source} is known only from its weight files, and"
            " they are missing.",
            hint="Give a folder or repository with its safetensors files.",
        )
    hidden = layer.integer("hidden_size")
    vocab = layer.integer("vocab_size")
    width = layer.integer("intermediate_size")
    heads = attention[0]
    layers = layer.integer("num_hidden_layers")
    queries, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    groups: list[TensorGroup] = []

    def add(name: str, shard: Shard, *shape: int, count: int = 1, dtype: str = "BF16") -> None:
        if count and math.prod(shape):
            groups.append(
                TensorGroup(name=name, count=count, shape=shape, dtype=dtype, shard=shard)
            )

    # The first layer of an EAGLE3 reads the token and the hidden state.
    extra_inputs = 1 if method == "eagle3" else 0
    projections: tuple[tuple[str, int, Shard], ...] = (
        ("q_proj", queries, "column"),
        ("k_proj", keys, "kv"),
        ("v_proj", keys, "kv"),
    )
    for name, size, shard in projections:
        add(f"layers.0.{name}", shard, size, 2 * hidden, count=extra_inputs)
        add(f"layers.*.{name}", shard, size, hidden, count=layers - extra_inputs)
    add("layers.*.o_proj", "row", hidden, queries, count=layers)
    add("layers.*.gate_proj", "column", width, hidden, count=layers)
    add("layers.*.up_proj", "column", width, hidden, count=layers)
    add("layers.*.down_proj", "row", hidden, width, count=layers)
    add("norms", "replicated", hidden, count=_norm_count(method, layers))
    if layer.word("model_type").startswith("qwen3"):
        add("layers.*.qk_norm", "replicated", heads.head_dim, count=2 * layers)
    inputs = {"eagle": 2 * hidden, "eagle3": 3 * target_hidden}.get(
        method, target_hidden * (read or layers)
    )
    add("fc", "replicated", hidden, inputs)
    if method == "dspark":
        rank = draft.integer("markov_rank", default=0, minimum=0)
        add("markov", "replicated", vocab + draft_vocab, rank)
    add("embed_tokens", "vocab", vocab, hidden)
    if method != "eagle":
        add("lm_head", "vocab", draft_vocab, hidden)
    if draft_vocab < vocab or draft.config.get("draft_vocab_size") is not None:
        add("d2t", "replicated", draft_vocab, dtype="I64")
    return tuple(groups)
