"""Values that stand elsewhere: `${env:NAME}` and `${file:PATH}` in a text of a file. What they hold
may be a secret, and is in no error and no log."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.wishes.document import Keys

_REFERENCE = re.compile(r"\$\{(env|file):([^}]*)\}")
# A chat template is the longest that a model takes.
_LONGEST = 1024 * 1024
# A shorter value is part of too many words to be taken out of them.
_LEAST_SHOWN = 4


class Unresolved(Exception):
    """A reference to what is not there; the message says what."""


@dataclass
class References:
    """Of one file, in whose folder relative paths begin. `held`: what was read, by the reference to
    it."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    held: dict[str, str] = field(default_factory=dict)

    def resolved(self, value: Any) -> Any:
        """The value with what its references hold. Raises Unresolved."""
        if isinstance(value, str):
            return _REFERENCE.sub(self._read, value)
        if isinstance(value, dict):
            return {key: self.resolved(one) for key, one in value.items()}
        return [self.resolved(one) for one in value] if isinstance(value, list) else value

    def hidden(self, text: str) -> str:
        """A text for people: the references in the place of what they hold."""
        for reference, held in sorted(self.held.items(), key=lambda one: -len(one[1])):
            text = text.replace(held, reference) if len(held) >= _LEAST_SHOWN else text
        return text

    def _read(self, found: re.Match[str]) -> str:
        kind, name = found[1], found[2].strip()
        if kind == "env":
            if name not in self.environment:
                raise Unresolved(f"the variable {name} is not set")
            value = self.environment[name]
        else:
            try:
                path = self.folder / Path(name).expanduser()
                with path.open() as file:
                    value = file.read(_LONGEST).removesuffix("\n")
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
        self.held[found[0]] = value
        return value


def texts(value: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """All texts of a value that have references, and where they stand."""
    if isinstance(value, str) and _REFERENCE.search(value):
        yield keys, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from texts(one, (*keys, str(key)))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from texts(one, (*keys, number))
