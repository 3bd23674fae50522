"""Logins that people have begun and not ended, each bound to one browser."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass

from gateway.errors import BadRequest
from gateway.keys import hash_key
from gateway.secret import Secret

LOGIN_S = 600.0
_MAX_LOGINS = 10_000


@dataclass(frozen=True, slots=True)
class LoginAttempt:
    """The secrets of one login.

    state: text that the answer repeats.
    nonce: text that the ID token repeats.
    verifier: secret of PKCE (RFC 7636).
    """

    state: Secret
    nonce: Secret
    verifier: Secret
    cookie_digest: bytes
    ends_at: float


class LoginAttempts:
    """The attempts by their state. Each is taken once; the oldest are dropped."""

    def __init__(self) -> None:
        self._attempts: dict[bytes, LoginAttempt] = {}

    def create(self) -> tuple[LoginAttempt, Secret]:
        """An attempt, and the cookie of its browser."""
        now = time.monotonic()
        # Attempts end in the order of their begin, so no request looks at all of them.
        while self._attempts:
            digest = next(iter(self._attempts))
            if len(self._attempts) < _MAX_LOGINS and self._attempts[digest].ends_at > now:
                break
            del self._attempts[digest]
        state, nonce, verifier, cookie = (Secret(secrets.token_urlsafe(48)) for _ in range(4))
        attempt = LoginAttempt(state, nonce, verifier, hash_key(cookie), now + LOGIN_S)
        self._attempts[hash_key(state)] = attempt
        return attempt, cookie

    def pop(self, state: str, cookie: str) -> LoginAttempt:
        """The attempt with that state, of that browser. Raises BadRequest."""
        attempt = self._attempts.pop(hash_key(state.encode()), None)
        if (
            attempt is None
            or attempt.ends_at <= time.monotonic()
            or not hmac.compare_digest(attempt.cookie_digest, hash_key(cookie.encode()))
        ):
            raise BadRequest(
                "This login was not begun in this browser, or is over.",
                hint="Open the page of the gateway and sign in once more.",
            )
        return attempt
