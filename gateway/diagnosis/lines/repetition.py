"""Lines that a program repeats: another copy of what was read often teaches nothing. Pure."""

from __future__ import annotations

from collections import deque

# More than the ranks of any engine that print the same line.
_OFTEN = 256
# Distinct lines that are counted.
_MOST = 4096
# Copies that are read after all once another line follows: what stands before it may belong to it.
_BEFORE = 16
# Numbers, and the identifiers of requests, are no difference.
_DIGITS_EQUAL = bytes.maketrans(b"123456789abcdefABCDEF", b"0" * 21)

NumberedLine = tuple[int, bytes]


class Repetition:
    """Counts lines, and keeps back those of which many copies were read.

    After each other line one copy of each is read again, as the state of the reader has changed.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._read: set[bytes] = set()
        self._recent_lines: deque[NumberedLine] = deque(maxlen=_BEFORE)

    def admit(self, number: int, raw: bytes) -> tuple[NumberedLine, ...]:
        """The lines to read now: the line itself, after the last copies that were kept back;
        none if it is kept back."""
        form = raw.translate(_DIGITS_EQUAL)
        count = self._counts.get(form, 0)
        if count < _OFTEN:
            if len(self._counts) >= _MOST:
                self._counts.clear()
            self._counts[form] = count + 1
            self._read.clear()
        elif form in self._read:
            self._recent_lines.append((number, raw))
            return ()
        else:
            self._read.add(form)
        if not self._recent_lines:
            return ((number, raw),)
        several = (*self._recent_lines, (number, raw))
        self._recent_lines.clear()
        return several
