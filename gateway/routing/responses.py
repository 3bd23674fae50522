"""Whose a response of `/v1/responses` is, and which replica made it: only that one can go on from it, and only for that key."""

from __future__ import annotations

import time

from gateway.access.auth import Key
from gateway.errors import NotFound
from gateway.shared_memory import RESPONSES, SharedTable

_SHOWN_ID = 200


class Responses:
    """`table`: that of several workers; None: of this process alone. The oldest ones are forgotten."""

    def __init__(self, table: SharedTable | None = None) -> None:
        self._table = table or SharedTable(RESPONSES)

    def made(self, response: bytes, key: Key, replica: int) -> None:
        """replica: the seed of the one that made it."""
        self._table.put(response + key.digest, replica, int(time.monotonic()))

    def maker_of(self, response: str, key: Key) -> int:
        """The seed of the replica that made it for who has `key`. Raises NotFound, also where it was made for another."""
        maker, when = self._table.get(response.encode(errors="replace") + key.digest)
        if not when:
            raise no_response(response)
        return maker


def no_response(response: str) -> NotFound:
    shown = response if len(response) <= _SHOWN_ID else response[:_SHOWN_ID] + "..."
    return NotFound(
        f"There is no response {shown}.",
        hint="A response is known to the key that made it, while its engine and the gateway run.",
    )
