"""The reader of models: config.json and tensor headers to a ModelSpec.

config.json is enough for every family of families/registry.py. For an unknown family, sizes
come from the usual names of fields and are marked as `guessed`. Headers, where present, give the
exact weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from gateway.domain import Experts, ModelSpec, Task, TensorGroup
from gateway.domain.model import GENERATION_TASKS
from gateway.errors import BadModel
from gateway.models.context_limit import context_limit
from gateway.models.families import text_config
from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields, quote
from gateway.models.families.field_names import EXPERTS_PER_TOKEN, HEADS, HIDDEN_SIZE
from gateway.models.families.parts import ENCODERS
from gateway.models.families.registry import NESTED_FAMILIES, add_defaults, build_blueprint
from gateway.models.quantization_block import read_quantization
from gateway.models.sharding import parse_shard
from gateway.models.task import read_task
from gateway.models.tensor import Tensor

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")
# No real weight has this many elements: a header that says so is damaged or hostile.
_MAX_ELEMENTS = 2**50

# Dtypes from the widest to the narrowest. Engines take the widest dtype of the headers where the
# config names none. Source: common_broadcastable_dtype in
# vllm/transformers_utils/model_arch_config_convertor.py.
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FLOATS = {*_DTYPES.values()}

TOKENIZER_CODE = "auto_map in tokenizer_config.json"
"""The entry of `remote_code` for a repository's own tokenizer."""

# Layers that draft tokens. Engines build them for speculation only. Source:
# get_spec_layer_idx_from_weight_name in vllm/model_executor/models/deepseek_v2.py, glm4_moe.py; the
# mtp. prefix that qwen3_next.py and qwen3_5.py skip.
_DRAFT_LAYER = re.compile(r"^(model\.)?mtp\.")
_LAYER_NUMBER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")


def read_model(
    source: str,
    revision: str | None,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
    file_bytes: int | None,
    remote_code: tuple[str, ...],
    task_hint: Task | None,
    structure: str = "",
) -> ModelSpec:
    """The spec of a model. Raises BadModel that names the missing or wrong field or tensor.

    structure: JSON text of the layers that an engine builds (families/model_structure.py).
    tensors: those of its headers; None: only config.json is known.
    file_bytes: size of the weight files.
    """
    top = Fields(config, source)
    fields = add_defaults(_text_config(top))
    architecture = top.first_word("architectures")
    family = top.word("model_type")
    plan = build_blueprint(config, source, structure=structure)
    attention = plan.attention
    experts = _planned_experts(plan, fields)
    dtype, dtype_source = _dtype(top, fields, tensors)
    encoder = family in ENCODERS or all(group.kind == "encoder" for group in attention)
    task, task_source = read_task(config, is_encoder=encoder, hint=task_hint)
    limit = context_limit(config, source)
    # A tied head is the embedding, and pooling drops the head: engines load neither, even where a
    # file has one.
    headless = task not in GENERATION_TASKS or _has_tied_head(plan)
    groups, drafts = _tensor_groups(tensors, fields, source, headless=headless)
    return ModelSpec(
        source=source,
        revision=revision,
        architecture=architecture,
        model_type=family,
        task=task,
        dtype=cast("Any", dtype),
        max_position=limit.tokens,
        has_open_limit=limit.is_open,
        sources={
            "max_position": limit.source,
            "dtype": dtype_source,
            "heads": _heads_source(top, fields),
            "task": task_source,
        },
        guessed=plan.guessed,
        hidden=fields.integer(*HIDDEN_SIZE),
        vocab=fields.integer("vocab_size"),
        attention=attention,
        experts=experts,
        quant=read_quantization(top, fields),
        tensors=groups,
        tensors_from="config" if tensors is None else "headers",
        draft_tensors=drafts,
        remote_code=remote_code,
        file_bytes=file_bytes,
        config=dict(config),
        structure=structure,
    )


def _tensor_groups(
    tensors: Mapping[str, Tensor] | None, fields: Fields, source: str, *, headless: bool
) -> tuple[tuple[TensorGroup, ...], tuple[TensorGroup, ...]]:
    """The tensors that engines load, and those of layers that only draft. Raises BadModel."""
    if tensors is None:
        return (), ()
    _check_shapes(tensors, source)
    drafting = _draft_layers(fields)
    loaded_tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not (headless and _HEAD.search(name)) and not drafting(name)
    }
    drafts = {name: tensor for name, tensor in tensors.items() if drafting(name)}
    return group_tensors(loaded_tensors), group_tensors(drafts)


def drop_head(spec: ModelSpec) -> ModelSpec:
    """The model without an output head, which pooling drops."""
    return spec.evolve(
        tensors=tuple(group for group in spec.tensors if not _HEAD.search(group.name))
    )


