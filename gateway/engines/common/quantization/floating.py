"""Checkpoints whose blocks describe numbers: compressed-tensors, ModelOpt, FP8, MXFP4. Pure.

Sources: vllm/model_executor/layers/quantization/ of 0.19.1 and 0.33.0, the file named at each rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.engines.common.quantization.block import (
    UNQUANTIZED_SCHEME,
    Block,
    LayerScheme,
    MixedSchemes,
    Quantization,
    QuantizedLayer,
    first_entries,
    has_all_or_none,
    make_scheme,
    number,
    unknown_scheme,
)
from gateway.engines.common.quantization.safe_regex import refuse_slow_patterns
from gateway.models.scheme import Kind, Scheme

# vLLM 0.33.0: a ModelOpt checkpoint of NVFP4 whose groups name no activations keeps activations in
# 16 bits (modelopt.py:798).
WEIGHTS_BY_GROUPS = "weights_by_groups"
# vLLM keeps towers of these names in 16 bits, whatever a ModelOpt block excludes
# (ModelOptQuantConfigBase.get_quant_method, modelopt.py:201 of 0.19.1, :247 of 0.33.0).
PLAIN_TOWERS = "plain_modelopt_towers"
# ModelOpt quantizes the output head where its block does not exclude it: vLLM from 0.26.0
# (modelopt.py:209), SGLang from 0.5.23 (modelopt_quant.py:341).
QUANTIZED_HEADS = "modelopt_heads"
# Experts that a list of quantized layers has neither by name nor one by one take the first entry
# alongside them: vLLM from 0.26.0 (_resolve_quant_algo, modelopt.py:1794 of 0.33.0).
EXPERTS_BY_SIBLINGS = "modelopt_experts_by_siblings"
_TOWERS = ("vision_tower", "vision_model", "vit_large_projector")


def _matches_target(name: str, target: str, contains: bool = False) -> bool:
    """compressed_tensors/utils.py is_equal_or_regex_match."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target.lower() in name.lower() if contains else target == name


def compressed_tensors(block: Block) -> Quantization:
    """compressed_tensors/compressed_tensors.py and utils.py."""
    config = block.config
    form = str(config.get("format", ""))
    ignored = [block.engine_name(entry) for entry in first_entries(config, "ignore")]
    targets: dict[str, LayerScheme] = {}
    for group in (config.get("config_groups") or {}).values():
        scheme = _numeric_scheme(
            group.get("weights"), group.get("input_activations"), str(group.get("format") or form)
        )
        for target in first_entries(group, "targets"):
            if not (len(group["targets"]) == 1 and target.endswith("Attention")):
                targets[block.engine_name(target)] = scheme
    refuse_slow_patterns(entry[3:] for entry in (*ignored, *targets) if entry.startswith("re:"))
    names = frozenset(ignored)
    expressions = [entry[3:] for entry in ignored if entry.startswith("re:")]

    def is_skipped(name: str) -> bool:
        return name in names or any(re.match(expression, name) for expression in expressions)

    def rule(layer: QuantizedLayer) -> LayerScheme:
        if layer.name in names or has_all_or_none(layer.modules, is_skipped):
            return UNQUANTIZED_SCHEME
        return _target_scheme(layer, targets) or UNQUANTIZED_SCHEME

    return Quantization(rule)


def _target_scheme(layer: QuantizedLayer, targets: Mapping[str, LayerScheme]) -> LayerScheme | None:
    """The scheme of the first target that names the layer, its modules or its class. Raises
    Mixed."""
    scheme = _first_match(layer.name, targets)
    if scheme is not None:
        return scheme
    schemes = [_first_match(module, targets) for module in layer.modules]
    if schemes and None not in schemes:
        if len(set(schemes)) > 1:
            raise MixedSchemes
        return schemes[0]
    # The class name of every parallel layer contains this word; the classes of experts count as
    # parallel layers.
    return _first_match("Linear", targets, contains=True)


def _first_match(
    name: str, targets: Mapping[str, LayerScheme], *, contains: bool = False
) -> LayerScheme | None:
    """The scheme of the first target that matches the name of a module or class."""
    return next(
        (scheme for target, scheme in targets.items() if _matches_target(name, target, contains)),
        None,
    )


_FP8: dict[str, Kind] = {"tensor": "fp8_tensor", "channel": "fp8_token", "block": "fp8_block"}


