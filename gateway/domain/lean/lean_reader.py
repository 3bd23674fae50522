"""Data as values of a lean process, where pydantic would take the data as they are.

A reader of a type returns the value, or raises NeedsConversionError: then only pydantic can read
the data, or say that they are wrong. Trusted data (shipped files, which tests validate) are only
converted: mappings to values, lists to tuples, whole numbers to floats.
"""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeVar, Union, get_args, get_origin

from gateway.domain.base import bare, refuse
from gateway.domain.lean.lean_class import (
    BeforeValidator,
    FieldInfo,
    ValueType,
    run_checks,
)
from gateway.secret import Secret

Reader = Callable[[Any], Any]


class NeedsConversionError(Exception):
    """Only pydantic can read the data."""


def read_value(kind: Any, data: Any, *, is_trusted: bool) -> Any:
    """Data as a value of the class. Raises NeedsPydantic."""
    try:
        return _reader_of_class(kind, is_trusted)(data)
    except NeedsConversionError as error:
        refuse(f"{kind.__name__}: {error}")


def read_fields(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    """All fields of a value, of some by name. Raises NeedsPydantic."""
    try:
        return _fields_reader(kind, False)(data)
    except NeedsConversionError as error:
        refuse(f"{kind.__name__}: {error}")


@cache
def _fields_reader(kind: Any, is_trusted: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The reader of a class's fields by name. Trusted fields are all known and complete."""
    fields: dict[str, FieldInfo] = kind.model_fields
    scalars, readers = _split_readers(kind, is_trusted)
    template = _default_values(kind, readers)
    factories = {
        name: field.default_factory for name, field in fields.items() if field.default_factory
    }
    required = frozenset(name for name, field in fields.items() if field.is_required)
    aliases = {field.alias: name for name, field in fields.items() if field.alias}
    ignores_others = kind.model_config.get("extra") == "ignore"
    needed_names = frozenset() if is_trusted else required

    def read(data: dict[str, Any]) -> dict[str, Any]:
        if aliases:
            data = _rename_fields(kind, data, aliases)
        if not needed_names <= data.keys():
            raise NeedsConversionError(f"some of {', '.join(needed_names)} are missing")
        values = template | data
        if len(values) != len(template):
            values = _known_fields(values, template, ignores_others=ignores_others)
        for name, scalar in scalars:
            if type(values[name]) is not scalar and name in data:
                raise NeedsConversionError(f"{name} is not of {scalar.__name__}")
        for name, reader in readers:
            if name in data:
                values[name] = reader(data[name])
        for name, factory in factories.items():
            if name not in data:
                values[name] = factory()
        return values

    return read


def _split_readers(
    kind: Any, is_trusted: bool
) -> tuple[list[tuple[str, type]], list[tuple[str, Reader]]]:
    """The fields of one exact type with that type, and the others with their readers. Fields that
    take any data are left out."""
    scalars = []
    readers = []
    for name, field in kind.model_fields.items():
        reader = _reader_of_field(kind, field, is_trusted)
        if reader in _SCALAR_OF:
            scalars.append((name, _SCALAR_OF[reader]))
        elif reader is not None:
            readers.append((name, reader))
    return scalars, readers


def _default_values(kind: Any, readers: list[tuple[str, Reader]]) -> dict[str, Any]:
    """The defaults of all fields by name, read where the class validates them."""
    fields: dict[str, FieldInfo] = kind.model_fields
    values = {name: field.default for name, field in fields.items()}
    if kind.model_config.get("validate_default"):
        for name, reader in readers:
            if not fields[name].is_required:
                values[name] = reader(fields[name].get_default())
    return values


def _known_fields(
    values: dict[str, Any], template: dict[str, Any], *, ignores_others: bool
) -> dict[str, Any]:
    if not ignores_others:
        raise NeedsConversionError(f"unknown fields among {', '.join(values)}")
    return {name: values[name] for name in template}


def _rename_fields(kind: Any, data: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """The data by the names of fields, of data by their other names."""
    renamed = {aliases.get(name, name): value for name, value in data.items()}
    has_field_names = not kind.model_config.get("populate_by_name") and data.keys() & set(
        aliases.values()
    )
    if has_field_names or len(renamed) < len(data):
        raise NeedsConversionError("a field by a name that it does not have, or by two")
    return renamed


@cache
def _reader_of_class(kind: Any, is_trusted: bool) -> Reader:
    if hasattr(kind, "read_root"):
        return lambda data: (
            data if isinstance(data, kind) else kind.read_root(data, is_trusted=is_trusted)
        )
    checked = not is_trusted and bool(kind.checks)
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def read_one(data: Any) -> Any:
        nonlocal read  # made when it is needed: a class may have values of its own as fields
        if type(data) is dict:
            if read is None:
                read = _fields_reader(kind, is_trusted)
            value = bare(kind, read(data))
            if checked:
                run_checks(value)
            return value
        if isinstance(data, kind):
            return data
        raise NeedsConversionError(f"{kind.__name__} of {type(data).__name__}")

    return read_one


def _reader_of_field(kind: Any, field: FieldInfo, is_trusted: bool) -> Reader | None:
    """The reader of a field with its limits and the class's validators of it."""
    reader = reader_of(type_of(field), is_trusted)
    if is_trusted:
        return reader
    steps = [
        (mark.mode, getattr(kind, attribute))
        for attribute, mark in kind.validators.items()
        if field.name in mark.fields
    ]
    if any(mode not in ("before", "after") for mode, _ in steps):
        return _refuse_all
    before_steps = [_guard(function) for mode, function in steps if mode == "before"]
    after_steps = [_guard(function) for mode, function in steps if mode == "after"]
    return _chain_readers([*before_steps, reader, _limit_reader(field.limits), *after_steps])


def type_of(field: FieldInfo) -> Any:
    """The type that the field's annotation names."""
    return _evaluate(field.annotation, field.module)


@cache
def _evaluate(annotation: str, module: str) -> Any:
    """The type of an annotation. The frequent forms need no compiler, which takes ten times as
    long."""
    scope = vars(sys.modules[module])
    if annotation in scope:
        return scope[annotation]
    if annotation in _BUILTIN_TYPES:
        return _BUILTIN_TYPES[annotation]
    if annotation.endswith(" | None") and annotation.count("|") == 1:
        return Optional[_evaluate(annotation.removesuffix(" | None"), module)]  # noqa: UP045
    if annotation.startswith("tuple[") and annotation.find(", ...]") == len(annotation) - 6:
        return types.GenericAlias(tuple, (_evaluate(annotation[6:-6], module), ...))
    try:
        return eval(annotation, scope)  # noqa: S307
    except NameError as error:
        raise NeedsConversionError(str(error)) from None


_BUILTIN_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "None": None}


def _chain_readers(readers: Iterable[Reader | None]) -> Reader | None:
    chain = tuple(reader for reader in readers if reader is not None)
    if len(chain) < 2:
        return chain[0] if chain else None

    def read(value: Any) -> Any:
        for reader in chain:
            value = reader(value)
        return value

    return read


def _guard(function: Reader) -> Reader:
    """A validator. Pydantic refuses the same data with a message."""

    def read(value: Any) -> Any:
        try:
            return function(value)
        except (ValueError, TypeError) as error:
            raise NeedsConversionError(str(error)) from None

    return read


def _refuse_all(value: Any) -> Any:
    raise NeedsConversionError(type(value).__name__)


@cache
def reader_of(kind: Hashable, is_trusted: bool) -> Reader | None:
    """The reader of a type; None: any data are taken as they are."""
    if kind is Any or kind is object or isinstance(kind, TypeVar):
        return None
    if isinstance(kind, ValueType):
        return _reader_of_class(kind, is_trusted)
    if kind is float:
        return _read_float
    if kind is None or kind in _SCALARS:
        scalar: Any = type(None) if kind is None else kind
        return None if is_trusted else _type_reader(scalar)
    if kind in (Path, Secret):
        return _text_reader(kind)
    origin = get_origin(kind)
    if origin is Annotated:
        return _annotated_reader(kind, is_trusted)
    if origin is Literal:
        return None if is_trusted else _choice_reader(get_args(kind))
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), is_trusted)
    if origin is tuple:
        return _tuple_reader(get_args(kind), is_trusted)
    if origin is list:
        return _list_reader(reader_of(get_args(kind)[0], is_trusted))
    if origin in (dict, Mapping):
        return _mapping_reader(*(reader_of(part, is_trusted) for part in get_args(kind)))
    return _refuse_all


