"""Free pages that the allocator keeps, of the start and of each thread."""

from __future__ import annotations

import contextlib
import ctypes
import gc

# The option of mallopt in glibc (malloc.h).
_ARENA_MAX = -8


def share_arena() -> None:
    """Let all threads allocate from one arena: each would keep up to two MiB of free memory for
    itself. Threads that exist keep their own."""
    with contextlib.suppress(AttributeError, OSError):  # a C library other than glibc
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def trim_memory() -> None:
    """Free unreachable objects, and empty pages of the allocator."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)
