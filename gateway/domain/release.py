"""The order of versions: of engines, of drivers, of releases that mend a weakness. Pure."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

_BEFORE_ALL = Version("0.dev0")


def release(text: str) -> Version:
    """Where a version stands among others: "0.5.10.post1", "580.95.05". A name such as "nightly" stands before all of them."""
    try:
        return Version(text)
    except InvalidVersion:
        return _BEFORE_ALL
