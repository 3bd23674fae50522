"""Limits of memory, files and processor time of processes that read foreign models."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

from gateway.domain.units import MIB
from gateway.planner.service.messages import MEMORY_BYTES

# Files in the cache of the Hub's library are smaller by the limits of gateway.models.catalog.
_FILE_BYTES = 256 * MIB


def limit_process(processor_s: int) -> None:
    """Limit this process, and let the kernel end it first where memory is short."""
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    limit_processor_time(processor_s)


def limit_processor_time(seconds: int) -> None:
    """The kernel ends the process after this many seconds of processor time from now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)


def _limit(kind: int, maximum: int) -> None:
    """Set a limit, unless the gateway itself has a lower one."""
    hard_limit = resource.getrlimit(kind)[1]
    soft = maximum if hard_limit == resource.RLIM_INFINITY else min(maximum, hard_limit)
    resource.setrlimit(kind, (soft, hard_limit))
