"""Sizes of the machine's memory, as Linux reports them."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def memory_sizes(text: str) -> dict[str, int]:
    """The sizes of /proc/meminfo in bytes, by name."""
    rows = (line.split() for line in text.splitlines())
    return {
        row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"
    }
