"""Which classes of models each version of SGLang makes stages of a pipeline of: all that its
profile lists.

A question is an architecture; an answer is true where its class is for stages (`support_pp` in
srt/model_executor/model_runner.py: its forward takes `pp_proxy_tensors`), false where it is not,
null where its class cannot be imported here, or is chosen by the model.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from gateway.profiles.profiles import Profiles
from tests.conformance.sglang_model_questions import ENGINE, OLDER_BEFORE

__all__ = ["CAPABILITIES", "ENGINE", "OLDER_BEFORE", "answers", "questions"]

CAPABILITIES = ("9.0",)


def questions(version: str) -> list[str]:
    return sorted(Profiles().engine(f"sglang=={version}").architectures)


def answers(version: str) -> list[Any]:
    registry: Any = importlib.import_module("sglang.srt.models.registry")
    models = registry.ModelRegistry.models
    return [_has_stages(models.get(architecture)) for architecture in questions(version)]


def _has_stages(class_: Any) -> bool | None:
    forward = getattr(class_, "forward", None)  # some stand for a class that depends on the model
    return None if forward is None else "pp_proxy_tensors" in inspect.signature(forward).parameters
