"""Versions of engines, drivers and releases: their order, and the forms that people write."""

from __future__ import annotations

import re
from functools import lru_cache

from packaging.version import InvalidVersion, Version

_FIRST_VERSION = Version("0.dev0")


@lru_cache(maxsize=1024)  # the same few versions are compared for every plan
def release(text: str) -> Version:
    """A version such as "0.5.10.post1" or "580.95.05" for comparison.

    A name such as "nightly" comes before all versions.
    """
    try:
        return Version(text)
    except InvalidVersion:
        return _FIRST_VERSION


_ENGINE = re.compile(r"([A-Za-z]+)(?:\s*(?:===?|=|@|:|-)\s*|\s+)v?(\d[\w.+]*)")


def engine_name(text: str) -> str:
    """`KIND==VERSION` of a name with a version; another text in small letters if it is one word."""
    match = _ENGINE.fullmatch(text.strip())
    if match is None:
        return text.strip().lower() if text.strip().isalpha() else text
    return f"{match[1].lower()}=={match[2]}"