def _numeric_scheme(weights: Any, inputs: Any, form: str) -> LayerScheme:
    """CompressedTensorsConfig._get_scheme_from_parts, in its order."""
    if not isinstance(weights, Mapping):
        return (
            UNQUANTIZED_SCHEME
            if weights is None
            else unknown_scheme("its weights are not described by an object")
        )
    acts = inputs if isinstance(inputs, Mapping) else None
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if (weights.get("group_size") or -1) == -1 else "group"
    scheme = _microscaling_scheme(weights, strategy, has_plain_inputs=acts is None)
    if scheme is None:
        scheme = (
            _weight_only_scheme(weights, strategy)
            if acts is None
            else _scheme_with_activations(weights, acts, strategy)
        )
    if scheme is not None:
        return scheme
    bits = weights.get("num_bits", 8)
    kind = weights.get("type", "int")
    return unknown_scheme(
        f"no rules for compressed-tensors {form[:40]} with"
        f" {_bits_text(bits)}-bit {str(kind)[:10]} weights"
    )


# Floats whose scales belong to small groups, by bits, size of a group and strategy.
_MICROSCALING_KINDS: dict[tuple[int, int, str], Kind] = {
    (4, 16, "tensor_group"): "nvfp4",
    (4, 32, "group"): "mxfp4",
    (8, 32, "group"): "mxfp8",
}


def _microscaling_scheme(
    weights: Mapping[str, Any], strategy: Any, *, has_plain_inputs: bool
) -> Scheme | None:
    """The scheme of floats with scales of small groups, or None.

    has_plain_inputs: activations stay in 16 bits, which no kernel of MXFP8 asks for.
    """
    if weights.get("type", "int") != "float":
        return None
    stated_form = weights.get("num_bits", 8), weights.get("group_size") or -1, strategy
    for (bits, group, name), kind in _MICROSCALING_KINDS.items():
        if stated_form == (bits, group, name):
            return make_scheme(kind, bits, group, weight_only=has_plain_inputs and bits == 4)
    return None


def _weight_only_scheme(weights: Mapping[str, Any], strategy: Any) -> Scheme | None:
    """The scheme of weights whose activations stay in 16 bits, or None."""
    bits = weights.get("num_bits", 8)
    kind = weights.get("type", "int")
    group = weights.get("group_size") or -1
    if kind == "int" and strategy in ("group", "channel"):
        return make_scheme(
            "wna16",
            number(bits),
            number(group, -1),
            symmetric=weights.get("symmetric", True) is not False,
            act_order=weights.get("actorder") in ("group", "dynamic") and group != -1,
        )
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel", "block"):
        size = _fp8_block_size(weights, strategy)
        return make_scheme(_FP8[strategy], 8, size, weight_only=True)
    return None


def _scheme_with_activations(
    weights: Mapping[str, Any], acts: Mapping[str, Any], strategy: Any
) -> Scheme | None:
    """The scheme of weights whose activations are quantized too; None: no rules for it.

    strategy: the strategy of the weights, or the engine's default.
    """
    dynamic = bool(acts.get("dynamic"))
    is_symmetric = weights.get("symmetric", True) is not False
    numbers = weights.get("type", "int"), weights.get("num_bits", 8)
    act_numbers = acts.get("type", "int"), acts.get("num_bits", 8)
    if numbers == ("int", 4) and act_numbers == ("float", 8) and strategy == "group":
        group = number(weights.get("group_size") or -1, -1)
        return make_scheme("w4a8", 4, group, symmetric=is_symmetric)
    floats = numbers == act_numbers == ("float", 8)
    if floats and strategy in ("tensor", "channel", "block"):
        size = _fp8_block_size(weights, strategy)
        return make_scheme(_FP8[strategy], 8, size, static_activation=not dynamic)
    integers = numbers == act_numbers == ("int", 8) and strategy in ("tensor", "channel")
    if integers and acts.get("strategy") == ("token" if dynamic else "tensor"):
        return make_scheme("int8", 8, static_activation=not dynamic)
    return None


def _fp8_block_size(weights: Mapping[str, Any], strategy: str) -> int:
    return number(weights["block_structure"][1]) if strategy == "block" else -1


def _bits_text(bits: object) -> str:
    return str(bits) if isinstance(bits, int) and 0 < bits < 100 else "?"


_MXFP4 = make_scheme("mxfp4", 4, 32, weight_only=True, layout="mxfp4")


def mxfp4(_: Block) -> Quantization:
    """mxfp4.py: only experts, even if the block lists others."""
    return Quantization(lambda layer: _MXFP4 if layer.has_experts else UNQUANTIZED_SCHEME)


