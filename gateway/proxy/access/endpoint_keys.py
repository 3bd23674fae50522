"""The keys that the gateway shows to engines that run elsewhere. A wish only says where a key is;
it is read when it is used, so a file that changes counts.

    env:FITSERVE_ENDPOINT_KEY_NAME      a variable of the gateway's environment
    file:NAME                           the line in DATA/endpoint-keys/NAME

Nothing else is read: who may add a model could otherwise have any secret that the gateway can read
sent to a host of theirs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "endpoint-keys"
_MOST_BYTES = 4096
# What may stand in a header behind `Bearer `.
_KEY = re.compile(r"[!-~]+", re.ASCII)


class NoKeyError(Exception):
    """The key is not where it should be. The text says why, and neither where that is nor what is
    there: clients may read it."""


@dataclass(frozen=True)
class EndpointKeys:
    """data: the gateway's folder."""

    data: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def read(self, reference: str) -> str:
        """The key that a wish refers to. Raises NoKeyError."""
        kind, _, name = reference.partition(":")
        if kind == "env":
            found = self.environment.get(name)
            if found is None:
                raise NoKeyError("the variable is not set where the gateway runs")
        else:
            try:
                with (self.data / FOLDER / name).open("rb") as file:
                    found = file.read(_MOST_BYTES + 1).decode("ascii", "replace")
            except OSError as error:
                raise NoKeyError(f"its file: {error.strerror}") from None
        found = found.strip()
        if not found:
            raise NoKeyError("there is nothing in it")
        if len(found) > _MOST_BYTES or not _KEY.fullmatch(found):
            raise NoKeyError(
                "it has blanks, several lines, more than 4 KiB, or characters that no key has"
            )
        return found
