"""The limit on open files: raised for the gateway, as before for its engines."""

from __future__ import annotations

import resource

_started_with: int | None = None


def raise_fd_limit(files: int) -> int:
    """Raise the soft limit of this process to `files`, as far as the system allows.

    Never lowers the limit. Returns it.
    """
    global _started_with  # noqa: PLW0603 - the limit is one of the whole process
    soft, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _started_with is None:
        _started_with = soft
    if soft == resource.RLIM_INFINITY:
        return files
    allowed_files = max(
        soft, files if hard_limit == resource.RLIM_INFINITY else min(files, hard_limit)
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed_files, hard_limit))
    return allowed_files


def restore_fd_limit(pid: int) -> None:
    """Give a child the limit from before `raise_fd_limit`. The child's open files stay open."""
    if _started_with is None:
        return
    try:
        hard_limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_started_with, hard_limit))
    except OSError:
        # The child has ended or belongs to another user. The higher limit does no harm.
        return
