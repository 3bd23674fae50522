"""Checkpoints with packed integers: GPTQ, AWQ, AutoRound, bitsandbytes. Pure.

Sources: vllm/model_executor/layers/quantization/ of 0.19.1 and 0.33.0, the file named at each rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
from gateway.models.scheme import Scheme


def _integer_scheme(
    layout: str, bits: object, group: object, symmetric: object, act_order: object = False
) -> Scheme:
    group = number(group, -1)
    # The order of rows makes no difference with one group per channel. Source: gptq_marlin.py.
    is_ordered = bool(act_order) and group != -1
    return make_scheme(
        "wna16", number(bits), group, symmetric=bool(symmetric), act_order=is_ordered, layout=layout
    )


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _is_packed(layer: QuantizedLayer, packed_names: set[str]) -> bool:
    """Whether a checkpoint whose block does not say holds packed integers for `layer`: its headers
    show it.

    Without headers, the default of GPTQ and AWQ tools is assumed: all linear layers of the
    decoder's blocks but the routers. Source: maybe_update_config of gptq_marlin.py and
    awq_marlin.py, which read the headers too, and never ask for experts.
    """
    if packed_names and not layer.has_experts:
        return has_all_or_none(
            layer.modules,
            lambda name: name in packed_names or _NUMBER.sub("*", name) in packed_names,
        )
    return ".layers." in layer.name and layer.name.rpartition(".")[2] not in (
        "gate",
        "router",
        "shared_expert_gate",
    )


def _unquantized_checkpoint(block: Block) -> Quantization | None:
    """A checkpoint of which neither block nor headers name a packed layer, which engines build
    unquantized without a word."""
    if block.packed_names or not block.headers_read:
        return None
    return Quantization(
        lambda _: unknown_scheme(
            "the checkpoint's headers hold no packed layer, though config.json says quantized"
        )
    )


class _ListedLayers(NamedTuple):
    """The layers that a checkpoint names.

    listed_names: the layers that config.json lists.
    packed_names: the layers that are packed by the headers of the files.
    has_head: the head is quantized too.
    """

    listed_names: list[str]
    packed_names: set[str]
    has_head: bool

    def are_unquantized(self, layer: QuantizedLayer) -> bool:
        """Whether `layer` stays unquantized whatever the method's own list says."""
        if layer.name.endswith("lm_head") and not self.has_head:
            return True
        return not self.listed_names and not _is_packed(layer, self.packed_names)

    def lists(self, names: Sequence[str]) -> bool:
        """Whether config.json lists the modules of a layer. Raises as `has_all_or_none`."""
        return has_all_or_none(
            names, lambda name: any(entry in name for entry in self.listed_names)
        )

    def quantization(
        self, rule: Callable[[QuantizedLayer], LayerScheme], assumption: str
    ) -> Quantization:
        assumed = "" if self.listed_names or self.packed_names else assumption
        return Quantization(rule, assumed, is_integer_checkpoint=True)


def _listed_layers(block: Block, key: str) -> _ListedLayers:
    return _ListedLayers(
        [block.engine_name(entry) for entry in first_entries(block.config, key)],
        {block.engine_name(name) for name in block.packed_names},
        block.config.get("lm_head") is True,
    )


def gptq(block: Block) -> Quantization:
    """The schemes of a GPTQ checkpoint. Sources: gptq_marlin.py, utils/gptq_utils.py; auto_gptq.py
    from 0.26.
    """
    config = block.config
    base = _integer_scheme(
        "gptq",
        config["bits"],
        config["group_size"],
        config.get("sym", True),
        config.get("desc_act", False),
    )
    layers = _listed_layers(block, "modules_in_block_to_quantize")
    no_quantization = _unquantized_checkpoint(block)
    if no_quantization is not None and not layers.listed_names:
        return no_quantization
    dynamic: Mapping[str, Mapping[str, Any]] = config.get("dynamic") or {}
    refuse_slow_patterns(pattern.lstrip("+-:") for pattern in dynamic)

    def rule(layer: QuantizedLayer) -> LayerScheme:
        if layers.are_unquantized(layer):
            return UNQUANTIZED_SCHEME
        if layers.listed_names and not layer.has_experts and not layers.lists(layer.modules):
            return UNQUANTIZED_SCHEME
        for pattern, changes in dynamic.items():
            if pattern.startswith("-:"):
                if re.match(pattern[2:], layer.name):
                    return UNQUANTIZED_SCHEME
            elif re.match(pattern.removeprefix("+:"), layer.name):
                return _integer_scheme(
                    "gptq",
                    changes.get("bits", base.bits),
                    changes.get("group_size", base.group),
                    changes.get("sym", base.symmetric),
                    changes.get("desc_act", base.act_order),
                )
        return base

    return layers.quantization(
        rule,
        "config.json does not list the quantized modules; all linear layers of the blocks are"
        " assumed",
    )


