"""Values of a lean process as plain data."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any, get_args, get_origin

from gateway.domain.base import refuse
from gateway.domain.lean.lean_class import ValueType
from gateway.domain.lean.lean_reader import type_of


def plain(value: Any, *, by_alias: bool, in_json: bool) -> Any:
    """The value as mappings, lists, texts and numbers. Raises NeedsPydantic.

    in_json: tuples as lists, and keys as texts.
    """
    if value is None or type(value) in (str, int, bool):
        return value
    if type(value) is float:
        # Pydantic writes the exponent of larger numbers in another way.
        return refuse(f"JSON of {value}") if in_json and 1e16 <= abs(value) < math.inf else value
    if isinstance(type(value), ValueType):
        return _written_fields(value, by_alias=by_alias, in_json=in_json)
    if type(value) in (tuple, list):
        items = [plain(item, by_alias=by_alias, in_json=in_json) for item in value]
        return tuple(items) if type(value) is tuple and not in_json else items
    if isinstance(value, dict):
        return {
            str(key) if in_json else key: plain(item, by_alias=by_alias, in_json=in_json)
            for key, item in value.items()
        }
    if isinstance(value, PurePath):
        return str(value) if in_json else value
    return refuse(f"plain data of {type(value).__name__}")


def _written_fields(value: Any, *, by_alias: bool, in_json: bool) -> Any:
    attributes = value.__dict__
    if hasattr(value, "read_root"):
        return plain(attributes["root"], by_alias=by_alias, in_json=in_json)
    aliases = by_alias or bool(type(value).model_config.get("serialize_by_alias"))
    document = {}
    for name, field in type(value).model_fields.items():
        unless = field.limits.get("exclude_if")
        if "exclude" not in field.limits and (unless is None or not unless(attributes[name])):
            plain_value = plain(attributes[name], by_alias=by_alias, in_json=in_json)
            if in_json and "float" in str(field.annotation):
                plain_value = _float_values(plain_value, type_of(field))
            document[field.alias if aliases and field.alias else name] = plain_value
    return document


def _float_values(value: Any, kind: Any) -> Any:
    """Whole numbers as numbers with a fraction, where pydantic writes them so: 0.0."""
    if type(value) is int:
        return float(value) if kind is float or _is_float(get_args(kind)) else value
    arguments = get_args(kind)
    if isinstance(value, list) and get_origin(kind) in (tuple, list):
        return [_float_values(item, arguments[0]) for item in value]
    if isinstance(value, dict) and get_origin(kind) is dict:
        return {key: _float_values(item, arguments[1]) for key, item in value.items()}
    return value


def _is_float(members: tuple[Any, ...]) -> bool:
    """Whether the union (or the type with limits) has float, and no int."""
    return float in members and int not in members
