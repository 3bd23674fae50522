"""From config.json and tensor headers to a ModelSpec.

Shapes follow from the headers where there are any, else from the config for families whose layout the config
fixes. Everything downstream works on tensor groups: a weight name with its layer and expert numbers as `*`, how
often it occurs, its shape, and how tensor parallelism cuts it. What these rules do not know is a BadModel, never
a guess: a wrong size here is an engine that runs out of memory later.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from gateway.core.fields import WORD, Fields, shown
from gateway.core.layout import shard_of, tensors_of
from gateway.domain import AttentionGroup, Experts, ModelSpec, Quant, TensorGroup
from gateway.errors import BadModel


class Tensor(NamedTuple):
    """One tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")
# No weight tensor has as many elements; what says so is broken, or made to break us.
_MOST_ELEMENTS = 2**50

# The first named dtype that the headers have is the widest, which engines take when the config names none.
# Source: common_broadcastable_dtype in vllm/transformers_utils/model_arch_config_convertor.py.
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

# Encoders attend in both directions and generate nothing, so engines keep no KV cache for them.
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "nomic_bert"}
# Their positions begin after the padding token's, which shortens what fits. Source: vllm/model_executor/models/roberta.py.
_OFFSET_POSITIONS = {"roberta": 2, "xlm-roberta": 2, "mpnet": 2}

# Spellings of the same size. Source: CONFIG_FIELD_ALIASES in vllm/transformers_utils/config.py, and transformers.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_trained_positions",
)
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k_experts")

# Every n-th layer of these is full attention and the rest slide; a config that says so itself has `layer_types`.
# Source: the defaults of transformers' configuration classes, which fill `layer_types` for the engine.
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3": 6, "gemma3_text": 6}
# These slide in all layers. A family that is in neither set counts as full attention, which is never too little.
_ALL_SLIDE = {"mistral", "mixtral", "phi3", "starcoder2"}
_LAYER_KINDS = ("full_attention", "attention", "sliding_attention")
# Fields of models that keep something else than keys and values per head and token: latents, recurrent states.
_OTHER_STATE = ("kv_lora_rank", "global_head_dim", "block_configs", "is_encoder_decoder")
_RECURRENT = ("mamba_d_state", "ssm_state_size", "state_size", "layers_block_type", "attn_type_list", "hybrid_override_pattern")


def read_model(
    source: str,
    revision: str | None,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
    file_bytes: int | None,
    remote_code: tuple[str, ...],
    task_hint: Literal["generate", "embed"] | None,
) -> ModelSpec:
    """Raises BadModel naming the field of config.json, or the tensor, that is missing or cannot be."""
    top = Fields(config, source)
    fields = Fields(top.mapping("text_config", config), source)
    architecture = top.first_word("architectures")
    family = top.word("model_type")
    encoder = family in _ENCODERS
    attention = _attention(fields, fields.word("model_type") if "model_type" in fields.config else family)
    experts = _experts(fields)
    dtype = _dtype(top, fields, tensors)
    task = "embed" if encoder else task_hint or "generate"
    # Tied heads are the embedding, and pooling drops the head: engines load neither, even where a file has it.
    headless = task == "embed" or top.flag("tie_word_embeddings") or fields.flag("tie_word_embeddings")
    if tensors is None:
        groups, origin = tensors_of(fields, family, attention[0], experts, _DTYPES[dtype], headless=headless), "config"
    else:
        _check_shapes(tensors, source)
        kept = {name: tensor for name, tensor in tensors.items() if not (headless and _HEAD.search(name))}
        groups, origin = group_tensors(kept), "headers"
    return ModelSpec(
        source=source,
        revision=revision,
        architecture=architecture,
        model_type=family,
        task=cast("Any", task),
        dtype=cast("Any", dtype),
        max_position=_longest(fields, family),
        hidden=fields.integer(*_HIDDEN),
        vocab=fields.integer("vocab_size"),
        attention=attention,
        experts=experts,
        quant=quant_of(top, fields),
        tensors=groups,
        tensors_from=cast("Any", origin),
        remote_code=remote_code,
        file_bytes=file_bytes,
        config=dict(config),
    )


