"""The number of parameters of a model, by the shapes of its tensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.domain import ModelSpec

# Tensors of a quantized layer other than its weights: scales, zero points, order, constants.
_SIDE_NAMES = (
    "scale",
    "scales",
    "scale_inv",
    "zero_point",
    "zeros",
    "qzeros",
    "g_idx",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "weight_shape",
    "global_scale",
)
_INT32_BITS = 32
# FP4 formats and bitsandbytes keep two numbers in a byte.
_NUMBERS_PER_BYTE = 2


def parameter_count(spec: ModelSpec) -> int | None:
    """The numbers that the weights hold, packed ones counted singly. None: not known, as the files
    do not say how many bits a packed number has."""
    count = 0
    for group in spec.tensors:
        # Whole numbers of 64 bits are positions, which are not parameters.
        if group.name.endswith(_SIDE_NAMES) or group.dtype == "I64":
            continue
        values_per_item = 1
        if group.dtype == "I32":
            bits = _bits(spec.quant.fields) if spec.quant is not None else None
            if not bits:
                return None
            values_per_item = _INT32_BITS // bits
        elif group.dtype == "U8":
            values_per_item = _NUMBERS_PER_BYTE
        count += group.count * math.prod(group.shape) * values_per_item
    return count or None


def _bits(fields: Mapping[str, Any]) -> int | None:
    """Bits of a weight by a quantization block: of GPTQ, AWQ, or the first group of
    compressed-tensors."""
    groups = fields.get("config_groups")
    rows = [fields, *(groups.values() if isinstance(groups, Mapping) else ())]
    for row in rows:
        weights = row.get("weights", row) if isinstance(row, Mapping) else {}
        for name in ("bits", "w_bit", "num_bits"):
            bits = weights.get(name) if isinstance(weights, Mapping) else None
            if type(bits) is int and 1 <= bits <= _INT32_BITS:
                return bits
    return None
