"""Layers and parameters that one engine version builds of a model, with their quantization schemes.
Pure.

build(spec, traits) -> BuiltModel(linears, others, attention)

Layers that differ only in their number are one Linear with the number as `*`. A scheme for some of
the numbers makes a Linear of its own. The output head is separate. Sources:
vllm/model_executor/models/ of 0.18.0 to 0.33.0, checked by tests/conformance/golden/layer-*.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from gateway.domain import ModelSpec, Quant, TensorGroup
from gateway.engines.common.layers.built_model import BuiltModel, Linear
from gateway.engines.common.quantization.block import (
    UNQUANTIZED_SCHEME,
    LayerScheme,
    Quantization,
    UnknownScheme,
)
from gateway.engines.common.quantization.floating import (
    EXPERTS_BY_SIBLINGS,
    PLAIN_TOWERS,
    QUANTIZED_HEADS,
    WEIGHTS_BY_GROUPS,
)
from gateway.engines.common.quantization.parse import parse
from gateway.errors import BadModel
from gateway.models.families.blueprint import Blueprint, LinearLayer, Shard
from gateway.models.families.registry import RENAMES, build_blueprint, depends_on_version
from gateway.models.scheme import Scheme

# Traits are differences between engine versions. vLLM 0.26.0 and 0.33.0: GPTQ, AWQ and AutoRound
# keep a Qwen3.5 in_proj_ba whole (maybe_disable_tp in layers/mamba/gdn/qwen_gdn_linear_attn.py:853
# of 0.33.0).
WHOLE_GATES = "whole_gates"
# vLLM 0.18.0 keeps the A_log of gated delta nets in the model's dtype (models/qwen3_next.py:490),
# later ones in float32.
NARROW_DECAY = "narrow_decay"

# vLLM 0.33.0 cuts a Mamba 2 projection of one group however it is packed. Earlier versions ask it
# for a parameter that packed integers do not have: in_proj.weight (layers/mamba/mamba_mixer2.py:418
# of 0.18.0, :428 of 0.26.0).
CUT_PACKED_MIXERS = "cut_packed_mixers"

# SGLang never quantizes a router: `quant_config=None` of `gate` in srt/models/qwen2_moe.py:352,
# mixtral.py:90, minimax_m2.py:561, phimoe.py:198 of 0.5.23.
PLAIN_ROUTERS = "plain_routers"
_ROUTERS = ("gate", "router", "shared_expert_gate")

# The dtype of the scales of an output head, by its scheme; "": one scale for all of it.
_HEAD_ITEMS = {"fp8_tensor": "", "fp8_token": "F32", "nvfp4": "F8_E4M3", "mxfp8": "U8"}

_MODELOPT = {EXPERTS_BY_SIBLINGS, PLAIN_TOWERS, QUANTIZED_HEADS, WEIGHTS_BY_GROUPS}
_FLOATS = {"F16", "BF16", "F32"}
# How far the elements of an unquantized checkpoint may be from those of the config before its
# headers are believed instead.
_TOLERANCE = 0.005


def relevant_traits(spec: ModelSpec, traits: Collection[str]) -> frozenset[str]:
    """The traits that this model's layers depend on: versions with the same ones build alike."""
    if depends_on_version(spec.config):
        return frozenset(traits)
    recurrent = any(group.kind == "recurrent" for group in spec.attention)
    names = {PLAIN_ROUTERS, *((WHOLE_GATES, NARROW_DECAY, CUT_PACKED_MIXERS) if recurrent else ())}
    modelopt = spec.quant is not None and spec.quant.method.lower().startswith("modelopt")
    return frozenset(traits) & (names | _MODELOPT if modelopt else names)


