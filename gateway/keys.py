"""Keys of callers: what they open, what was used with them, and the digest by which each is known.
    A key is shown once, when it is made, and kept nowhere.

scope       opens
inference   the data plane: /v1/... and what else engines answer
read        what the gateway tells of itself: metrics, models, plans, facts, hardware
admin       everything
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, NamedTuple, get_args

Scope = Literal["inference", "read", "admin"]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
# The names of the keys that are settings.
FROM_SETTINGS = ("admin", "api")


class UsageRow(NamedTuple):
    """What was used with a key. day: of UTC, counted from 1970-01-01. cached_tokens: of the prompt
        tokens those that engines had in a cache, where they
    tell. untold_requests: whose tokens are not known."""

    day: int
    key: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    untold_requests: int


def new_key() -> str:
    """256 random bits."""
    return f"fs-{secrets.token_urlsafe(32)}"


def digest_of(key: str | bytes) -> bytes:
    # surrogateescape: a key from the environment may hold bytes that are not UTF-8, and clients
    # send just those bytes.
    return hashlib.sha256(
        key.encode(errors="surrogateescape") if isinstance(key, str) else key
    ).digest()
