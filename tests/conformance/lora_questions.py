"""Which models each version serves adapters for, and the reading of the flags of plans by its own
parser.

A question is a model of tests/models; an answer is true where the version has adapters for its
class (`SupportsLoRA`), false where it has none, null where it does not know the class, or the class
cannot be imported here. The last question is "parser": an answer is the adapters and ranks that the
parser read of a plan's own arguments.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

from gateway.domain import Engine
from gateway.engines.common.lora.adapter_flags import list_arguments
from gateway.engines.vllm.inside.answers import stand_in_for_packages
from gateway.engines.vllm.inside.model import parser, prepare
from gateway.profiles.profiles import Profiles
from tests.conformance.model_cases import OLDER_BEFORE
from tests.support.paths import ROOT

__all__ = ["CAPABILITIES", "OLDER_BEFORE", "answers", "questions"]

CAPABILITIES = ("9.0",)
PARSER = "parser"
PLACED = (("sql", "/models/sql"), ("team/chat:v1", "/models/chat"))


def questions(version: str) -> Iterator[str]:
    del version
    yield from sorted(path.stem for path in (ROOT / "tests/models").glob("*.json"))
    yield PARSER


def answers(version: str) -> list[Any]:
    prepare()
    stand_in_for_packages()
    engine = Profiles().engine(f"vllm=={version}")
    return [
        _parse(engine) if question == PARSER else _is_supported(question)
        for question in questions(version)
    ]


def _is_supported(model: str) -> bool | None:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    interfaces: Any = importlib.import_module("vllm.model_executor.models.interfaces")
    (architecture,) = json.loads((ROOT / "tests/models" / f"{model}.json").read_text())[
        "architectures"
    ]
    model_class = registry.ModelRegistry.models.get(architecture)
    try:
        return (
            bool(interfaces.supports_lora(model_class.load_model_cls()))
            if model_class is not None
            else None
        )
    except Exception:  # its class needs missing packages, and says so in many ways
        return None


def _parse(engine: Engine) -> Any:
    arguments = [
        "--enable-lora",
        "--max-lora-rank=16",
        "--max-loras=2",
        *list_arguments(engine, PLACED),
        "--model=/models/m",
    ]
    args = parser().parse_args(arguments)
    return [
        [[module.name, module.path] for module in args.lora_modules],
        args.enable_lora,
        args.max_lora_rank,
        args.max_loras,
        args.model,
    ]
