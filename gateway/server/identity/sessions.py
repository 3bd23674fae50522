"""Sessions of people that signed in, by the digests of their cookies. A restart ends them all."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from gateway.keys import Scope, hash_key
from gateway.secret import Secret
from gateway.server.identity.person import Person

_MAX_SESSIONS = 4096


@dataclass(frozen=True, slots=True)
class Session:
    """A person that signed in.

    id_token: proof of the login for the provider's logout.
    """

    person: Person
    scopes: frozenset[Scope]
    ends_at: float
    id_token: Secret


class Sessions:
    """The sessions. The oldest are dropped."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}

    def open(self, session: Session) -> Secret:
        """The cookie of a new session."""
        now = time.time()
        self._sessions = {
            digest: session for digest, session in self._sessions.items() if session.ends_at > now
        }
        while len(self._sessions) >= _MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = Secret(secrets.token_urlsafe(48))
        self._sessions[hash_key(cookie)] = session
        return cookie

    def find(self, cookie: str) -> Session | None:
        session = self._sessions.get(hash_key(cookie.encode()))
        return session if session is not None and session.ends_at > time.time() else None

    def close(self, cookie: str) -> Session | None:
        """The session that is closed; None: there was none."""
        return self._sessions.pop(hash_key(cookie.encode()), None)
