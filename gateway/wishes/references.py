"""References in texts of a file: `${env:NAME}` and `${file:PATH}`.

The values may be secrets, and stand in no error and no log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.file_reading import read_file
from gateway.secret import Secret
from gateway.wishes.yaml_document import Keys

_REFERENCE = re.compile(r"\$\{(env|file):([^}]*)\}")
# A chat template is the longest that a model takes.
_MAX_CHARACTERS = 1024 * 1024


class UnresolvedReferenceError(Exception):
    """A reference without a value; the message says why."""


@dataclass
class References:
    """References of one file; relative paths begin in its folder. values: by reference, and whole
    texts by their placeholder in the file."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    values: dict[str, Secret] = field(default_factory=dict)

    def resolve(self, value: Any) -> Any:
        """The value with references replaced. Raises UnresolvedReferenceError."""
        if isinstance(value, str):
            text = _REFERENCE.sub(self._resolve_match, value)
            inner_secrets = [self.values[match[0]] for match in _REFERENCE.finditer(value)]
            if any(reference.is_short for reference in inner_secrets):
                # Letters around a short value make another word of it.
                self.values[value] = Secret(text)
            return text
        if isinstance(value, dict):
            return {key: self.resolve(item) for key, item in value.items()}
        return [self.resolve(item) for item in value] if isinstance(value, list) else value

    def hide_values(self, text: str) -> str:
        """The text with references in the place of their values, and of each part of a value."""
        for reference, value in self.values.items():
            text = value.hidden_in(text, reference)
        return text

    def _resolve_match(self, match: re.Match[str]) -> str:
        kind = match[1]
        name = match[2].strip()
        if kind == "env":
            if name not in self.environment:
                raise UnresolvedReferenceError(f"the variable {name} is not set")
            value = self.environment[name]
        else:
            try:
                path = self.folder / Path(name).expanduser()
                text = read_file(path, 4 * _MAX_CHARACTERS).decode()[:_MAX_CHARACTERS]
                value = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
            except UnicodeDecodeError:
                raise UnresolvedReferenceError(f"{path} cannot be read: it is not text") from None
            except (OSError, ValueError, RuntimeError) as error:
                # No path has such a character, or the home is unknown.
                raise UnresolvedReferenceError(
                    f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}"
                ) from None
        self.values[match[0]] = Secret(value)
        return value


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