_SCALARS: tuple[Any, ...] = (str, int, bool, type(None))


def _read_float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise NeedsConversionError("a number is expected")


@cache
def _type_reader(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise NeedsConversionError(f"{kind.__name__} of {type(value).__name__}")

    return read


_SCALAR_OF: dict[Reader | None, type] = {_type_reader(kind): kind for kind in _SCALARS}


def _text_reader(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is str:
            return kind(value)
        if isinstance(value, kind):
            return value
        raise NeedsConversionError(f"{kind.__name__} of {type(value).__name__}")

    return read


def _choice_reader(values: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        for allowed_value in values:
            if value == allowed_value and type(value) is type(allowed_value):
                return value
        raise NeedsConversionError("none of the allowed values")

    return read


def _annotated_reader(kind: Any, is_trusted: bool) -> Reader | None:
    reader = reader_of(kind.__origin__, is_trusted)
    if is_trusted:
        before_steps = [
            annotation.function
            for annotation in kind.__metadata__
            if isinstance(annotation, BeforeValidator)
        ]
        return _chain_readers([*before_steps, reader])
    before_steps = []
    after_steps = []
    for annotation in kind.__metadata__:
        if isinstance(annotation, BeforeValidator):
            before_steps.append(_guard(annotation.function))
        elif isinstance(annotation, FieldInfo):
            after_steps.append(_limit_reader(annotation.limits))
        elif hasattr(annotation, "check"):
            after_steps.append(_guard(annotation.check))
        else:
            return _refuse_all
    return _chain_readers([*before_steps, reader, *after_steps])


# Words of a declaration that limit nothing.
_WORDS = {"description", "examples", "json_schema_extra", "title", "exclude", "exclude_if"}
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": lambda value, limit: value >= limit,
    "gt": lambda value, limit: value > limit,
    "le": lambda value, limit: value <= limit,
    "lt": lambda value, limit: value < limit,
    "min_length": lambda value, limit: len(value) >= limit,
    "max_length": lambda value, limit: len(value) <= limit,
    # pydantic's `$` is the end of the text, Python's also stands before a last line break.
    "pattern": lambda value, limit: (
        value.isascii() and "\n" not in value and re.search(limit, value) is not None
    ),
    "allow_inf_nan": lambda value, limit: limit or math.isfinite(value),
}


def _limit_reader(limits: dict[str, Any]) -> Reader | None:
    """A reader that takes values within the limits, and None."""
    checked_limits = {name: limit for name, limit in limits.items() if name not in _WORDS}
    if not checked_limits:
        return None
    if checked_limits.keys() - _LIMITS.keys():
        return _refuse_all
    tests = tuple((_LIMITS[name], limit) for name, limit in checked_limits.items())

    def read(value: Any) -> Any:
        if value is not None and not all(test(value, limit) for test, limit in tests):
            raise NeedsConversionError("beyond its limits")
        return value

    return read


def _tuple_reader(kinds: tuple[Any, ...], is_trusted: bool) -> Reader:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        reader = reader_of(kinds[0], is_trusted)

        def read_all(value: Any) -> Any:
            if type(value) is not list and type(value) is not tuple:
                raise NeedsConversionError(f"a list of {type(value).__name__}")
            return tuple(value) if reader is None else tuple([reader(member) for member in value])

        return read_all
    readers = [reader_of(kind, is_trusted) for kind in kinds]

    def read_each(value: Any) -> Any:
        if type(value) not in (list, tuple) or len(value) != len(readers):
            raise NeedsConversionError(f"{len(readers)} items of {type(value).__name__}")
        return tuple(
            member if reader is None else reader(member)
            for reader, member in zip(readers, value, strict=True)
        )

    return read_each


def _list_reader(reader: Reader | None) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise NeedsConversionError(f"a list of {type(value).__name__}")
        return value.copy() if reader is None else [reader(member) for member in value]

    return read


def _mapping_reader(keys: Reader | None, values: Reader | None) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise NeedsConversionError(f"a mapping of {type(value).__name__}")
        if values is None:
            return (
                value.copy()
                if keys is None
                else {keys(key): member for key, member in value.items()}
            )
        if keys is None:
            return {key: values(member) for key, member in value.items()}
        return {keys(key): values(member) for key, member in value.items()}

    return read


def _union(kinds: tuple[Any, ...], is_trusted: bool) -> Reader | None:
    """A reader by the type of the data, where one member of the union takes this type."""
    readers = [reader_of(kind, is_trusted) for kind in kinds]
    if all(reader is None for reader in readers):
        return None
    reader_by_type: dict[type, Reader | None] = {}
    for kind, reader in zip(kinds, readers, strict=True):
        for exact_type in _exact_types(kind):
            reader_by_type[exact_type] = (
                _refuse_all if reader_by_type.get(exact_type, reader) != reader else reader
            )
    if float in reader_by_type:  # a whole number is a float where the union has no int
        reader_by_type.setdefault(int, reader_by_type[float])
    classes = tuple(kind for kind in kinds if isinstance(kind, type))

    def read(value: Any) -> Any:
        kind = type(value)
        if kind in reader_by_type:
            reader = reader_by_type[kind]
            return value if reader is None else reader(value)
        if isinstance(kind, ValueType) and isinstance(value, classes):
            return value
        raise NeedsConversionError(f"none of a union takes {kind.__name__}")

    return read


def _exact_types(kind: Any) -> Iterable[type]:
    """The types of data that this member of a union takes as they are."""
    while get_origin(kind) is Annotated:
        kind = kind.__origin__
    origin = get_origin(kind) or kind
    if origin is Literal:
        return {type(value) for value in get_args(kind)}
    if origin is Path:
        return (str, type(Path()))
    if origin is Secret:
        return (str, Secret)
    if origin in (tuple, list):
        return (list, tuple)
    if isinstance(origin, ValueType):
        return (dict,)
    return (origin,) if isinstance(origin, type) else ()
