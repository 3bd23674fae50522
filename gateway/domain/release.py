"""The order of versions: of engines, drivers, and releases that fix a weakness. Pure."""

from __future__ import annotations

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
