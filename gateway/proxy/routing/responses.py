"""Owners of the responses of `/v1/responses`: key and replica. And the room for them in engines.

Only the replica that made a response can continue it, and only for the same key.

Engines keep responses in memory and never drop one (vLLM 0.33.0: `response_store` in
entrypoints/openai/responses/serving.py; SGLang 0.5.23: the same in
entrypoints/openai/serving_responses.py). So the gateway counts the answers that each engine keeps.
"""

from __future__ import annotations

import time

from gateway.errors import NotFound
from gateway.proxy.access.auth import Key
from gateway.proxy.shared_memory import RESPONSES, SharedTable

_SHOWN_ID = 200
# Memory of an engine for responses.
STORE_BYTES = 256 * 1024**2
# Memory of a response in addition to its texts, rounded up: some dozens of Python objects.
_OBJECTS_BYTES = 8 * 1024
# An event stream has the text once in events of some 200 bytes a token, and twice as a whole.
_BYTES_OF_EVENTS = 8
_KIB = 1024


class Responses:
    """Remembers the key and the replica of each response.

    `table`: shared by several workers; None: only of this process. The oldest entries are
    dropped. Two workers that count at the same time may lose a response of the smaller one.
    """

    def __init__(self, table: SharedTable | None = None) -> None:
        self._table = table or SharedTable(RESPONSES)

    def record(self, response: bytes, key: Key, replica: int) -> None:
        """Record a response. `replica`: the seed of the replica that made it."""
        self._table.store(response + key.digest, replica, _seconds())

    def maker_of(self, response: str, key: Key) -> int:
        """The seed of the replica that made the response. Raises NotFound, also for a response of
        another key."""
        maker, made_at = self._table.get(response.encode(errors="replace") + key.digest)
        if not made_at:
            raise missing_response_error(response)
        return maker

    def add(self, replica: int, request_bytes: int, answer_bytes: int, *, is_stream: bool) -> None:
        """Count the memory that the replica's engine takes for a response."""
        answer = answer_bytes // _BYTES_OF_EVENTS if is_stream else answer_bytes
        kibibytes = -(-(_OBJECTS_BYTES + request_bytes + answer) // _KIB)
        self._table.store(_memory_key(replica), self._kept_kib(replica) + kibibytes, _seconds())

    def is_full(self, replica: int) -> bool:
        """Whether the replica's engine keeps as many responses as it may."""
        return self._kept_kib(replica) * _KIB >= STORE_BYTES

    def _kept_kib(self, replica: int) -> int:
        return self._table.get(_memory_key(replica))[0]


def _memory_key(replica: int) -> bytes:
    return b"room of %d" % replica


def _seconds() -> int:
    return int(time.monotonic())


def missing_response_error(response: str) -> NotFound:
    displayed = response if len(response) <= _SHOWN_ID else response[:_SHOWN_ID] + "..."
    return NotFound(
        f"The response {displayed} does not exist.",
        hint=(
            "Use the key that made the response. Responses end with their engine and the gateway,"
            ' and those with `"store": false` are not kept.'
        ),
    )
