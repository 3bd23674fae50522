"""Values of options that need no converter of typer: its converters import pydantic."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

from gateway.cli.value_names import NamedValues, name_values

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NO_VALUE = object()


class PlainValues:
    """Reads None, texts, lists of texts and whole numbers; leaves all else to typer.

    An object stands where typer keeps the converter of an option (`_runtime_param`, since typer
    0.27).
    """

    # The names are those of typer.
    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        plain_value = _read_plain(value, param)
        if plain_value is not _NO_VALUE:
            return plain_value
        param._runtime_param = None  # noqa: SLF001
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _read_plain(value: Any, param: Any) -> Any:
    kind = param.type_descriptor.annotation
    info = param.type_descriptor.parameter_info
    if value is None:
        return () if param.multiple or param.nargs == -1 else None
    if info.parser is not None or info.path_type is not None or info.resolve_path:
        return _NO_VALUE
    if kind is str and type(value) is str:
        return value
    if (
        kind == list[str]
        and type(value) in (list, tuple)
        and {type(item) for item in value} <= {str}
    ):
        return [*value]
    if kind is int and type(value) is str and _INTEGER.fullmatch(value) and not info.clamp:
        minimum = info.min
        maximum = info.max
        number = int(value)
        if (minimum is None or number >= minimum) and (maximum is None or number <= maximum):
            return number
    return _NO_VALUE


def read_plainly(params: list[Any]) -> list[Any]:
    """The parameters of a command, whose plain values are read without typer's converters."""
    for param in params:
        if getattr(param, "_runtime_param", _NO_VALUE) is None:
            param._runtime_param = PlainValues()  # noqa: SLF001
    return params


class PlainCommand(NamedValues, TyperCommand):
    """A command with plain values."""

    # The base class names the parameter `ctx`.
    def get_params(self, ctx: Any) -> list[Any]:
        return read_plainly(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands with plain values."""

    def get_params(self, ctx: Any) -> list[Any]:
        return read_plainly(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        name_values(self.get_params(ctx))
        super().format_options(ctx, formatter)
