"""References in texts of a file: `${env:NAME}` and `${file:PATH}`.

Their values may be secrets, and stand in no error and no log.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gateway.file_reading import read_file
from gateway.wishes.document import Keys

_REFERENCE = re.compile(r"\$\{(env|file):([^}]*)\}")
# A chat template is the longest that a model takes.
_LONGEST = 1024 * 1024
# A shorter value is part of too many words to be taken out of them.
_LEAST_SHOWN = 4
# Characters in a row that a value and a text share by chance only.
_PART = 8


class Unresolved(Exception):
    """A reference without a value; the message says why."""


@dataclass
class References:
    """References of one file; relative paths begin in its folder. values: by reference."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    values: dict[str, str] = field(default_factory=dict, repr=False)

    def resolved(self, value: Any) -> Any:
        """The value with references replaced. Raises Unresolved."""
        if isinstance(value, str):
            return _REFERENCE.sub(self._read, value)
        if isinstance(value, dict):
            return {key: self.resolved(item) for key, item in value.items()}
        return [self.resolved(item) for item in value] if isinstance(value, list) else value

    def hidden(self, text: str) -> str:
        """The text with references in the place of their values, and of each part of a value,
        however the text cuts or escapes it."""
        for reference, value in sorted(self.values.items(), key=lambda one: -len(one[1])):
            text = text.replace(value, reference) if len(value) >= _LEAST_SHOWN else text
        for reference, value in self.values.items():
            text = _without_parts(text, value, reference)
        return text

    def _read(self, match: re.Match[str]) -> str:
        kind, name = match[1], match[2].strip()
        if kind == "env":
            if name not in self.environment:
                raise Unresolved(f"the variable {name} is not set")
            value = self.environment[name]
        else:
            try:
                path = self.folder / Path(name).expanduser()
                text = read_file(path, 4 * _LONGEST).decode()[:_LONGEST]
                value = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
            except UnicodeDecodeError:
                raise Unresolved(f"{path} cannot be read: it is no text") from None
            except (
                OSError,
                ValueError,
                RuntimeError,
            ) as error:  # a character that no path has; the home of nobody
                raise Unresolved(
                    f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}"
                ) from None
        self.values[match[0]] = value
        return value


def _without_parts(text: str, value: str, reference: str) -> str:
    """The text with the reference for each run of characters that the value has too."""
    forms = {value, repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)}
    forms_text = "\n".join(form.casefold() for form in {*forms, quote(value, safe="")})
    lower_text, lower_reference = text.casefold(), reference.casefold()
    if len(lower_text) != len(text):  # a letter with another length, such as a sharp s
        forms_text, lower_text, lower_reference = "\n".join(forms), text, reference
    hidden = bytearray(len(text))
    for start in range(len(text) - _PART + 1):
        part = lower_text[start : start + _PART]
        if part in forms_text and part not in lower_reference:
            hidden[start : start + _PART] = b"x" * _PART
    pieces, place = [], 0
    for match in re.finditer(b"x+", hidden):
        pieces += [text[place : match.start()], reference]
        place = match.end()
    return "".join([*pieces, text[place:]])


def texts(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """All texts with references in a value, and their places."""
    if isinstance(value, str) and _REFERENCE.search(value):
        yield keys, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts(item, (*keys, str(key)))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from texts(item, (*keys, number))
