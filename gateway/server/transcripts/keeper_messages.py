"""Messages between the gateway and the keeper of its transcripts: lines of JSON."""

from __future__ import annotations

import msgspec


class KeeperSetup(msgspec.Struct, frozen=True):
    """The work of the keeper.

    socket: path at which it takes copies.
    keys: those of the operator, the first for new transcripts.
    rules: regular expressions of redaction, one a line.
    """

    socket: str
    folder: str
    keys: tuple[str, ...]
    rules: str
    max_bytes: int
    keep_s: float


class KeeperReport(msgspec.Struct, frozen=True):
    """Counts since the keeper began. problem: why nothing is written; empty: all is well."""

    written_count: int = 0
    dropped_count: int = 0
    problem: str = ""
    cure: str = ""
