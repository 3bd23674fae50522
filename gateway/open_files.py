"""The limit on open files: the gateway raises its own, and gives engines the one that it was
started with."""

from __future__ import annotations

import resource

_started_with: int | None = None


def allow(wanted: int) -> int:
    """Raise the soft limit of this process to `wanted` files, as far as the system lets us, and
    never lower it. Returns the limit."""
    global _started_with  # noqa: PLW0603 - the limit is one of the whole process
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _started_with is None:
        _started_with = soft
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def give_back(pid: int) -> None:
    """A child gets the limit that this process was started with, where `allow` changed it. What it
    has open stays open."""
    if _started_with is None:
        return
    try:
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_started_with, hard))
    except OSError:
        # It is gone, or somebody else's: it works with our limit as well, which is not lower.
        return
