"""The order of versions: of engines, of drivers, of releases that mend a weakness. Pure."""

from __future__ import annotations

from functools import lru_cache

from packaging.version import InvalidVersion, Version

_BEFORE_ALL = Version("0.dev0")


@lru_cache(maxsize=1024)  # the same few versions are compared for every plan
def release(text: str) -> Version:
    """Where a version stands among others: "0.5.10.post1", "580.95.05". A name such as "nightly"
    stands before all of them."""
    try:
        return Version(text)
    except InvalidVersion:
        return _BEFORE_ALL
