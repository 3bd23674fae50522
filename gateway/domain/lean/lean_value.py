"""The base class of values in a lean process, with the methods of pydantic's models that our code
calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import msgspec

from gateway.domain.base import bare, refuse
from gateway.domain.lean.lean_class import (
    NO_FIELD,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValueType,
    field_validator,
    model_validator,
    run_checks,
)
from gateway.domain.lean.lean_reader import read_fields, read_value
from gateway.domain.lean.lean_writer import plain

__all__ = [
    "BaseModel",
    "BeforeValidator",
    "ConfigDict",
    "Field",
    "RootModel",
    "TypeAdapter",
    "ValidationError",
    "ValidationInfo",
    "field_validator",
    "model_validator",
]


class BaseModel(metaclass=ValueType):
    """A value: unvalidated fields in `__dict__`, in the order of their declaration."""

    model_config: ClassVar[dict[str, Any]] = {}
    model_fields: ClassVar[dict[str, Any]]

    def __init__(self, /, **fields: Any) -> None:
        object.__setattr__(self, "__dict__", read_fields(type(self), fields))
        run_checks(self)

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        value: Self = read_value(cls, data, is_trusted=False)
        return value

    @classmethod
    def trust_data(cls, data: Any) -> Self:
        """A value of data that tests have validated."""
        value: Self = read_value(cls, data, is_trusted=True)
        return value

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        try:
            data = msgspec.json.decode(text)
        except (ValueError, RecursionError):
            refuse(f"{cls.__name__} of wrong JSON")
        return cls.model_validate(data)

    def evolve(self, **changes: Any) -> Self:
        copy: Self = bare(type(self), self.__dict__ | changes)
        return copy

    def model_dump(self, *, mode: str = "python", **options: Any) -> dict[str, Any]:
        if mode not in ("json", "python") or options.keys() - {"by_alias"}:
            refuse("model_dump with options")
        by_alias = bool(options.get("by_alias"))
        fields: dict[str, Any] = plain(self, by_alias=by_alias, in_json=mode == "json")
        return fields

    def model_dump_json(self, *, by_alias: bool = False, indent: int | None = None) -> str:
        text = msgspec.json.encode(plain(self, by_alias=by_alias, in_json=True))
        return (text if indent is None else msgspec.json.format(text, indent=indent)).decode()

    def __class_getitem__(cls, kind: Any) -> Any:
        """The class with this kind in place of its type variable T."""
        if not isinstance(kind, type):
            return cls
        specialized = cls.__dict__.get("_of_kind")
        if specialized is None:
            specialized = {}
            type.__setattr__(cls, "_of_kind", specialized)
        if kind not in specialized:
            changed_kinds = {
                name: kind.__name__
                for name, annotation in cls.__annotations__.items()
                if annotation == "T"
            }
            name = f"{cls.__name__}[{kind.__name__}]"
            specialized[kind] = ValueType(
                name, (cls,), {"__module__": cls.__module__, "__annotations__": changed_kinds}
            )
        return specialized[kind]

    def __setattr__(self, name: str, value: Any) -> None:
        refuse(f"{type(self).__name__}.{name} is frozen")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("model_"):
            refuse(f"{type(self).__name__}().{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in self.__dict__.items() if not name.startswith("_"))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        own_fields = self.__dict__
        other_fields = other.__dict__
        return own_fields == other_fields or all(
            own_fields[name] == other_fields[name] for name in type(self).model_fields
        )

    def __hash__(self) -> int:
        return hash((type(self), *(self.__dict__[name] for name in type(self).model_fields)))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={self.__dict__[name]!r}" for name in type(self).model_fields)
        return f"{type(self).__name__}({fields})"


class RootModel(BaseModel):
    """A value without fields of its own; `read_root` of a subclass reads its data."""

    def __class_getitem__(cls, kind: Any) -> Any:
        return cls

    def __init__(self, root: Any = NO_FIELD) -> None:
        if root is not NO_FIELD:
            refuse(f"{type(self).__name__} of data")
        fields = type(self).model_fields
        object.__setattr__(self, "__dict__", {"root": fields["root"].get_default()})

    @classmethod
    def read_root(cls, data: Any, *, is_trusted: bool) -> Self:
        """Leave the data to pydantic, which reads every root. Raises NeedsPydantic."""
        refuse(f"{cls.__name__} of {type(data).__name__}, {is_trusted=}")
