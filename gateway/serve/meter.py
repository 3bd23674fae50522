"""What the data plane tells about each request. The base class does nothing; metrics override what they count."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.errors import FitserveError
    from gateway.serve.exchange import Exchange

# Enough for the usage block at the end of an answer, or in one of the last events of a stream.
TAIL_BYTES = 4096
TAIL_PIECES = 4

_USAGE = re.compile(rb'"(prompt|input|completion|output)_tokens"\s*:\s*(\d{1,12})')


class Meter:
    """Called from the event loop. Each `begun` has its `ended`. Must not raise.

    An exchange has: endpoint, model, replica, streams, started and first_byte_at (seconds of the loop's clock), status,
    received and sent (bytes of the bodies), outcome.
    """

    def begun(self, exchange: Exchange) -> None:
        """A replica is chosen, `exchange.replica`. Once more after the first one took no connection."""

    def first_byte(self, exchange: Exchange) -> None:
        """The first byte of the answer's body came from the engine."""

    def refused(self, exchange: Exchange, error: FitserveError) -> None:
        """The gateway answers itself, with this error."""

    def ended(self, exchange: Exchange) -> None:
        """Over, as `exchange.outcome` says: answered, left (the client), broken (the engine), refused (the gateway)."""


def usage(tail: Iterable[bytes]) -> tuple[int | None, int | None]:
    """Prompt and completion tokens as the last usage block in the tail of an answer tells them; None where it does not."""
    data = b"".join(tail)
    at = data.rfind(b'"usage"')
    prompt = completion = None
    if at >= 0:
        for kind, count in _USAGE.findall(data, at):
            if kind in (b"prompt", b"input"):
                prompt = int(count) if prompt is None else prompt
            elif completion is None:
                completion = int(count)
    return prompt, completion
