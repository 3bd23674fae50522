"""Declarations of values in a lean process: the class, its fields and its validators.

A class keeps its annotations as text until the first value is made: most classes that a command
imports make none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.domain.base import refuse

NO_DEFAULT: Any = ...
NO_FIELD = object()


class FieldInfo:
    """The declaration of a field: its default, other name, and limits."""

    __slots__ = ("alias", "annotation", "default", "default_factory", "limits", "module", "name")

    def __init__(self, default: Any = ..., **limits: Any) -> None:
        self.default = default
        self.default_factory = limits.pop("default_factory", None)
        self.alias: str | None = limits.pop("alias", None)
        self.limits = limits
        self.name = ""
        self.annotation = ""
        self.module = ""

    @property
    def is_required(self) -> bool:
        return self.default is NO_DEFAULT and self.default_factory is None

    @property
    def description(self) -> str | None:
        return self.limits.get("description")

    def get_default(self, *, call_default_factory: bool = True) -> Any:  # noqa: ARG002
        return self.default if self.default_factory is None else self.default_factory()


Field = FieldInfo


def ConfigDict(**config: Any) -> dict[str, Any]:  # noqa: N802
    return config


class ValidatorMark:
    """A function of a class that checks a field, or the whole value where `fields` is empty."""

    __slots__ = ("fields", "function", "mode")

    def __init__(self, fields: tuple[str, ...], mode: str, function: Any) -> None:
        self.fields = fields
        self.mode = mode
        self.function = function


def field_validator(*fields: str, mode: str = "after") -> Callable[[Any], ValidatorMark]:
    return lambda function: ValidatorMark(fields, mode, function)


def model_validator(*, mode: str) -> Callable[[Any], ValidatorMark]:
    return lambda function: ValidatorMark((), mode, function)


class ValueType(type):
    """The type of classes of values."""

    model_config: dict[str, Any]
    __fields: dict[str, FieldInfo]

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any
    ) -> ValueType:
        own_fields = {
            field: namespace.pop(field, NO_FIELD)
            for field in namespace.get("__annotations__", ())
            if not str(namespace["__annotations__"][field]).startswith("ClassVar")
        }
        marks = {
            attribute: value
            for attribute, value in namespace.items()
            if isinstance(value, ValidatorMark)
        }
        for attribute, mark in marks.items():
            namespace[attribute] = mark.function
        namespace["_own"] = own_fields, marks
        namespace["model_config"] = {
            key: value
            for base in reversed(bases)
            for key, value in getattr(base, "model_config", {}).items()
        } | namespace.get("model_config", {})
        return super().__new__(mcs, name, bases, namespace)

    @property
    def model_fields(cls) -> dict[str, FieldInfo]:
        """The fields of the class, those of its bases first."""
        cached_fields: dict[str, FieldInfo] | None = cls.__dict__.get("_fields")
        if cached_fields is None:
            cached_fields = {}
            for base in reversed(cls.__mro__):
                for name, declared_field in base.__dict__.get("_own", ({}, {}))[0].items():
                    cached_fields[name] = _declared_field(base, name, declared_field)
            type.__setattr__(cls, "_fields", cached_fields)
        return cached_fields

    @property
    def validators(cls) -> dict[str, ValidatorMark]:
        """The validators by the names of their functions."""
        return {
            name: mark
            for base in reversed(cls.__mro__)
            for name, mark in base.__dict__.get("_own", ({}, {}))[1].items()
        }

    @property
    def checks(cls) -> tuple[ValidatorMark, ...]:
        """The validators of a whole value."""
        cached_marks: tuple[ValidatorMark, ...] | None = cls.__dict__.get("_checks")
        if cached_marks is None:
            cached_marks = tuple(mark for mark in cls.validators.values() if not mark.fields)
            type.__setattr__(cls, "_checks", cached_marks)
        return cached_marks

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(("model_", "__pydantic_", "__get_pydantic_")):
            refuse(f"{cls.__name__}.{name}")
        raise AttributeError(name)


def _declared_field(owner: type, name: str, declared_field: Any) -> FieldInfo:
    """A field of a class, by the statement in the body."""
    if isinstance(declared_field, FieldInfo):
        field = declared_field
    elif declared_field is NO_FIELD:
        field = FieldInfo()
    elif type(declared_field).__module__.startswith("pydantic"):
        refuse(f"{owner.__name__}.{name} is declared by pydantic")
    else:
        field = FieldInfo(declared_field)
    field.name = name
    field.annotation = owner.__annotations__[name]
    field.module = owner.__module__
    return field


def run_checks(value: Any) -> None:
    """Let a value's own validators read it."""
    for mark in type(value).checks:
        if mark.mode != "after":
            refuse(f"a validator of {type(value).__name__} comes before")
        try:
            mark.function(value)
        except ValueError:
            refuse(f"wrong {type(value).__name__}")


class BeforeValidator:
    """A function in an annotation that changes the data before they are read."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function


class TypeAdapter:
    """A type that only validation asks for."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind = kind
        self.options = options

    def __class_getitem__(cls, kind: Any) -> Any:
        return cls

    def validate_python(self, data: Any, **_: Any) -> Any:
        refuse(f"{self.kind} of {type(data).__name__}")


class ValidationInfo:
    """Never made: a lean process does not run validators that ask for it."""


class ValidationError(ValueError):
    """Never raised: a lean process starts over instead."""