def group_tensors(tensors: Mapping[str, Tensor]) -> tuple[TensorGroup, ...]:
    """Fold tensors that differ only in their numbers, dtype and shape being equal."""
    counts: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for name, tensor in tensors.items():
        key = (_NUMBER.sub("*", name), tensor.dtype, tensor.shape)
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        TensorGroup(name=name, count=count, shape=shape, dtype=dtype, shard=shard_of(name))
        for (name, dtype, shape), count in sorted(counts.items())
    )


def _attention(fields: Fields, family: str) -> tuple[AttentionGroup, ...]:
    heads, layers = fields.integer(*_HEADS), fields.integer(*_LAYERS)
    # Multi-query attention has one KV head. Source: FalconModelArchConfigConvertor (vllm/transformers_utils).
    single = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    kv_heads = 1 if single else fields.integer(*_KV_HEADS, default=heads)
    hidden = fields.integer(*_HIDDEN)
    head_dim = fields.integer("head_dim", default=max(1, hidden // heads))
    if heads % kv_heads or (hidden % heads and fields.config.get("head_dim") is None):
        raise BadModel(
            f"config.json of {fields.source} has {heads} attention heads, which its {kv_heads} KV heads or its "
            f"hidden size of {hidden} do not divide into.",
            hint="Repair config.json, or take the model from where it was published.",
        )
    if family in _ENCODERS:
        return (AttentionGroup(kind="encoder", layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim),)
    kinds = _layer_kinds(fields, layers)
    sliding = _sliding_layers(fields, family, layers) if kinds is None else kinds.count("sliding_attention")
    # Some checkpoints write 0 for no window. Source: vllm/config/model.py.
    window = fields.integer("sliding_window") if sliding and fields.config.get("sliding_window") != 0 else None
    counts: tuple[tuple[Literal["full", "sliding"], int, int | None], ...] = (("full", layers, None),)
    if window is not None:
        counts = (("full", layers - sliding, None), ("sliding", sliding, window))
    return tuple(
        AttentionGroup(kind=kind, layers=count, heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=size)
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


def _longest(fields: Fields, family: str) -> int:
    """The most positions: the smallest of the limits that the config names."""
    lengths = [fields.integer(name) for name in _LENGTHS if fields.config.get(name) is not None]
    return max(1, min(lengths, default=2048) - _OFFSET_POSITIONS.get(family, 0))


def _experts(fields: Fields) -> Experts | None:
    names = [name for name in _EXPERTS if fields.config.get(name)]
    if not names:
        return None
    shared = "shared_expert_intermediate_size"
    return Experts(
        count=fields.integer(*names),
        per_token=fields.integer(*_EXPERTS_PER_TOKEN),
        intermediate=fields.integer("moe_intermediate_size", "intermediate_size"),
        shared_intermediate=fields.integer(shared) if fields.config.get(shared) else 0,
    )


def _dtype(top: Fields, fields: Fields, tensors: Mapping[str, Tensor] | None) -> str:
    for config in (fields.config, top.config):
        for name in ("dtype", "torch_dtype"):
            value = config.get(name)
            if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
                return value.removeprefix("torch.")
    stored = {tensor.dtype for tensor in (tensors or {}).values()}
    return next((name for name, code in _DTYPES.items() if code in stored), "float32")


def quant_of(top: Fields, fields: Fields) -> Quant | None:
    """The checkpoint's quantization block, from wherever config.json has it."""
    for config in (top, fields):
        for name in ("quantization_config", "compression_config"):
            if config.config.get(name) is None:
                continue
            block = config.mapping(name, {})
            method = block.get("quant_method")
            if method is None and isinstance(block.get("producer"), Mapping):
                # ModelOpt names itself there only.
                method = block["producer"].get("name")
            if not isinstance(method, str) or not WORD.fullmatch(method):
                raise config.wrong(name, "an object with a `quant_method`")
            try:
                json.dumps(block, ensure_ascii=False).encode()
            except (ValueError, TypeError, RecursionError):
                raise config.wrong(name, "plain JSON") from None
            return Quant(method=method, config=dict(block))
    return None


def _check_shapes(tensors: Mapping[str, Tensor], source: str) -> None:
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) > _MOST_ELEMENTS or any(size < 0 for size in tensor.shape):
            raise BadModel(
                f"Tensor {shown(name)} of {source} has a shape that no weights have.", hint="Download or copy the model again."
            )