def awq(block: Block) -> Quantization:
    """The schemes of an AWQ checkpoint. Source: awq_marlin.py, auto_awq.py from 0.26."""
    config = block.config
    bits = config.get("bits", config.get("w_bit"))
    group = config.get("group_size", config.get("q_group_size"))
    base = _integer_scheme("awq", bits, group, not config.get("zero_point", True))
    layers = _listed_layers(block, "modules_to_not_convert")
    no_quantization = _unquantized_checkpoint(block)
    if no_quantization is not None and not layers.listed_names:
        return no_quantization

    def rule(layer: QuantizedLayer) -> LayerScheme:
        names = (layer.name,) if layer.has_experts else layer.modules
        if layers.are_unquantized(layer) or layers.lists(names):
            return UNQUANTIZED_SCHEME
        return base

    return layers.quantization(
        rule,
        "config.json lists no module that stayed unquantized; all linear layers are assumed"
        " quantized",
    )


_SPECIAL_CHARACTERS = set(r"*+?^$()[]{}|\\")


def _auto_round_layout(config: Mapping[str, Any]) -> str:
    packing = (
        str(config.get("packing_format", "auto_round:auto_gptq")),
        str(config.get("backend", "auto")),
    )
    if any("gptq" in word for word in packing):
        return "gptq"
    return "awq" if any("awq" in word for word in packing) else "gptq"


def _changes_of(name: str, extra: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Settings of one module in `extra_config`, by its name or the first pattern that matches."""
    if name in extra:
        return extra[name]
    for pattern, changes in extra.items():
        if _SPECIAL_CHARACTERS & set(pattern):
            try:
                if re.search(pattern, name):
                    return changes
            except re.error:
                continue
    return {}


class _AutoRound(NamedTuple):
    """The numbers of an AutoRound checkpoint that hold for all layers without changes."""

    bits: Any
    group: Any
    symmetric: Any
    data_type: str
    layout: str

    def scheme(self, changes: Mapping[str, Any], *, is_quantized: bool) -> LayerScheme:
        """The scheme of a layer with its changes. is_quantized: whether only its name says that it
        is quantized."""
        width = number(changes.get("bits", self.bits if is_quantized else 16))
        if width >= 16:
            return UNQUANTIZED_SCHEME
        size = changes.get("group_size", self.group if is_quantized else -1)
        if self.data_type == "int":
            symmetric = changes.get("sym", self.symmetric if is_quantized else True)
            return _integer_scheme(self.layout, width, size, symmetric)
        if "mx_fp" in self.data_type and width in (4, 8):
            return make_scheme("mxfp4" if width == 4 else "mxfp8", width, 32)
        is_block = isinstance(size, list) and len(size) == 2
        if self.data_type in ("fp", "fp8") and width == 8 and is_block:
            return make_scheme("fp8_block", 8, number(size[1]))
        return unknown_scheme(f"no rules for AutoRound with data_type {self.data_type[:40]}")


def auto_round(block: Block) -> Quantization:
    """inc.py get_layer_config; inc/config_parser.py from 0.26."""
    config = block.config
    form = _AutoRound(
        config["bits"],
        config["group_size"],
        config.get("sym", True),
        str(config.get("data_type", "int")),
        _auto_round_layout(config),
    )
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or []
    blocks = [
        block.engine_name(entry)
        for entry in (
            blocks.split(",") if isinstance(blocks, str) else first_entries({"b": blocks}, "b")
        )
    ]
    extra = {
        block.engine_name(str(name)): dict(changes)
        for name, changes in (config.get("extra_config") or {}).items()
    }
    refuse_slow_patterns(
        (name for name in extra if _SPECIAL_CHARACTERS & set(name)), matches_anywhere=True
    )

    def rule(layer: QuantizedLayer) -> LayerScheme:
        if layer.name in extra:
            return form.scheme(extra[layer.name], is_quantized=True)
        is_quantized = not layer.name.endswith("lm_head")
        if blocks:
            is_quantized = any(layer.name.startswith(block) for block in blocks)
        names = layer.modules
        if layer.has_experts:
            names = tuple(name for name in extra if name.startswith(layer.name)) or (layer.name,)
        schemes = {
            form.scheme(_changes_of(name, extra), is_quantized=is_quantized) for name in names
        }
        if len(schemes) > 1:
            raise MixedSchemes
        return schemes.pop()

    return Quantization(rule, is_integer_checkpoint=True)


def bitsandbytes(block: Block) -> Quantization:
    """bitsandbytes.py of 0.26.0, which 0.33.0 does not have."""
    is_eight_bit = block.config.get("load_in_8bit") is True
    skipped = {
        block.engine_name(entry) for entry in first_entries(block.config, "llm_int8_skip_modules")
    }

    def rule(layer: QuantizedLayer) -> LayerScheme:
        if layer.has_experts:
            return (
                unknown_scheme("bitsandbytes has no 8-bit experts")
                if is_eight_bit
                else make_scheme("bnb", 4)
            )
        path = layer.name.split(".")
        # is_layer_skipped_bnb: an entry is one part of the path, or its beginning.
        name_prefixes = {".".join(path[: end + 1]) for end in range(len(path))}
        return (
            UNQUANTIZED_SCHEME
            if skipped & (name_prefixes | set(path)) or path[-1] == "lm_head"
            else make_scheme("bnb", 8 if is_eight_bit else 4)
        )

    return Quantization(rule)
