"""Sizes of memory in words. Pure."""

from __future__ import annotations

MIB = 1024**2
GIB = 1024**3


def gib(count: int | None) -> str:
    """`21.90 GiB`; None is a size that could not be read."""
    return "unknown" if count is None else f"{count / GIB:.2f} GiB"
