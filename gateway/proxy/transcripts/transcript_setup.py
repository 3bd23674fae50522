"""The requests of which transcripts are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.proxy.access.auth import Key

EVERY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class TranscriptSetup:
    """The destination of copies, and the models whose requests are copied.

    socket: path of the keeper's socket.
    models: models whose requests are copied for all keys; `EVERY_MODEL` for all.
    """

    socket: str
    models: frozenset[str] = frozenset()

    def covers(self, key: Key, model: str) -> bool:
        """Whether a request with this key to this model is copied."""
        return key.is_recorded or model in self.models or EVERY_MODEL in self.models
