"""Lines that a program repeats, or floods its log with: another one teaches nothing. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# More than the ranks of any engine that print the same line.
_MAX_COPIES = 256
# Distinct lines that are counted.
_MAX_FORMS = 4096
# Copies that are read after all once another line follows: the lines before it may belong to it.
_CONTEXT_LINES = 16
# More distinct lines than any start prints as errors. Beyond them a line must be able to prove
# more.
_FLOOD = 2048
# Numbers, and the identifiers of requests, make no difference.
_DIGIT_TABLE = bytes.maketrans(b"123456789abcdefABCDEF", b"0" * 21)

NumberedLine = tuple[int, bytes]


class RepetitionFilter:
    """Counts lines, and keeps back those of which many copies were read.

    After each other line one copy of each is read again, as the state of the reader has changed.
    can_prove: whether a line may prove anything. In a flood of distinct lines others are dropped.
    """

    def __init__(self, can_prove: Callable[[bytes], bool] = lambda _: True) -> None:
        self._tells = can_prove
        self._distinct = 0
        self._counts: dict[bytes, int] = {}
        self._read: set[bytes] = set()
        self._recent_lines: deque[NumberedLine] = deque(maxlen=_CONTEXT_LINES)

    @property
    def is_flood(self) -> bool:
        """Whether enough distinct lines were read that the next ones must prove more."""
        return self._distinct >= _FLOOD

    def lines_to_read(
        self, number: int, raw: bytes, *, is_continuation: bool = False
    ) -> tuple[NumberedLine, ...]:
        """The lines to read now: the line itself, after the last ones that were kept back; none if
        it is kept back. is_continuation: the line is a part of the lines before."""
        if self.is_flood and not is_continuation and not self._tells(raw):
            return ()
        form = raw.translate(_DIGIT_TABLE)
        count = self._counts.get(form, 0)
        if count < _MAX_COPIES:
            if len(self._counts) >= _MAX_FORMS:
                self._counts.clear()
            self._counts[form] = count + 1
            self._distinct += not count
            self._read.clear()
        elif form in self._read:
            self._recent_lines.append((number, raw))
            return ()
        else:
            self._read.add(form)
        if not self._recent_lines:
            return ((number, raw),)
        recent_lines = (*self._recent_lines, (number, raw))
        self._recent_lines.clear()
        return recent_lines
