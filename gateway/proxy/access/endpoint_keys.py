"""Keys of the gateway for external engines. A wish refers to a key, which is read at each use.

    env:FITSERVE_ENDPOINT_KEY_NAME      a variable of the gateway's environment
    file:NAME                           the line in DATA/endpoint-keys/NAME

Nothing else is read: otherwise a user with permission to add models could send any secret that the
gateway can read to a host of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.file_reading import read_file
from gateway.secret import Secret

FOLDER = "endpoint-keys"
_MAX_BYTES = 4096
# Characters allowed in a header after `Bearer `.
_KEY = re.compile(r"[!-~]+", re.ASCII)


class NoKeyError(Exception):
    """A key cannot be read. The text says why, but neither place nor content, because clients may
    see it."""


@dataclass(frozen=True)
class EndpointKeys:
    """Reads the keys of the gateway for external engines.

    `data`: the gateway's folder.
    """

    data: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def read(self, reference: str) -> Secret:
        """The key that a wish refers to. Raises NoKeyError."""
        kind, _, name = reference.partition(":")
        if kind == "env":
            key = self.environment.get(name)
            if key is None:
                raise NoKeyError("the variable is not set where the gateway runs")
        else:
            try:
                content = read_file(self.data / FOLDER / name, _MAX_BYTES + 1)
                key = content.decode("ascii", "replace")
            except OSError as error:
                raise NoKeyError(f"its file: {error.strerror}") from None
        key = key.strip()
        if not key:
            raise NoKeyError("it is empty")
        if len(key) > _MAX_BYTES or not _KEY.fullmatch(key):
            raise NoKeyError("it has blanks, several lines, more than 4 KiB, or invalid characters")
        return Secret(key)