def set_method(spec: ModelSpec, quantization: str) -> ModelSpec:
    """The model with the quantization that the engine applies while it loads; already quantized
    weights stay as they are."""
    if quantization != "fp8" or spec.quant is not None:
        return spec
    quant = Quant(method="fp8", config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    return spec.evolve(quant=quant, config={**spec.config, "quantization_config": quant.config})


def build(spec: ModelSpec, traits: Collection[str] = ()) -> BuiltModel:
    """`traits` are those of the engine version. Raises BadModel for fields of config.json that are
    missing or cannot be."""
    quant = spec.quant and _cache_key(spec.quant.model_dump(), spec.source)
    traits = relevant_traits(spec, traits)
    built_traits = traits if depends_on_version(spec.config) else frozenset()
    key = _Key(_cache_key(spec.config, spec.source), spec.source, spec.structure, built_traits)
    blueprint = _blueprint(key)
    headers = spec.tensors if spec.tensors_from == "headers" else ()
    if headers and (
        blueprint.guessed or (spec.quant is None and _contradicts(blueprint, spec, headers))
    ):
        return BuiltModel((), spec.tensors, spec.attention, is_known=False)
    # The headers of a GPTQ or AWQ checkpoint list the quantized layers if its block does not.
    # Source: maybe_update_config in gptq_marlin.py and awq_marlin.py.
    packed_names = frozenset(
        group.name.rpartition(".")[0] for group in headers if group.dtype not in _FLOATS
    )
    grouped = traits & _MODELOPT
    schemes, quantization = _schemes(
        key=key,
        model_type=spec.model_type,
        quant=quant,
        packed_names=packed_names,
        grouped=grouped,
        headers_read=bool(headers),
    )
    linears = _layers_by_scheme(blueprint.linears, schemes, quantization, traits)
    if headers and any(
        isinstance(layer.scheme, UnknownScheme) and layer.scheme.is_foreign for layer in linears
    ):
        return BuiltModel((), spec.tensors, spec.attention, is_known=False)
    other_groups = tuple(_narrow_dtype(group, traits) for group in _loaded_tensors(blueprint, spec))
    if QUANTIZED_HEADS in traits:
        other_groups = tuple(
            part for group in other_groups for part in _head_parts(group, quantization)
        )
    return BuiltModel(
        linears,
        other_groups,
        blueprint.attention,
        assumed=quantization.assumed,
        guessed=blueprint.guessed,
    )


def _cache_key(value: Mapping[str, Any], source: str) -> str:
    """JSON as text, which can be the key of a cache: engine versions and machines ask for the same
    models again."""
    try:
        return json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        raise BadModel(
            f"config.json of {source} is not plain JSON.", hint="Download or copy the model again."
        ) from None


class _Key(NamedTuple):
    """The inputs of a blueprint. config, structure: JSON texts."""

    config: str
    source: str
    structure: str
    traits: frozenset[str]


@lru_cache(maxsize=32)
def _blueprint(key: _Key) -> Blueprint:
    return build_blueprint(json.loads(key.config), key.source, key.traits, key.structure)


@lru_cache(maxsize=32)
def _schemes(
    key: _Key,
    model_type: str,
    quant: str | None,
    packed_names: frozenset[str],
    grouped: frozenset[str],
    headers_read: bool,
) -> tuple[tuple[dict[LayerScheme, Sequence[int]], ...], Quantization]:
    """Numbers of each layer of the blueprint, by scheme. `headers_read`: `packed_names` is
    known."""
    blueprint = _blueprint(key)
    block = None if quant is None else Quant.model_validate_json(quant)
    quantization = parse(block, RENAMES.get(model_type, ()), packed_names, headers_read, grouped)
    return tuple(
        _numbers_by_scheme(linear, quantization) for linear in blueprint.linears
    ), quantization


def _layers_by_scheme(
    layers: Iterable[LinearLayer],
    schemes: Iterable[Mapping[LayerScheme, Sequence[int]]],
    quantization: Quantization,
    traits: Collection[str],
) -> tuple[Linear, ...]:
    """One Linear for each scheme of a layer."""
    result: list[Linear] = []
    for layer, numbers_by_scheme in zip(layers, schemes, strict=True):
        is_plain = PLAIN_ROUTERS in traits and layer.name.rpartition(".")[2] in _ROUTERS
        numbers_of_scheme = {UNQUANTIZED_SCHEME: layer.numbers} if is_plain else numbers_by_scheme
        is_whole = (
            WHOLE_GATES in traits
            and layer.modules == ("in_proj_b", "in_proj_a")
            and quantization.is_integer_checkpoint
        )
        shard: Shard = "replicated" if is_whole else layer.shard
        size = (layer.k, sum(layer.parts), shard, layer.parts)
        for scheme, numbers in numbers_of_scheme.items():
            is_packed = isinstance(scheme, Scheme) and scheme.kind in ("wna16", "w4a8")
            is_mixer = layer.shard == "qkv" and layer.modules == ("in_proj",)
            heads = 1 if is_packed and is_mixer and CUT_PACKED_MIXERS not in traits else layer.heads
            result.append(
                Linear(
                    layer.name,
                    len(numbers),
                    *size,
                    scheme,
                    heads=heads,
                    kv_heads=layer.kv_heads,
                    units=layer.units,
                    experts=layer.experts,
                    bias=layer.bias,
                    is_exact=layer.is_exact,
                    numbers=numbers,
                )
            )
    return tuple(sorted(result, key=lambda linear: (linear.name, -linear.count)))


def _numbers_by_scheme(
    linear: LinearLayer, quantization: Quantization
) -> dict[LayerScheme, Sequence[int]]:
    """Numbers of this layer, by scheme."""
    if not linear.is_quantizable:
        return {UNQUANTIZED_SCHEME: linear.numbers}
    result: dict[LayerScheme, list[int]] = {}
    for number in linear.numbers if quantization.is_numbered else linear.numbers[:1]:
        name = linear.name.replace("*", str(number), 1)
        if linear.experts:
            name = name.removesuffix(".w13").removesuffix(".w2")
        result.setdefault(
            quantization.scheme_of(name, linear.modules, has_experts=linear.experts > 0), []
        ).append(number)
    return dict.fromkeys(result, linear.numbers) if not quantization.is_numbered else {**result}


def _loaded_tensors(blueprint: Blueprint, spec: ModelSpec) -> Iterable[TensorGroup]:
    """Pooling drops the output head."""
    return (
        group
        for group in blueprint.parameters
        if not (not spec.generates and group.name.endswith("lm_head.weight"))
    )


def _head_parts(group: TensorGroup, quantization: Quantization) -> Iterable[TensorGroup]:
    """The tensors of an output head in its scheme; of any other parameter itself."""
    name, _, last = group.name.rpartition(".")
    if last != "weight" or name.rpartition(".")[2] != "lm_head":
        return (group,)
    scheme = quantization.scheme_of(name)
    if not isinstance(scheme, Scheme) or scheme.kind not in _HEAD_ITEMS:
        return (group,)
    vocab, hidden = group.shape
    width = hidden * scheme.bits // 8
    parts = [group.evolve(shape=(vocab, width), dtype="U8")]
    if item := _HEAD_ITEMS[scheme.kind]:
        scales = hidden // scheme.group if scheme.group > 0 else 1
        parts.append(group.evolve(name=f"{name}.weight_scale", shape=(vocab, scales), dtype=item))
    return parts


def _narrow_dtype(group: TensorGroup, traits: Collection[str]) -> TensorGroup:
    """The parameter in the dtype of the engine version."""
    is_narrow = NARROW_DECAY in traits and group.name.endswith(".linear_attn.A_log")
    return TensorGroup(**{**dict(group), "dtype": ""}) if is_narrow else group


def _contradicts(blueprint: Blueprint, spec: ModelSpec, headers: Iterable[TensorGroup]) -> bool:
    """Whether the headers hold another number of elements than the config says."""
    stored_count = sum(group.count * math.prod(group.shape) for group in headers)
    expected_count = sum(
        len(linear.numbers) * max(1, linear.experts) * (linear.k + linear.bias) * sum(linear.parts)
        for linear in blueprint.linears
    )
    expected_count += sum(
        group.count * math.prod(group.shape) for group in _loaded_tensors(blueprint, spec)
    )
    return abs(stored_count - expected_count) > _TOLERANCE * expected_count
