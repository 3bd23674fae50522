"""The priority of a request: the class of its key, or a lower one that its header asks for."""

from __future__ import annotations

import re

from gateway.errors import BadRequest
from gateway.keys import FIRST_PRIORITY, LAST_PRIORITY, PRIORITIES
from gateway.proxy.access.auth import Key

HEADER = b"x-fitserve-priority"
_CLASS_NUMBERS = {name.encode(): number for name, number in PRIORITIES.items()}
_NUMBER = re.compile(rb"-?[0-9]{1,4}").fullmatch


def request_priority(value: bytes | None, key: Key) -> int:
    """The priority of a request with this header. A smaller number goes first, and no header
    raises a request above its key. Raises BadRequest."""
    if value is None:
        return key.priority
    number = _CLASS_NUMBERS.get(value.strip().lower())
    if number is None and _NUMBER(value.strip()):
        number = int(value)
    if number is None or not FIRST_PRIORITY <= number <= LAST_PRIORITY:
        raise BadRequest(
            f"The header {HEADER.decode()} is not a priority.",
            hint=f"Send {', '.join(PRIORITIES)}, or a number from {FIRST_PRIORITY} (first) to"
            f" {LAST_PRIORITY}.",
        )
    return max(number, key.priority)
