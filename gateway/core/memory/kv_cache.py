"""The contract of what an engine keeps of sequences. Pure."""

from __future__ import annotations

from typing import Protocol


class KvCache(Protocol):
    """What one rank keeps of sequences."""

    @property
    def bytes_per_token(self) -> int:
        """What one more token of a long request costs; 0: nothing grows."""

    def bytes_for(self, length: int, batched_tokens: int, /) -> int:
        """Bytes of one request of `length` tokens."""

    def largest(self, kv_bytes: int, batched_tokens: int, limit: int, /) -> int:
        """The longest request (at most `limit` tokens) that fits."""

    def requests(self, kv_bytes: int, length: int, batched_tokens: int, /) -> float:
        """How many requests of `length` tokens fit; infinite where nothing is kept."""
