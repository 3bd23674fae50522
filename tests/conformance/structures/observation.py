"""The layers, parameters and attention that vLLM builds of a config, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from gateway.engines.vllm.inside.model import build_from_config

Row = dict[str, Any]
_SHARDS = (
    ("QKVParallelLinear", "qkv"),
    ("MergedColumnParallelLinear", "merged"),
    ("ColumnParallelLinear", "column"),
    ("RowParallelLinear", "row"),
)
_WEIGHTS = {"weight", "bias", "w13_weight", "w2_weight", "w13_bias", "w2_bias"}
# Layers of the engine, and the contents of their caches, by their kind here.
_LAYERS = {
    "Attention": "full",
    "ChunkedLocalAttention": "full",
    "MLAAttention": "mla",
    "MMEncoderAttention": "vision",
    "EncoderOnlyAttention": "encoder",
    "CrossAttention": "cross",
}
_CACHES = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "full",
    "MLAAttentionSpec": "mla",
    "CrossAttentionSpec": "cross",
}


def observe(config: Mapping[str, Any], tp: int = 1, **arguments: Any) -> dict[str, Row]:
    """The rows of one rank of `tp`, by module or parameter name. Raises the engine's errors."""
    linear: Any = importlib.import_module("vllm.model_executor.layers.linear")
    vocab: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    rows: dict[str, Row] = {}
    names_of_layers: set[str] = set()
    ids: set[int] = set()
    with build_from_config(config, tp, max_model_len=256, **arguments) as (configuration, model):
        names = {name for name, _ in model.named_parameters()}
        for path, module in model.named_modules():
            weights = {
                f"{path}.{name}"
                for name, _ in module.named_parameters(recurse=False)
                if name in _WEIGHTS
            }
            if isinstance(module, linear.LinearBase):
                rows[path] = _linear(module, tp)
                names_of_layers |= weights
            elif hasattr(module, "w13_weight"):
                rows[path] = _experts(module)
                names_of_layers |= weights
            elif isinstance(module, vocab.VocabParallelEmbedding):
                names_of_layers |= weights
                if f"{path}.weight" in names:  # a tied head is the embedding
                    size = {"rows": module.org_vocab_size, "columns": module.embedding_dim}
                    rows[f"{path}.weight"] = {"what": "vocab", **size}
            before = len(rows)
            _add_states(rows, path, module, configuration)
            ids |= {id(module)} if len(rows) > before else set()
        _add_unseen_layers(rows, configuration, ids)
        for path, weight in model.named_parameters():
            if path not in names_of_layers:
                dtype = "F32" if str(weight.dtype) == "torch.float32" else ""
                rows[path] = {"what": "parameter", "shape": [*weight.shape], "dtype": dtype}
    return rows


def _linear(module: Any, tp: int) -> Row:
    bases = {base.__name__ for base in type(module).__mro__}
    shard = next((shard for name, shard in _SHARDS if name in bases), "replicated")
    if tp > 1 and getattr(module, "tp_size", tp) == 1:
        shard = "replicated"
    weight = getattr(module, "weight", None)
    outputs = weight.shape[0] if weight is not None and weight.dim() > 1 else 0
    row = {
        "what": "linear",
        "shard": shard,
        "k": module.input_size,
        "parts": [*(getattr(module, "output_sizes", None) or [module.output_size])],
        "bias": int(getattr(module, "bias", None) is not None),
        "exact": int(str(getattr(weight, "dtype", "")) == "torch.float32"),
        "method": type(module.quant_method).__name__,
    }
    if tp > 1:
        row["outputs"] = outputs
    if shard == "qkv":
        row |= {"heads": module.total_num_heads, "kv_heads": module.total_num_kv_heads}
    return row


def _experts(module: Any) -> Row:
    """Fused experts: w13 is (experts, width or two widths, hidden), w2 (experts, hidden, width)."""
    count, inner, hidden_size = module.w13_weight.shape
    return {
        "what": "experts",
        "count": count,
        "inner": inner,
        "hidden": hidden_size,
        "width": module.w2_weight.shape[2],
        "bias": int(hasattr(module, "w13_bias")),
        "method": type(module.quant_method).__name__,
    }


def _add_states(rows: dict[str, Row], path: str, module: Any, configured: Any) -> None:
    """Attention and recurrent states of a module, beside its weights."""
    name = type(module).__name__
    if hasattr(type(module), "mamba_type") and hasattr(module, "get_state_shape"):
        rows[f"{path}#state"] = _state(module)
    elif hasattr(module, "head_size") and hasattr(module, "num_kv_heads") and "Attention" in name:
        rows[f"{path}#attention"] = _attention(module, configured)
    elif name.endswith(("Mixer", "Mixer2", "GatedDeltaNet", "ShortConv")):
        rows[f"{path}#state"] = {"what": "state", "kind": name}


