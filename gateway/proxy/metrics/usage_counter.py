"""Usage by day, key and model: requests and tokens, counted when requests end.

A stream reports its tokens if its client asks (`stream_options.include_usage`) or the engine always
does. Answers that do not report the prompt count as `requests_without_usage`. Missing tokens are
estimated from bytes, in a column of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from gateway.keys import UsageRow

# Most pairs of key and model between two takes; further ones are counted as "other".
MAX_ROWS = 10_000
_DAY_S = 86400


class UsageCounter:
    """Counts requests and tokens by day, key and model.

    Used by one event loop only. The day is that of the take, so that a request reads no
    clock.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[int]] = {}
        self._dated_counts: dict[tuple[int, str, str], list[int]] = {}

    def count(
        self,
        key: str,
        model: str,
        prompt: int | None,
        completion: int | None,
        cached_tokens: int | None,
        estimated: int | None,
    ) -> None:
        """Count a request that an engine answered. `estimated`: tokens that the answer does not
        report, where it does not report those of the prompt; None: it has none to report."""
        row = self._rows.get((key, model))
        if row is None:
            row_key = (key, model) if len(self._rows) < MAX_ROWS else ("other", "")
            row = self._rows.setdefault(row_key, [0, 0, 0, 0, 0, 0])
        row[0] += 1
        if prompt is None and estimated is not None:
            row[4] += 1
            row[5] += estimated
        row[1] += prompt or 0
        row[2] += completion or 0
        if cached_tokens is not None:
            row[3] += cached_tokens

    def drain(self) -> tuple[UsageRow, ...]:
        """The counts since the last take."""
        today = int(time.time()) // _DAY_S
        self.add(UsageRow(today, *row_key, *counts) for row_key, counts in self._rows.items())
        self._rows = {}
        dated_counts = self._dated_counts
        self._dated_counts = {}
        return tuple(UsageRow(*row_key, *counts) for row_key, counts in dated_counts.items())

    def add(self, rows: Iterable[UsageRow]) -> None:
        """Add counts of another process, or counts that could not be stored."""
        for row in rows:
            row_key = (row.day, row.key, row.model)
            if row_key not in self._dated_counts and len(self._dated_counts) >= MAX_ROWS:
                row_key = (row.day, "other", "")
            counts = self._dated_counts.setdefault(row_key, [0, 0, 0, 0, 0, 0])
            for position, count in enumerate(row[3:]):
                counts[position] += count
