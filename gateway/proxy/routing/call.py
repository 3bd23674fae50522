"""The part of a request that its routing needs."""

from __future__ import annotations

import msgspec

# Calls of these endpoints take no place in an engine's batch, so they never wait.
_LIGHT_ENDPOINTS = frozenset({"tokenize", "detokenize", "count_tokens"})


class Call(msgspec.Struct):
    """The part of a request that the choice of a replica needs.

    body: the whole request in JSON, empty for a form or no body.
    maker: the seed of the replica that made the response to continue.
    tokens, prefix: see `gateway.proxy.routing.balance`.
    requested_name: the alias in the body.
    choices: answers that the client asks for (`n`).
    stores_answer: the response may be continued and retrieved (/v1/responses).
    priority: a smaller number goes first.
    engine_priority: the same for the queue of the engine that was chosen last; None: `priority`.
    """

    endpoint: str
    model: str
    body: bytes | bytearray = b""
    is_stream: bool = False
    maker: int | None = None
    tokens: int = 1
    prefix: int | None = None
    requested_name: str = ""
    choices: int = 1
    stores_answer: bool = False
    priority: int = 0
    engine_priority: int | None = None

    @property
    def is_light(self) -> bool:
        """Whether the call costs the engine nearly nothing: a token count, or the retrieval of a
        response."""
        return self.endpoint in _LIGHT_ENDPOINTS or (self.maker is not None and not self.body)
