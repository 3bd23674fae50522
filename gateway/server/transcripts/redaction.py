"""The operator's rules of redaction, with a bound of time that no text can exceed.

`re` looks for signals while it matches, so an alarm ends an expression that backtracks for ever.
Signals reach the main thread alone, where the keeper does all of its work.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARK = "[redacted]"
LIMIT_S = 0.5


class RedactionTimeoutError(Exception):
    """The rules took longer than their bound."""


class Redactor:
    """Removes the matches of the rules."""

    def __init__(self, rules: str) -> None:
        """rules: regular expressions, one a line."""
        self._patterns = [re.compile(line) for line in rules.splitlines() if line]

    def redact(self, value: Any) -> Any:
        """The value of JSON without matches, also in names of fields. Raises
        RedactionTimeoutError."""
        with _limit_time(LIMIT_S):
            return self._redact(value)

    def _redact(self, value: Any) -> Any:
        if isinstance(value, str):
            for pattern in self._patterns:
                value = pattern.sub(MARK, value)
            return value
        if isinstance(value, dict):
            return {self._redact(name): self._redact(member) for name, member in value.items()}
        return [self._redact(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise RedactionTimeoutError

    former_handler = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former_handler)
