"""Choices of a plan that leave everything to the engine, and so need no explanation. Pure."""

from __future__ import annotations

from typing import Any

from gateway.domain import Choice
from gateway.domain.choice import (
    ENGINE_DEFAULT,
    GRAPHS_ARE_FASTER,
    NEVER_SLEEPS,
    NO_GPU_SLEEP,
    NO_SPECULATION,
    NO_TEMPLATE,
    NOT_FOR_AGENTS,
    ONE_CLASS,
    WEIGHTS_DTYPE,
)

_VALUES: dict[str, tuple[object, ...]] = {
    "tensor_parallel": (1,),
    "pipeline_parallel": (1,),
    "expert_parallel": (False,),
    "data_parallel": (1,),
    "replicas": (1,),
    "quantization": ("none",),
    "kv_cache_dtype": ("auto",),
    "kernel_overrides": ("none",),
    "speculation": ("none",),
    "loras": ("none",),
    "chat_template": ("published",),
    "tool_parser": ("none",),
    "reasoning_parser": ("none",),
    "custom_all_reduce": (True,),
    "enforce_eager": (False,),
    "sleep_mode": (False,),
    "kv_offload_gib": (0,),
    "request_order": ("arrival",),
}
# Reasons that mark a choice as the default. `fitserve plan` prints choices with other reasons.
_REASONS = {
    "dtype": (WEIGHTS_DTYPE,),
    "speculation": (NO_SPECULATION,),
    "tool_parser": (NO_TEMPLATE,),
    "reasoning_parser": (NO_TEMPLATE,),
    "enforce_eager": (GRAPHS_ARE_FASTER,),
    "sleep_mode": (NEVER_SLEEPS, NO_GPU_SLEEP),
    "kv_offload_gib": (NOT_FOR_AGENTS,),
    "request_order": (ONE_CLASS,),
}
_SIZES = ("max_num_seqs", "max_num_batched_tokens")


def is_default(name: str, choice: Choice[Any]) -> bool:
    """Whether this choice is the engine's default, and neither the user nor a fact set it.

    name: field of `Plan`.
    """
    if name == "loras":
        return choice.value in _VALUES[name]
    if choice.source in ("user", "fact"):
        return False
    if name in _SIZES:
        return choice.reason.startswith(ENGINE_DEFAULT)
    if name in _VALUES and choice.value not in _VALUES[name]:
        return False
    return choice.reason in _REASONS[name] if name in _REASONS else name in _VALUES
