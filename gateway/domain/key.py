"""Keys of callers: what each may do, what was used with it, and the digest by which it is known. A key is shown once, when it is made, and kept nowhere.

scope       opens
inference   the data plane: /v1/... and what else engines answer
read        what the gateway tells of itself: metrics, models, plans, facts, hardware
admin       everything
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import ConfigDict, Field

from gateway.domain.value import Form, Value
from gateway.domain.wish import ModelName

Scope = Literal["inference", "read", "admin"]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
# The names of the keys that are settings.
FROM_SETTINGS = ("admin", "api")

_MOST = 10**9


class Grant(Value):
    """What the key of that name may do. None: no limit."""

    # Built now: FastAPI looks at the model of a body before anything is validated with it.
    model_config = ConfigDict(defer_build=False)

    name: Annotated[
        str,
        Form(
            r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
            "a name has up to 64 letters, digits, `_`, `-` and `.`, and begins with a letter, a digit or `_`",
        ),
    ] = Field(description="by which the key is listed and revoked")
    scopes: tuple[Scope, ...] = Field(("inference",), min_length=1, max_length=3)
    models: tuple[ModelName, ...] | None = Field(
        None, min_length=1, max_length=1000, description="the models it may ask; None: all"
    )
    requests_per_minute: int | None = Field(None, ge=1, le=_MOST)
    tokens_per_minute: int | None = Field(None, ge=1, le=_MOST, description="of prompts and answers together")
    max_in_flight: int | None = Field(None, ge=1, le=_MOST, description="requests at once")


class UsageRow(NamedTuple):
    """What was used with a key. day: of UTC, counted from 1970-01-01. cached_tokens: of the prompt tokens those that engines had in a cache, where they tell. untold_requests: whose tokens are not known."""

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
    # surrogateescape: a key from the environment may hold bytes that are not UTF-8, and clients send just those bytes.
    return hashlib.sha256(key.encode(errors="surrogateescape") if isinstance(key, str) else key).digest()
