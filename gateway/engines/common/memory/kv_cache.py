"""The contract of an engine's KV cache. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# Bytes of one number of an unquantized cache, by dtype.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# The end of KV cache dtypes with a scale for each token and head.
SCALED_END = "_per_token_head"


def stored_bytes(kv_dtype: str, item_bytes: int) -> float:
    """Bytes of one number of a cache of `kv_dtype`, without scales of heads or tokens.

    item_bytes: bytes of one number of the activations.
    """
    if kv_dtype.startswith("int4"):
        return 0.5
    if kv_dtype == "nvfp4":
        return 0.5 + 1 / 16  # with the scale of 16 numbers: nvfp4_kv_cache_full_dim
    return 1 if kv_dtype.startswith(("fp8", "int8")) else item_bytes


class KvCache(Protocol):
    """The KV cache of one rank."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token of a long request; 0: the cache does not grow."""

    @property
    def states_per_request(self) -> int:
        """States of recurrent layers that the engine counts for a request; 0: no layer has one."""

    def states(self, kv_bytes: int, /) -> int:
        """How many states fit."""

    def bytes_for(self, length: int, batched_tokens: int, /) -> int:
        """Bytes of one request of `length` tokens."""

    def largest(self, kv_bytes: int, batched_tokens: int, limit: int, /) -> int:
        """The longest request (at most `limit` tokens) that fits."""

    def requests(self, kv_bytes: int, length: int, batched_tokens: int, /) -> float:
        """How many requests of `length` tokens fit; infinite where nothing is kept."""


def longest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest fitting length up to `limit`; 0: not even one token fits. Every shorter length
    fits too."""
    if fits(limit):
        return limit
    low = 0
    high = limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
