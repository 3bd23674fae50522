"""Who used what: requests and tokens by day, key and model, counted as requests end and taken from
here to be kept.

Only what engines tell is counted. A stream tells its tokens where its client asked for that
(`stream_options.include_usage`), or the engine always does; an answer without is `untold`: its
tokens are nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from gateway.keys import UsageRow

# Of keys and models at a time, between two takes; of more the key is told as "other".
MOST_ROWS = 10_000
_DAY_S = 86400


class UsageCounter:
    """Touched by one event loop alone. The day is that of the take: a request pays for no clock."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], list[int]] = {}
        self._dated: dict[tuple[int, str, str], list[int]] = {}

    def count(
        self,
        key: str,
        model: str,
        prompt: int | None,
        completion: int | None,
        cached: int | None,
        good: bool,
    ) -> None:
        """A request that an engine has answered. good: with an answer that should tell its
        tokens."""
        row = self._rows.get((key, model))
        if row is None:
            about = (key, model) if len(self._rows) < MOST_ROWS else ("other", "")
            row = self._rows.setdefault(about, [0, 0, 0, 0, 0])
        row[0] += 1
        if prompt is None and completion is None:
            row[4] += good
            return
        row[1] += prompt or 0
        row[2] += completion or 0
        if cached is not None:
            row[3] += cached

    def take(self) -> tuple[UsageRow, ...]:
        """What was counted since the last take."""
        today = int(time.time()) // _DAY_S
        self.add(UsageRow(today, *about, *counts) for about, counts in self._rows.items())
        self._rows = {}
        dated, self._dated = self._dated, {}
        return tuple(UsageRow(*about, *counts) for about, counts in dated.items())

    def add(self, rows: Iterable[UsageRow]) -> None:
        """What another process has counted, or what was taken and could not be kept."""
        for row in rows:
            about = (row.day, row.key, row.model)
            if about not in self._dated and len(self._dated) >= MOST_ROWS:
                about = (row.day, "other", "")
            counts = self._dated.setdefault(about, [0, 0, 0, 0, 0])
            for place, count in enumerate(row[3:]):
                counts[place] += count
