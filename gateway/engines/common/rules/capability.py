"""Compute capabilities of GPUs, as rules name them: "9.0", or "12.*" for a family. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=64)
def numbers(capability: str) -> tuple[int, int] | None:
    """Major and minor number; None: the text is not a compute capability."""
    major, _, minor = capability.partition(".")
    return (
        (int(major), int(minor))
        if (major + minor).isascii() and major.isdigit() and minor.isdigit()
        else None
    )


def of_family(capability: str, wanted: Iterable[str]) -> bool:
    return any(capability == item or item == f"{capability.partition('.')[0]}.*" for item in wanted)
