"""Counts, sizes of memory and durations, in words. Pure.

Numbers of tokens may end in `k` (1,024) or `m` (1,048,576), as models' names give their contexts.
Durations follow Ollama's rules: `5m`, `1h30m`, `300` (seconds), `0`. Any negative one means for
ever.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

MIB = 1024**2
GIB = 1024**3
ENDLESS_DURATION = -1.0
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_TOKENS = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([km]?)")
_THOUSANDS = {"": 1, "k": 1024, "m": 1024**2}
_MAX_DURATION_S = 10 * 365 * 24 * 3600.0


def gib(count: int | None) -> str:
    """`21.90 GiB`; None is a size that could not be read."""
    return "unknown" if count is None else f"{count / GIB:.2f} GiB"


def day_text(time_s: float | None) -> str:
    """The day of Unix seconds, in UTC; None is a time that was not recorded."""
    if time_s is None:
        return "an unknown day"
    return datetime.fromtimestamp(time_s, UTC).date().isoformat()


def duration(value: object) -> float:
    """Seconds, or ENDLESS_DURATION. Raises ValueError with the forms of a duration."""
    text = (
        str(value).strip().lower()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else "?"
    )
    negative = text.startswith("-")
    text = text.removeprefix("-")
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    else:
        amounts = _PART.findall(text)
        if not amounts or "".join(number + unit for number, unit in amounts) != text:
            raise ValueError(
                "a duration looks like 5m, 1h30m or 300 (seconds); 0: immediately, -1: for ever"
            )
        seconds = sum(float(number) * _UNITS[unit] for number, unit in amounts)
    return ENDLESS_DURATION if negative and seconds else min(seconds, _MAX_DURATION_S)


def plural(count: int, noun: str) -> str:
    """`1 model`, `2 models`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def token_count(value: object) -> int:
    """The tokens of a number or of `32k` (32,768) or `1m`. Raises ValueError with the forms."""
    text = str(value).strip().lower().replace(",", "").replace("_", "")
    text = text.removesuffix("tokens").rstrip()
    match = _TOKENS.fullmatch(text) if not isinstance(value, bool) else None
    tokens = float(match[1]) * _THOUSANDS[match[2]] if match is not None else 0
    if tokens < 1 or tokens % 1:
        raise ValueError("a number of tokens looks like 8192, 32k (32,768) or 1m, and is above 0")
    return int(tokens)


def duration_text(seconds: float) -> str:
    """A duration in the form that `duration` reads."""
    if seconds < 0:
        return "for ever"
    total_s = round(seconds)
    amounts = [(total_s // 3600, "h"), (total_s % 3600 // 60, "m"), (total_s % 60, "s")]
    return "".join(f"{count}{unit}" for count, unit in amounts if count) or "0s"


def format_bytes(count: int) -> str:
    """The size of a file: `21.9 GiB`, `3.0 MiB`, `1.5 KiB` or `12 bytes`."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    if count >= MIB // 20:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count >= 1024 else plural(count, "byte")


class TransferProgress(str):
    """The progress of a transfer in words. rate: bytes per second; None: not known."""

    __slots__ = ("bytes_done", "rate", "total")

    bytes_done: int
    total: int
    rate: float | None

    def __new__(
        cls, words: str, bytes_done: int, total: int, rate: float | None = None
    ) -> TransferProgress:
        progress = super().__new__(cls, words)
        progress.bytes_done = bytes_done
        progress.total = total
        progress.rate = rate
        return progress


def sentence(text: str) -> str:
    """The words as a sentence. The name of a file, flag or variable at its start stays as it is."""
    first = text.partition(" ")[0]
    is_name = first.startswith("-") or "." in first.rstrip(".,:;") or "_" in first
    return f"{text if is_name else text[:1].upper() + text[1:]}".rstrip(".") + "."
