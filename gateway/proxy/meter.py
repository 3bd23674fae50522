"""Hooks for counting requests in the data plane. The base class does nothing; metrics override its
methods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.errors import FitserveError
from gateway.proxy.api.usage_block import UsageBlock

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})').search
_CACHE = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d{1,12})').findall
_CACHED = re.compile(rb'"cache(?:d_tokens|_read_input_tokens)"\s*:\s*(\d{1,12})').search
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})').search


TokenUsage = tuple[int | None, int | None, int | None]
"""Tokens of the prompt, of the answer, and of the prompt from a cache. None: not reported."""
UNTOLD: TokenUsage = (None, None, None)

_USAGE = msgspec.json.Decoder(UsageBlock)


class Meter:
    """Calls of the data plane, in the event loop. Each `begun` has its `ended`; each request has
    one `finished`, `refused` or both. No method may raise.

    `started` and `first_byte_at` are seconds of the loop's clock, `received` and `sent` bytes of
    the bodies.
    """

    def begun(self, exchange: Exchange) -> None:
        """Counts a request to its chosen replica, `exchange.replica`. Called again after a
        retry."""

    def first_byte(self, exchange: Exchange) -> None:
        """Counts the first byte of the answer's body."""

    def refused(self, exchange: Exchange, error: FitserveError) -> None:
        """Counts an answer of the gateway itself, with this error."""

    def rejected(self, error: FitserveError, id_: str, address: str) -> None:
        """Counts the refusal of bytes that did not become a request."""

    def ended(self, exchange: Exchange) -> None:
        """Counts the end at the replica. The outcome is unreachable where the replica took no
        connection."""

    def finished(self, exchange: Exchange) -> None:
        """Counts the end of a request. `exchange.outcome`: answered, left (by the client), broken
        (by the engine), refused (by the gateway)."""


def usage(tail: Sequence[bytes]) -> TokenUsage:
    """The last usage block in the tail of an answer."""
    data = tail[0] if len(tail) == 1 else b"".join(tail)
    start = data.rfind(b'"usage"')
    if start < 0:
        return UNTOLD
    try:
        block = _USAGE.decode(data[data.find(b"{", start) : data.find(b"}", start) + 1])
    except msgspec.DecodeError:
        pass
    else:
        return block.prompt_tokens, block.completion_tokens, None
    prompt, completion, cached = _PROMPT(data, start), _COMPLETION(data, start), None
    # Anthropic counts tokens from a cache beside `input_tokens`; OpenAI counts them within the
    # prompt.
    from_cache = 0
    if prompt and data.find(b'"cache', start) >= 0:
        from_cache, cached = sum(map(int, _CACHE(data, start))), _CACHED(data, start)
    return (
        int(prompt[1]) + from_cache if prompt else None,
        int(completion[1]) if completion else None,
        int(cached[1]) if cached else None,
    )