def _matches_wildcard(name: str, pattern: str) -> bool:
    """Whether `name` is `pattern`, in which `*` stands for anything."""
    first, *middle_parts = pattern.split("*")
    if not middle_parts:
        return name == pattern
    position = len(first)
    last = middle_parts.pop()
    for piece in middle_parts:
        result = name.find(piece, position)
        if result < 0:
            return False
        position = result + len(piece)
    return name.startswith(first) and name.endswith(last) and len(name) - len(last) >= position


def modelopt(block: Block) -> Quantization:
    """modelopt.py ModelOptQuantConfigBase: its own file's form, or that of config.json."""
    fields = block.config.get("quantization", block.config)
    exclusions = _Exclusions.block_exclusions(block, fields)
    algorithm = _checkpoint_algorithm(block, str(fields["quant_algo"]).upper())
    size = fields.get("group_size")
    layer_schemes = {
        block.engine_name(str(name)): _algorithm_scheme(
            str(item["quant_algo"]).upper(), item.get("group_size", size)
        )
        for name, item in (fields.get("quantized_layers") or {}).items()
    }
    base = None if algorithm == "MIXED_PRECISION" else _algorithm_scheme(algorithm, size)
    scheme_by_expert = _schemes_by_expert(layer_schemes)
    siblings = layer_schemes if EXPERTS_BY_SIBLINGS in block.traits else {}

    def rule(layer: QuantizedLayer) -> LayerScheme:
        if _is_excluded(layer, exclusions.prefixes):
            return UNQUANTIZED_SCHEME
        if PLAIN_TOWERS in block.traits and any(name in layer.name for name in _TOWERS):
            return UNQUANTIZED_SCHEME
        if exclusions.has_stars and _is_excluded(layer, exclusions.entries):
            return unknown_scheme(
                "whether its `*` exclusions mean this layer depends on the engine version"
            )
        if base is not None:
            return _scheme_of_base(layer, base)
        if layer.has_experts and layer.name not in layer_schemes:
            return scheme_by_expert.get(layer.name) or _scheme_of_sibling(layer.name, siblings)
        return _scheme_by_list(layer, layer_schemes)

    return Quantization(rule)


def mxfp8(block: Block) -> Quantization:
    """ModelOpt's MXFP8, with exclusions by the name that MiniMax gives them.

    Source: ModelOptMxFp8Config.from_config (modelopt.py:1244 of 0.33.0). SGLang reads the same
    names.
    """
    config = block.config
    if "quantization" in config or config.get("quant_algo"):
        return modelopt(block)
    normal = {"quant_algo": "MXFP8", "exclude_modules": config.get("ignored_layers") or []}
    return modelopt(block.evolve(config={"quantization": normal}))


class _Exclusions(NamedTuple):
    """The layers that ModelOpt left out, by the engine's names.

    entries: the patterns as the checkpoint writes them.
    prefixes: the same, where `path*` is the module and all below it, as an engine reads it that
        renames a family's modules.
    has_stars: both differ.
    """

    entries: list[str]
    prefixes: list[str]
    has_stars: bool

    @classmethod
    def block_exclusions(cls, block: Block, fields: Mapping[str, Any]) -> _Exclusions:
        """The exclusions of a checkpoint, in the form of its own file or of config.json."""
        # The deeper form has exclusions under the first name only.
        names = ("ignore", "exclude_modules") if fields is block.config else ("exclude_modules",)
        entries = first_entries(fields, *names)
        stars = [
            entry for entry in entries if len(entry) > 1 and entry[-1] == "*" and entry[-2] != "."
        ]
        prefixes = [
            *(entry for entry in entries if entry not in stars),
            *(entry[:-1] for entry in stars),
            *(f"{entry[:-1]}.*" for entry in stars),
        ]
        return cls(
            [block.engine_name(entry) for entry in entries],
            [block.engine_name(entry) for entry in prefixes],
            bool(stars),
        )


def _is_excluded(layer: QuantizedLayer, entries: Sequence[str]) -> bool:
    """Whether a layer is one of the entries, below one, or matches one with `*`."""
    names = (layer.name,) if layer.has_experts else layer.modules
    return (
        has_all_or_none(names, lambda name: name in entries)
        or any(entry in layer.name for entry in entries)
        or any("*" in entry and _matches_wildcard(layer.name, entry) for entry in entries)
    )


