"""Owners of the responses of `/v1/responses`: key and replica.

Only the replica that made a response can continue it, and only for the same key.
"""

from __future__ import annotations

import time

from gateway.errors import NotFound
from gateway.proxy.access.auth import Key
from gateway.proxy.shared_memory import RESPONSES, SharedTable

_SHOWN_ID = 200


class Responses:
    """`table`: shared by several workers; None: of this process alone. The oldest entries are
    dropped."""

    def __init__(self, table: SharedTable | None = None) -> None:
        self._table = table or SharedTable(RESPONSES)

    def record(self, response: bytes, key: Key, replica: int) -> None:
        """Records a response. `replica`: the seed of the replica that made it."""
        self._table.store(response + key.digest, replica, int(time.monotonic()))

    def maker_of(self, response: str, key: Key) -> int:
        """The seed of the replica that made the response. Raises NotFound, also for a response of
        another key."""
        maker, made_at = self._table.get(response.encode(errors="replace") + key.digest)
        if not made_at:
            raise no_response(response)
        return maker


def no_response(response: str) -> NotFound:
    displayed = response if len(response) <= _SHOWN_ID else response[:_SHOWN_ID] + "..."
    return NotFound(
        f"The response {displayed} does not exist.",
        hint="Use the key that made the response. Responses end with their engine and the gateway.",
    )
