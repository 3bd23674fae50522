"""Decided values with reason and source."""

from __future__ import annotations

from functools import lru_cache
from typing import Generic

from gateway.domain.value import T, Value

# Reasons of choices that leave a value to the engine or to the model.
ENGINE_DEFAULT = "the engine's default"
WEIGHTS_DTYPE = "the dtype of the weights"
GRAPHS_ARE_FASTER = "CUDA graphs are faster"
NEVER_SLEEPS = "the model never has to leave its GPUs"
NOT_FOR_AGENTS = "no conversations that return were expected (--for agents)"
ONE_CLASS = "all keys have one class"
NO_GPU_SLEEP = "no engine on a CPU sleeps"
NO_SPECULATION = "it was not requested; its gain depends on the prompts, so measure it"
NO_TEMPLATE = "the model has no chat template"


class Choice(Value, Generic[T]):
    """A decided value with its reason. source: of the rule: `user`, a profile, a fact."""

    value: T
    reason: str
    source: str


# The look-up of a parametrized model costs more than an instance.
IntChoice = Choice[int]
StrChoice = Choice[str]
BoolChoice = Choice[bool]
NumberChoice = Choice[int | float]


# Most plans of a decision share their choices, so equal choices are one object.
@lru_cache(maxsize=1024)
def int_choice(value: int, reason: str, source: str) -> Choice[int]:
    return IntChoice(value=value, reason=reason, source=source)


# Equal numbers of two types are written differently.
@lru_cache(maxsize=1024, typed=True)
def number_choice(value: float, reason: str, source: str) -> Choice[int | float]:
    return NumberChoice(value=value, reason=reason, source=source)


@lru_cache(maxsize=1024)
def str_choice(value: str, reason: str, source: str) -> Choice[str]:
    return StrChoice(value=value, reason=reason, source=source)


@lru_cache(maxsize=1024)
def bool_choice(value: bool, reason: str, source: str) -> Choice[bool]:
    return BoolChoice(value=value, reason=reason, source=source)
