"""Hooks for counting requests in the data plane. The base class does nothing; metrics override its
methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import FitserveError
from gateway.proxy.api.usage_block import UsageTail, structured_usage

if TYPE_CHECKING:
    from gateway.proxy.exchange import Exchange

TokenUsage = tuple[int | None, int | None, int | None]
"""Tokens of the prompt, of the answer, and of the prompt from a cache. None: not reported."""
UNTOLD: TokenUsage = (None, None, None)

# Tokens of the prompt that Anthropic's API reports only in the first event of a stream.
LEAD_BYTES = 4096

_REST = msgspec.json.Decoder(UsageTail)


class Meter:
    """Calls of the data plane, in the event loop. Each `count_start` has its `count_end`;
    each request has one `count_completion`, `count_refusal` or both. No method may raise.

    `started_at` and `first_byte_at` are seconds of the loop's clock. `received_bytes` and
    `sent_bytes` count the bodies.
    """

    def count_start(self, exchange: Exchange) -> None:
        """Count a request to its chosen replica, `exchange.replica`. Called again after a
        retry."""

    def count_first_byte(self, exchange: Exchange) -> None:
        """Count the first byte of the answer's body."""

    def count_refusal(self, exchange: Exchange, error: FitserveError) -> None:
        """Count an answer of the gateway itself, with this error."""

    def count_rejection(self, error: FitserveError, id_: str, address: str) -> None:
        """Count the refusal of bytes that did not become a request."""

    def count_end(self, exchange: Exchange) -> None:
        """Count the end at the replica. The outcome is unreachable where the replica took no
        connection."""

    def count_completion(self, exchange: Exchange) -> None:
        """Count the end of a request. `exchange.outcome`: answered, left (by the client), broken
        (by the engine), refused (by the gateway)."""


def answer_usage(tail: Sequence[bytes]) -> TokenUsage:
    """The usage that the answer with this tail reports in its outermost object, or in the response
    that its last event holds. The same word elsewhere does not count, as clients can have it
    repeated."""
    data = tail[0] if len(tail) == 1 else b"".join(tail)
    start = data.rfind(b'"usage"')
    if start < 0:
        return UNTOLD
    end = data.find(b"\n\n", start)
    # The rest is an object only where the block is a field of the outermost one: else the ends of
    # other objects follow.
    try:
        block = _REST.decode(b"{" + data[start : end if end > 0 else None]).usage
    except DECODE_ERRORS:
        return structured_usage(data)
    details = block.prompt_tokens_details
    cached_tokens = details.cached_tokens if details is not None else None
    return block.prompt_tokens, block.completion_tokens, cached_tokens


def streamed_usage(lead: bytes, tail: Sequence[bytes]) -> TokenUsage:
    """The usage of a stream. lead: its first bytes, with prompt tokens that its end may lack."""
    prompt, completion, cached_tokens = answer_usage(tail)
    if prompt is None and completion is not None:
        prompt, _, cached_tokens = structured_usage(lead)
    return prompt, completion, cached_tokens
