"""Refusals of the start path that no configuration leads to, by a reading of the engine's code.

Each row of reviewed_refusals.txt names a `raise` by its function and words, with its reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class ReviewedRefusal(NamedTuple):
    """kind: a member of start_path.KINDS. reason: the condition that no configuration meets."""

    file: str
    function: str
    words: str
    kind: str
    reason: str

    def names(self, file: str, function: str, text: str) -> bool:
        """Whether the row is about this statement."""
        return (self.file, self.function) == (file, function) and self.words in text


def reviewed_refusals(engine: str) -> tuple[ReviewedRefusal, ...]:
    section = Path(__file__).with_suffix(".txt").read_text().split(f"[{engine}]\n")[1]
    rows = (line.split(" | ") for line in section.split("\n[")[0].splitlines() if line)
    return tuple(ReviewedRefusal(*place.split(" "), *rest) for place, *rest in rows)
