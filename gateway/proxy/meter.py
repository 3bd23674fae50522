"""What the data plane tells about each request. The base class does nothing; metrics override what
they count."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec

from gateway.errors import FitserveError

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})').search
_CACHE = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d{1,12})').findall
_CACHED = re.compile(rb'"cache(?:d_tokens|_read_input_tokens)"\s*:\s*(\d{1,12})').search
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})').search


TokenUsage = tuple[int | None, int | None, int | None]
"""Tokens of the prompt, of the answer, and of the prompt those that were in a cache; None: that was
not told."""
UNTOLD: TokenUsage = (None, None, None)

_Count = Annotated[int, msgspec.Meta(ge=0, lt=10**12)]


class _Usage(msgspec.Struct):
    """The block of OpenAI's shape, where there are no blocks within it."""

    prompt_tokens: _Count
    completion_tokens: _Count


_USAGE = msgspec.json.Decoder(_Usage)


class Meter:
    """Called from the event loop. Each `begun` has its `ended`, each request one `finished`,
    `refused` or both. Must not raise.

    `started` and `first_byte_at` are seconds of the loop's clock, `received` and `sent` bytes of
    the bodies.
    """

    def begun(self, exchange: Exchange) -> None:
        """A replica is chosen, `exchange.replica`. Once more after the first one took no
        connection."""

    def first_byte(self, exchange: Exchange) -> None:
        """The first byte of the answer's body came from the engine."""

    def refused(self, exchange: Exchange, error: FitserveError) -> None:
        """The gateway answers itself, with this error."""

    def turned_away(self, error: FitserveError, id_: str, address: str) -> None:
        """The same, to what has not become a request."""

    def ended(self, exchange: Exchange) -> None:
        """The replica has done with it, or took no connection (its outcome is unreachable then)."""

    def finished(self, exchange: Exchange) -> None:
        """Over, as `exchange.outcome` says: answered, left (the client), broken (the engine),
        refused (the gateway)."""


def usage(tail: Iterable[bytes]) -> TokenUsage:
    """What the last usage block in the tail of an answer tells."""
    data = b"".join(tail)
    at = data.rfind(b'"usage"')
    if at < 0:
        return UNTOLD
    try:
        told = _USAGE.decode(data[data.find(b"{", at) : data.find(b"}", at) + 1])
    except msgspec.DecodeError:
        pass
    else:
        return told.prompt_tokens, told.completion_tokens, None
    prompt, completion, cached = _PROMPT(data, at), _COMPLETION(data, at), None
    # In Anthropic's shape what came from a cache stands beside `input_tokens`; in OpenAI's it is
    # among the prompt's.
    beside = 0
    if prompt and data.find(b'"cache', at) >= 0:
        beside, cached = sum(map(int, _CACHE(data, at))), _CACHED(data, at)
    return (
        int(prompt[1]) + beside if prompt else None,
        int(completion[1]) if completion else None,
        int(cached[1]) if cached else None,
    )
