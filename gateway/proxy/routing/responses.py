"""Who owns a response of `/v1/responses`, and which replica made the response: only this replica
can go on from the response, and only for the same key."""

from __future__ import annotations

import time

from gateway.errors import NotFound
from gateway.proxy.access.auth import Key
from gateway.proxy.shared_memory import RESPONSES, SharedTable

_SHOWN_ID = 200


class Responses:
    """`table`: that of several workers; None: of this process alone. The oldest ones are
    forgotten."""

    def __init__(self, table: SharedTable | None = None) -> None:
        self._table = table or SharedTable(RESPONSES)

    def made(self, response: bytes, key: Key, replica: int) -> None:
        """replica: the seed of the replica that made the response."""
        self._table.put(response + key.digest, replica, int(time.monotonic()))

    def maker_of(self, response: str, key: Key) -> int:
        """The seed of the replica that made the response. Raises NotFound, also where the response
        was made for another key."""
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
