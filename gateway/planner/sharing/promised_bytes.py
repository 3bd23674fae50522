"""The bytes of devices that engines were promised, together. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def sum_promises(promises: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The sum of bytes by device."""
    promised_bytes: dict[str, int] = {}
    for uuid, count in promises:
        promised_bytes[uuid] = promised_bytes.get(uuid, 0) + count
    return promised_bytes
