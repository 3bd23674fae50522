"""Which classes of models each version of vLLM makes stages of a pipeline of: all that its profile
lists.

A question is an architecture; an answer is true where its class is for stages (`SupportsPP`), false
where it is not, null where the version does not know it, or its class cannot be imported here.
"""

from __future__ import annotations

import importlib
from typing import Any

from gateway.engines.vllm.inside.answers import stand_in_for_packages
from gateway.engines.vllm.inside.model import prepare
from gateway.profiles.profiles import Profiles
from tests.conformance.model_cases import OLDER_BEFORE

__all__ = ["CAPABILITIES", "OLDER_BEFORE", "answers", "questions"]

CAPABILITIES = ("9.0",)


def questions(version: str) -> list[str]:
    return sorted(Profiles().engine(f"vllm=={version}").architectures)


def answers(version: str) -> list[Any]:
    prepare()
    stand_in_for_packages()
    return [_has_stages(architecture) for architecture in questions(version)]


def _has_stages(architecture: str) -> bool | None:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    interfaces: Any = importlib.import_module("vllm.model_executor.models.interfaces")
    model_class = registry.ModelRegistry.models.get(architecture)
    try:
        return (
            bool(interfaces.supports_pp(model_class.load_model_cls()))
            if model_class is not None
            else None
        )
    except Exception:  # its class needs missing packages, and says so in many ways
        return None
