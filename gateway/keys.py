"""Keys of callers: their scopes, usage and digests.

A key is shown once, when it is made, and stored nowhere.

scope       allows
inference   the data plane: /v1/... and other paths of engines
read        the gateway's own state: metrics, models, plans, facts, hardware
admin       everything

class         priority
interactive   -100
normal        0
batch         100

A smaller number goes first, as at vLLM. Numbers between the classes are classes too.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, NamedTuple, get_args

from gateway.secret import Secret

Scope = Literal["inference", "read", "admin"]
SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
# The names of the keys that are settings.
SETTINGS_KEYS = ("admin", "api")
# Begin of the names of people, which no created key has.
PERSON_PREFIX = "user:"
PriorityClass = Literal["interactive", "normal", "batch"]
PRIORITIES: dict[PriorityClass, int] = {"interactive": -100, "normal": 0, "batch": 100}
FIRST_PRIORITY = -1000
LAST_PRIORITY = 1000


class UsageRow(NamedTuple):
    """The usage of a key on one day.

    day: the day in UTC, counted from 1970-01-01.
    cached_tokens: prompt tokens from a cache, where engines report them.
    requests_without_usage: requests whose prompt no engine counted.
    estimated_tokens: missing tokens of these requests and their answers, from their bytes; in no
    other sum.
    """

    day: int
    key: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    requests_without_usage: int
    estimated_tokens: int


def priority_of(class_: PriorityClass | int) -> int:
    """The number of a class."""
    return class_ if isinstance(class_, int) else PRIORITIES[class_]


def class_name(priority: int) -> str:
    """The name of a class, or its number without one."""
    return next((name for name, number in PRIORITIES.items() if number == priority), str(priority))


def new_key() -> Secret:
    """A key of 256 random bits."""
    return Secret(f"fs-{secrets.token_urlsafe(32)}")


def hash_key(key: Secret | bytes) -> bytes:
    # A key from the environment may hold bytes that are not UTF-8, and clients send these bytes.
    return hashlib.sha256(key if isinstance(key, bytes) else key.reveal_bytes()).digest()