def group_tensors(tensors: Mapping[str, Tensor]) -> tuple[TensorGroup, ...]:
    """Fold tensors of one dtype and shape whose names differ in numbers only."""
    counts: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for name, tensor in tensors.items():
        key = (_NUMBER.sub("*", name), tensor.dtype, tensor.shape)
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        TensorGroup(name=name, count=count, shape=shape, dtype=dtype, shard=parse_shard(name))
        for (name, dtype, shape), count in sorted(counts.items())
    )


def _text_config(top: Fields) -> Fields:
    """The config of the text model, nested or not."""
    if top.word("model_type") in NESTED_FAMILIES:
        return Fields(top.mapping("text_config", top.config), top.source)
    return text_config.read_text_config(top).fields


def _has_tied_head(plan: Blueprint) -> bool:
    return not any(_HEAD.search(group.name) for group in plan.parameters)


def _draft_layers(fields: Fields) -> Callable[[str], bool]:
    """A predicate over tensor names: whether the layer only drafts tokens."""
    last = text_config.read_layer_count(fields)
    is_numbered = bool(fields.config.get("num_nextn_predict_layers"))

    def drafts(name: str) -> bool:
        layer = _LAYER_NUMBER.match(name) if is_numbered else None
        return bool(_DRAFT_LAYER.match(name)) or (layer is not None and int(layer[1]) >= last)

    return drafts


def _heads_source(top: Fields, fields: Fields) -> str:
    for config in (text_config.read_text_config(top).fields, top):
        if name := config.first_name(*HEADS, "decoder_attention_heads", "num_heads"):
            return f"{name} in config.json"
    return f"the default for {fields.config.get('model_type', top.config.get('model_type'))}"


def _planned_experts(plan: Blueprint, fields: Fields) -> Experts | None:
    experts = [linear for linear in plan.linears if linear.experts and linear.shard == "expert_row"]
    if not experts:
        return None
    per_token = _experts_per_token(plan, fields)
    max_experts = max(linear.experts for linear in experts)
    if per_token > max_experts:
        raise BadModel(
            f"config.json of {fields.source} sends each token to {per_token} experts of"
            f" {max_experts}.",
            hint="Repair config.json, or download the model again from its publisher.",
        )
    return Experts(
        count=experts[0].experts,
        per_token=per_token,
        intermediate=experts[0].k,
    )


def _experts_per_token(plan: Blueprint, fields: Fields) -> int:
    nested = fields.config.get("ffn_config")  # of DBRX
    if isinstance(nested, Mapping) and "moe_top_k" in nested:
        return Fields(nested, fields.source).integer("moe_top_k")
    return (
        fields.largest(EXPERTS_PER_TOKEN, default=1)
        if plan.guessed
        else fields.integer(*EXPERTS_PER_TOKEN)
    )


def _dtype(top: Fields, fields: Fields, tensors: Mapping[str, Tensor] | None) -> tuple[str, str]:
    """The dtype of the weights, and its source."""
    for config in (fields.config, top.config):
        for name in ("dtype", "torch_dtype"):
            value = config.get(name)
            if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
                return value.removeprefix("torch."), f"{name} in config.json"
    stored_dtypes = {tensor.dtype for tensor in (tensors or {}).values()}
    for name, code in _DTYPES.items():
        if code in stored_dtypes:
            return name, "the headers of the weight files"
    return "float32", "the engines' default; no file names a dtype"


def pipeline_layers(spec: ModelSpec) -> int | None:
    """The number of layers that pipeline stages divide; None: config.json has no such number."""
    try:
        return text_config.read_layer_count(
            text_config.read_text_config(Fields(spec.config, spec.source)).fields
        )
    except BadModel:
        return None


def add_quant_files(spec: ModelSpec, files: Mapping[str, Mapping[str, Any]]) -> ModelSpec:
    """The model with the quantization that files next to config.json describe, by name. Raises
    BadModel."""
    top = Fields(spec.config, spec.source)
    quant = read_quantization(top, _text_config(top), files)
    floats = spec.tensors_from == "headers" and all(
        group.dtype in _FLOATS for group in spec.tensors
    )
    # Files for other programs may have stayed next to weights that are not quantized.
    return spec if quant is not None and quant.is_unread and floats else spec.evolve(quant=quant)


def _check_shapes(tensors: Mapping[str, Tensor], source: str) -> None:
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) > _MAX_ELEMENTS or any(size < 0 for size in tensor.shape):
            raise BadModel(
                f"Tensor {quote(name)} of {source} has an impossible shape.",
                hint="Download or copy the model again.",
            )
