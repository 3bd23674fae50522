"""ID tokens of logins at this gateway. None is a bearer token, as a logout has it in an address."""

from __future__ import annotations

import time

from gateway.errors import Unauthorized
from gateway.keys import hash_key
from gateway.secret import Secret

_MAX_TOKENS = 16_384


class LoginTokens:
    """The tokens by the digests of their signed parts. A signature can be written in several forms.

    A restart forgets them. The oldest are dropped.
    """

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}

    def add(self, token: Secret, ends_at: float) -> None:
        """Note a token until its end in Unix time."""
        now = time.time()
        self._ends = {digest: end for digest, end in self._ends.items() if end > now}
        while len(self._ends) >= _MAX_TOKENS:
            del self._ends[next(iter(self._ends))]
        self._ends[_digest(token.reveal())] = ends_at

    def check(self, token: str) -> None:
        """Raise Unauthorized for the token of a login."""
        if _digest(token) in self._ends:
            raise Unauthorized(
                "The token proves a login at the page, and opens nothing else.",
                hint="Get a token of the provider for this call, or send a key.",
            )


def _digest(token: str) -> bytes:
    return hash_key(token.rpartition(".")[0].encode())
