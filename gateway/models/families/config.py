"""Checked access to config.json: a wrong type is an error for the user, not a traceback."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.errors import BadModel

WORD = re.compile(r"[\w.-]{1,200}")
_MAX_INTEGER = 10**12


class Fields:
    """An object in the config.json of `source`. The methods return checked values or raise
    BadModel."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def field_error(self, name: str, must: str) -> BadModel:
        return BadModel(
            f"config.json of {self.source} has {name}={quote(self.config.get(name))}; it must be"
            f" {must}.",
            hint="Repair config.json, or download the model again from its publisher.",
        )

    def missing_field_error(self, name: str) -> BadModel:
        return BadModel(
            f"config.json of {self.source} has no `{name}`.",
            hint="Is this a transformers language model?",
        )

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """The value of the first of `names` that the config has, in items (never bytes)."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not minimum <= value <= _MAX_INTEGER
            ):
                raise self.field_error(name, f"a whole number from {minimum} to 10^12")
            return value
        if default is None:
            raise self.missing_field_error(names[0])
        return default

    def largest(self, names: Sequence[str], default: int | None = None) -> int:
        """`integer`, or the largest size of a list with one size per layer."""
        minimum = 0 if default is not None else 1
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                return Fields({name: max(value)}, self.source).integer(name, minimum=minimum)
            if isinstance(value, int) and not isinstance(value, bool):
                return self.integer(name, minimum=minimum)
        return self.integer(*names) if default is None else default

    def first_name(self, *names: str) -> str:
        """The first of `names` that the config has; "": none."""
        return next((name for name in names if self.config.get(name) is not None), "")

    def flag(self, name: str) -> bool:
        return self.config.get(name) is True

    def word(self, name: str) -> str:
        value = self.config.get(name)
        if value is None:
            raise self.missing_field_error(name)
        if not isinstance(value, str) or not WORD.fullmatch(value):
            raise self.field_error(name, "a name")
        return value

    def first_word(self, name: str) -> str:
        values = self.config.get(name)
        if not values:
            raise self.missing_field_error(name)
        if (
            not isinstance(values, list)
            or not isinstance(values[0], str)
            or not WORD.fullmatch(values[0])
        ):
            raise self.field_error(name, "a list of names")
        return values[0]

    def mapping(self, name: str, default: Mapping[str, Any]) -> Mapping[str, Any]:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, Mapping):
            raise self.field_error(name, "an object")
        return value


def quote(value: object) -> str:
    """A value for a message: short, and in one line."""
    if isinstance(value, str):
        return repr(value[:60])
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a huge number"
    return (
        repr(value)
        if value is None or isinstance(value, int | float)
        else f"a {type(value).__name__}"
    )
