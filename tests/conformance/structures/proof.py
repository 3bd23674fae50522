"""The proof of a structure: at full depth it has as many elements as the engine builds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields
from gateway.models.families.model_structure import structure_blueprint
from tests.conformance.structures.observation import Row, observe

# The share of the elements: small parameters may be left out.
_TOLERANCE = 0.002


def proven(text: str, config: Mapping[str, Any], **arguments: Any) -> bool:
    """Whether the structure has the elements that the engine builds of the uncut config.

    Raises BadModel where the structure refuses it, and the engine's errors.
    """
    elements = _elements(structure_blueprint(text, Fields(config, "the config")))
    element_count = sum(map(_built_elements, observe(config, **arguments).values()))
    return abs(elements - element_count) <= _TOLERANCE * element_count


def _built_elements(row: Row) -> int:
    """Elements of a row of the engine."""
    match row["what"]:
        case "linear":
            return int((row["k"] + row["bias"]) * sum(row["parts"]))
        case "experts":
            outputs = row["inner"] + row["hidden"]
            weights = row["inner"] * row["hidden"] + row["hidden"] * row["width"]
            return int(row["count"] * (weights + row["bias"] * outputs))
        case "vocab":
            return int(row["rows"] * row["columns"])
        case "parameter":
            return math.prod(row["shape"])
    return 0


def _elements(blueprint: Blueprint) -> int:
    linears = sum(
        len(layer.numbers) * max(1, layer.experts) * (layer.k + layer.bias) * sum(layer.parts)
        for layer in blueprint.linears
    )
    return linears + sum(item.count * math.prod(item.shape) for item in blueprint.parameters)
