"""Attention over keys and values: heads, and which layers see a window only. Pure."""

from __future__ import annotations

from typing import Literal

from gateway.core.model.config import Fields, shown
from gateway.domain import AttentionGroup
from gateway.errors import BadModel

# Spellings of the same size. Source: CONFIG_FIELD_ALIASES in vllm/transformers_utils/config.py, and transformers.
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")

# Encoders attend in both directions and generate nothing, so engines keep no KV cache for them.
ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "nomic_bert"}

# The head size of a config that names none, where it is not hidden size / heads.
# Source: the defaults of transformers' configuration classes.
_HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128, "qwen3_next": 256, "gpt_oss": 64}
_HEAD_DIMS |= {"qwen3_5_text": 256, "qwen3_5_moe_text": 256}

# Every n-th layer of these is full attention and the rest slide; a config that says so itself has `layer_types`.
# Source: the defaults of transformers' configuration classes, which fill `layer_types` for the engine.
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3": 6, "gemma3_text": 6}
# These slide in all layers. A family that is in neither set counts as full attention, which is never too little.
_ALL_SLIDE = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
_LAYER_KINDS = ("full_attention", "attention", "sliding_attention")
# Fields of models that keep something else than keys and values per head and token: latents, recurrent states.
_OTHER_STATE = ("kv_lora_rank", "global_head_dim", "block_configs", "is_encoder_decoder")
_RECURRENT = ("mamba_d_state", "ssm_state_size", "state_size", "layers_block_type", "attn_type_list", "hybrid_override_pattern")


def heads_of(fields: Fields, family: str) -> tuple[int, int, int]:
    """(query heads, KV heads, head size)."""
    heads, hidden = fields.integer(*HEADS), fields.integer(*HIDDEN)
    # Multi-query attention has one KV head. Source: FalconModelArchConfigConvertor (vllm/transformers_utils).
    single = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    kv_heads = 1 if single else fields.integer(*KV_HEADS, default=heads)
    named = fields.config.get("head_dim") is not None or family in _HEAD_DIMS
    if heads % kv_heads or (hidden % heads and not named):
        raise BadModel(
            f"config.json of {fields.source} has {heads} attention heads, which its {kv_heads} KV heads or its "
            f"hidden size of {hidden} do not divide into.",
            hint="Repair config.json, or take the model from where it was published.",
        )
    return heads, kv_heads, fields.integer("head_dim", default=_HEAD_DIMS.get(family, max(1, hidden // heads)))


def softmax_groups(fields: Fields, family: str, *, sinks: bool = False) -> tuple[AttentionGroup, ...]:
    """All layers, as full and sliding attention; as encoders' for families that are."""
    heads, kv_heads, head_dim = heads_of(fields, family)
    layers = fields.integer(*LAYERS)
    if family in ENCODERS:
        kind: Literal["encoder"] = "encoder"
        return (AttentionGroup(kind=kind, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=False),)
    kinds = _layer_kinds(fields, layers)
    sliding = _sliding_layers(fields, family, layers) if kinds is None else kinds.count("sliding_attention")
    # Some checkpoints write 0 for no window. Source: vllm/config/model.py.
    window = fields.integer("sliding_window") if sliding and fields.config.get("sliding_window") != 0 else None
    # Source: Gemma3TextConfig of transformers, and gemma3.py and llama.py of vllm/model_executor/models/.
    both_ways = fields.flag("use_bidirectional_attention") or fields.config.get("is_causal") is False
    if window is not None and family == "gemma3_text" and both_ways:
        window = window // 2 + 1
    counts: tuple[tuple[Literal["full", "sliding"], int, int | None], ...] = (("full", layers, None),)
    if window is not None:
        counts = (("full", layers - sliding, None), ("sliding", sliding, window))
    return tuple(
        AttentionGroup(
            kind=kind,
            layers=count,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=size,
            sinks=sinks,
            causal=not both_ways,
        )
        for kind, count, size in counts
        if count
    )


def _layer_kinds(fields: Fields, layers: int) -> list[str] | None:
    """The checked `layer_types`, or None where the config has none."""
    kinds = fields.config.get("layer_types")
    states = _OTHER_STATE if kinds is not None else _OTHER_STATE + _RECURRENT
    unknown = next((name for name in states if fields.config.get(name)), None)
    if isinstance(kinds, list) and unknown is None:
        unknown = next((f"layer_types of {shown(kind)}" for kind in kinds if kind not in _LAYER_KINDS), None)
    if unknown is not None:
        raise BadModel(
            f"{fields.source} keeps a state whose memory these rules do not know yet ({unknown} in config.json).",
            hint="Serve it by an engine started elsewhere and add that as an endpoint.",
        )
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise fields.wrong("layer_types", f"a list with one kind for each of {layers} layers")
    return kinds


def _sliding_layers(fields: Fields, family: str, layers: int) -> int:
    """How many layers attend to a window only, where `layer_types` does not say so."""
    if not fields.config.get("sliding_window"):
        return 0
    if "use_sliding_window" in fields.config:
        # Qwen: the layers from `max_window_layers` on.
        used = fields.flag("use_sliding_window")
        return layers - min(layers, fields.integer("max_window_layers", default=layers, least=0)) if used else 0
    if family in _FULL_EVERY:
        return layers - layers // fields.integer("sliding_window_pattern", default=_FULL_EVERY[family])
    return layers if family in _ALL_SLIDE else 0