def _attention(module: Any, configured: Any) -> Row:
    latent = getattr(module, "kv_lora_rank", None)
    index = _index(getattr(module, "indexer", None))
    head = getattr(module, "head_size", None) or module.head_dim
    kind = _kind(module, configured)
    return {
        "what": "attention",
        "kind": kind if kind and index is not None else type(module).__name__,
        "causal": str(getattr(module, "attn_type", "")),
        "heads": module.num_heads,
        "kv_heads": 1 if kind == "mla" else module.num_kv_heads,
        "head": head,
        "value": latent or getattr(module, "head_size_v", head),
        "index": index or 0,
        "window": getattr(module, "sliding_window", None)
        or getattr(module, "attention_chunk_size", None)
        or 0,
        "shares": int(getattr(module, "kv_sharing_target_layer_name", None) is not None),
        "sinks": int(getattr(module, "has_sink", False)),
        "alibi": int(getattr(getattr(module, "impl", None), "alibi_slopes", None) is not None),
    }


def _index(indexer: Any) -> int | None:
    """The size of a key that an indexer keeps of a token; 0: there is no indexer; None: not
    known."""
    owners = (indexer, getattr(indexer, "index_cache", None))
    sizes = [getattr(owner, "head_dim", None) for owner in owners]
    return 0 if indexer is None else next((size for size in sizes if size), None)


def _kind(module: Any, configured: Any) -> str:
    """The kind of an attention layer: by the engine's class that it extends, else by the cache that
    it asks for; "": neither is known."""
    layer_class = type(module)
    base = next(
        (
            base
            for base in layer_class.__mro__
            if base.__module__.startswith("vllm.model_executor.layers")
        ),
        layer_class,
    )
    is_same_class = all(
        getattr(layer_class, name, None) is getattr(base, name, None)
        for name in ("get_kv_cache_spec", "get_attn_backend")
    )
    if is_same_class and base.__name__ in _LAYERS:
        return _LAYERS[base.__name__]
    if not hasattr(module, "get_kv_cache_spec"):
        return ""
    cache = module.get_kv_cache_spec(configured)
    # Several tokens in one entry, or entries of a layout of their own, have no term here.
    plain = getattr(cache, "tokens_per_state", 1) == 1 and not getattr(
        cache, "state_content_bytes", None
    )
    return _CACHES.get(type(cache).__name__, "") if plain else ""


def _add_unseen_layers(rows: dict[str, Row], configured: Any, described_ids: set[int]) -> None:
    """Add layers with a KV cache that no row describes. An indexer's cache is part of its layer's
    row.

    described_ids: layers with a row, by identity.
    """
    for path, layer in configured.compilation_config.static_forward_context.items():
        name = type(layer).__name__
        if (
            not hasattr(layer, "get_kv_cache_spec")
            or name.endswith("Cache")
            or id(layer) in described_ids
        ):
            continue
        is_known = hasattr(layer, "num_heads") and _kind(layer, configured)
        attention_row = {"what": "attention", "kind": f"unseen {name}"}
        rows[f"{path}#attention"] = _attention(layer, configured) if is_known else attention_row


def _state(module: Any) -> Row:
    """The state of a recurrent layer: last inputs of a convolution, and a matrix per head.

    The convolution's inputs stand in either order of (channels, kernel - 1).
    """
    convolution, *matrices = module.get_state_shape()
    kind = str(getattr(module.mamba_type, "name", module.mamba_type)).lower()
    dtypes = [str(dtype) for dtype in module.get_state_dtype()]
    *heads, columns = matrices[0] if len(matrices) == 1 else (0, 0)
    groups = getattr(module, "n_groups", None) or getattr(module, "num_k_heads", None)
    # Kimi's delta rule has the name of the gated one, and a state by a rule of its own.
    if "kda_state_shape" in type(module).get_state_shape.__code__.co_names:
        kind, groups = "kda", heads[0]
    return {
        "what": "state",
        "kind": kind if len(matrices) < 2 and len(convolution) == 2 else f"other {kind}",
        "dtype": dtypes[1].removeprefix("torch.") if len({*dtypes}) > 1 else "",
        "heads": heads[0],
        "rows": heads[1] if len(heads) > 1 else 1,
        "columns": columns,
        "groups": groups or 0,
        "channels": max(convolution),
        "kernel": min(convolution) + 1,
    }
