"""Sizes of memory and durations, in words. Pure.

Durations are written by Ollama's rules: `5m`, `1h30m`, `300` (seconds), `0`; anything negative, as
`-1`, means for ever.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

MIB = 1024**2
GIB = 1024**3
FOR_EVER = -1.0
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LONGEST_S = 10 * 365 * 24 * 3600.0


def gib(count: int | None) -> str:
    """`21.90 GiB`; None is a size that could not be read."""
    return "unknown" if count is None else f"{count / GIB:.2f} GiB"


def duration(given: object) -> float:
    """Seconds, or FOR_EVER. Raises ValueError that says how a duration is written."""
    text = (
        str(given).strip().lower()
        if isinstance(given, str | int | float) and not isinstance(given, bool)
        else "?"
    )
    negative, text = text.startswith("-"), text.removeprefix("-")
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    else:
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError(
                "a duration is written like 5m, 1h30m or 300 (seconds); 0 is at once, -1 for ever"
            )
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return FOR_EVER if negative and seconds else min(seconds, _LONGEST_S)


def in_words(seconds: float) -> str:
    """As `duration` reads it."""
    if seconds < 0:
        return "for ever"
    whole = round(seconds)
    parts = [(whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s")]
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


Duration = Annotated[
    float,
    BeforeValidator(duration),
    Field(json_schema_extra={"examples": ["5m", "1h30m", 300, 0, -1]}),
]


def words(count: int) -> str:
    """`21.9 GiB`, or `3.0 MiB`: of files."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


class Progress(str):
    """How far something is, in words for people. `done` of `total` bytes are here; `rate`: how many
    come in a second, None: not known."""

    __slots__ = ("done", "rate", "total")

    done: int
    total: int
    rate: float | None

    def __new__(cls, words: str, done: int, total: int, rate: float | None = None) -> Progress:
        made = super().__new__(cls, words)
        made.done, made.total, made.rate = done, total, rate
        return made
