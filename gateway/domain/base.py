"""The names that declare values: those of pydantic, or stand-ins in a lean process.

The import of pydantic and its schemas take longer than a plan. A lean process takes only data that
pydantic would take as they are (`lean/lean_reader.py`). For all else, such as wrong input, it
raises `NeedsPydantic`, and the program starts over with pydantic.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        RootModel,
        TypeAdapter,
        ValidationError,
        ValidationInfo,
        field_validator,
        model_validator,
    )

__all__ = [
    "BaseModel",
    "BeforeValidator",
    "ConfigDict",
    "Field",
    "NeedsPydantic",
    "RootModel",
    "TypeAdapter",
    "ValidationError",
    "ValidationInfo",
    "bare",
    "become_lean",
    "field_validator",
    "is_lean",
    "model_validator",
    "refuse",
]

_lean = False


class NeedsPydantic(BaseException):
    """Only pydantic can read these data. No `except Exception` takes it."""


def become_lean() -> None:
    """Make this process lean, unless it has imported the classes of values."""
    global _lean  # noqa: PLW0603
    _lean = "gateway.domain.value" not in sys.modules


def is_lean() -> bool:
    return _lean


def refuse(reason: str) -> NoReturn:
    raise NeedsPydantic(reason)


def bare(kind: type[Any], fields: dict[str, Any], names: Any = None) -> Any:
    """An unvalidated value of all its fields, in a tenth of the time of `model_construct`.

    names: the fields that were given; None: all.
    """
    value = object.__new__(kind)
    object.__setattr__(value, "__dict__", fields)
    if not _lean:
        object.__setattr__(value, "__pydantic_fields_set__", {*(names or fields)})
        object.__setattr__(value, "__pydantic_extra__", None)
        object.__setattr__(value, "__pydantic_private__", None)
    return value


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"gateway.domain.base has no {name}")
    value = getattr(import_module("gateway.domain.lean.lean_value" if _lean else "pydantic"), name)
    globals()[name] = value
    return value
