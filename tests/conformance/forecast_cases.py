"""Families whose forecast from config.json alone is held to vLLM's builds.

Shared by question and test.

family_configs.json has a config.json of each, without quantization: a published one of
aiconfigurator-core 0.12.0 (27 families), else the defaults of transformers 5.19's configuration
class, completed where those build no model that is published.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.conformance.layer_cases import QUANTS

RANKS = (1, 2, 4)
QUANTIZATIONS = ("none", "fp8")


@cache
def family_configs() -> dict[str, dict[str, Any]]:
    document: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("family_configs.json").read_text()
    )
    return document


def cases() -> list[tuple[str, str]]:
    """(family, quantization)."""
    return [(family, quant) for family in family_configs() for quant in QUANTIZATIONS]


def config(family: str, quant: str) -> dict[str, Any]:
    """The config.json of this case."""
    block = {} if quant == "none" else {"quantization_config": QUANTS[quant]}
    return family_configs()[family] | block