def _scheme_of_base(layer: QuantizedLayer, base: LayerScheme) -> LayerScheme:
    """The scheme of a layer where the checkpoint has one algorithm for all.

    Experts have one FP8 method for every algorithm: ModelOptFp8MoEMethod.
    """
    is_fp8 = isinstance(base, Scheme) and base.kind in ("fp8_token", "fp8_block")
    if layer.has_experts and is_fp8:
        return make_scheme("fp8_tensor", 8, static_activation=True)
    return base


def _schemes_by_expert(schemes: Mapping[str, LayerScheme]) -> dict[str, LayerScheme]:
    """The schemes of layers whose experts are listed one by one, whatever the names of their
    projections."""
    result: dict[str, LayerScheme] = {}
    for name, scheme in schemes.items():
        path, separator, _ = name.partition(".experts.")
        if separator:
            result.setdefault(f"{path}.experts", scheme)
    return result


def _scheme_of_sibling(name: str, schemes: Mapping[str, LayerScheme]) -> LayerScheme:
    parent = name.removesuffix("experts")
    return next((schemes[key] for key in schemes if key.startswith(parent)), UNQUANTIZED_SCHEME)


def _scheme_by_list(layer: QuantizedLayer, schemes: Mapping[str, LayerScheme]) -> LayerScheme:
    """The scheme of a layer by the list of all quantized layers.

    Source: ModelOptMixedPrecisionConfig._resolve_quant_algo (modelopt.py:1748 of 0.33.0).
    """
    outer_layers = ("lm_head",) if layer.name.endswith(".lm_head") else ()
    matches = [
        schemes[name] for name in (layer.name, *outer_layers, *layer.modules) if name in schemes
    ]
    if not matches:
        return UNQUANTIZED_SCHEME
    if layer.name not in schemes and len(set(matches)) > 1:
        raise MixedSchemes
    return matches[0]


def _checkpoint_algorithm(block: Block, name: str) -> str:
    """The algorithm of the checkpoint; NVFP4 keeps activations in 16 bits if no group names any."""
    groups = block.config.get("config_groups")
    if (
        name == "NVFP4"
        and WEIGHTS_BY_GROUPS in block.traits
        and isinstance(groups, Mapping)
        and groups
        and all(
            isinstance(group, Mapping) and group.get("input_activations") is None
            for group in groups.values()
        )
    ):
        return "W4A16_NVFP4"
    return name


def _algorithm_scheme(name: str, group: object) -> LayerScheme:
    schemes: dict[str, Scheme] = {
        "FP8": make_scheme("fp8_tensor", 8, static_activation=True),
        "FP8_PER_CHANNEL_PER_TOKEN": make_scheme("fp8_token", 8),
        "FP8_PB_WO": make_scheme("fp8_block", 8, 128),
        "NVFP4": make_scheme("nvfp4", 4, 16),
        "W4A16_NVFP4": make_scheme("nvfp4", 4, 16, weight_only=True),
        "MXFP8": make_scheme("mxfp8", 8, 32),
    }
    scheme = schemes.get(name)
    if scheme is None:
        return unknown_scheme(f"no rules for ModelOpt {name[:40]}")
    return (
        make_scheme("nvfp4", 4, number(group), weight_only=scheme.weight_only)
        if scheme.kind == "nvfp4" and group
        else scheme
    )


def fp8(block: Block) -> Quantization:
    """fp8.py, and is_layer_skipped of utils/quant_utils.py."""
    config = block.config
    skipped = frozenset(
        block.engine_name(entry)
        for entry in first_entries(config, "ignored_layers", "modules_to_not_convert")
    )
    blocks = config.get("weight_block_size")
    is_static = config.get("activation_scheme") == "static"
    base = (
        make_scheme("fp8_block", 8, number(blocks[1]))
        if blocks
        else make_scheme("fp8_tensor", 8, static_activation=is_static)
    )

    def rule(layer: QuantizedLayer) -> LayerScheme:
        if layer.has_experts:
            ignored = any(layer.name in entry for entry in skipped if "experts" in entry)
        else:
            ignored = layer.name in skipped or has_all_or_none(
                layer.modules, lambda name: name in skipped
            )
        # Source: get_quant_method of vllm/models/deepseek_v41/quant_config.py:251 of 0.33.0.
        four = layer.has_experts and config.get("expert_dtype") == "fp4"
        is_nvidia = str(config.get("moe_quant_algo", "")).upper() == "NVFP4"
        narrow_scheme = make_scheme("nvfp4", 4, 16) if is_nvidia else _MXFP4
        if ignored:
            return UNQUANTIZED_SCHEME
        return narrow_scheme if four else base

    return Quantization(rule)
