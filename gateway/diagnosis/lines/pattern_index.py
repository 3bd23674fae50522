"""An index of regular expressions by text that each of their matches contains. Pure.

A log line is searched for the few expressions that can match it, not for hundreds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

Row = TypeVar("Row")
# Four characters in Latin-1 as one number, which Python compares faster than text.
Gram = int
_GRAM_CHARACTERS = 4
_MIN_CHARACTERS = 2
_QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<least>\d*),?\d*\})[?+]?")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:P<\w+>|[a-z]*:)|(?!\?))")
# Lookarounds, references to groups and flags.
_ZERO_WIDTH = re.compile(r"\(\?(?:[=!]|<[=!]|P=\w+|[a-z]+(?=\)))")


class PatternIndex:
    """Finds those of several regular expressions that may match a text. Case never matters."""

    def __init__(self, patterns: Sequence[str]) -> None:
        demands = [needles(pattern) for pattern in patterns]
        self.unindexed = tuple(at for at, grams in enumerate(demands) if not grams)
        """Expressions that may match any text."""
        all_needles = [needle for grams in demands for needle in grams]
        usage = Counter(gram for needle in all_needles for gram in _grams(needle))
        index: dict[Gram, dict[str, list[int]]] = {}
        short_needles: dict[str, list[int]] = {}
        for at, grams in enumerate(demands):
            for needle in grams:
                if len(needle) < _GRAM_CHARACTERS:
                    short_needles.setdefault(needle, []).append(at)
                else:
                    rarest = min(_grams(needle), key=lambda part: (usage[part], part))
                    index.setdefault(rarest, {}).setdefault(needle, []).append(at)
        self._index, self._grams = index, frozenset(index)
        _shared_grams.add(self._grams)
        self._numbers, self._short_needles = short_needles, tuple(short_needles)
        # The reader asks several times about one line.
        self._last: tuple[str, Sequence[int]] = "", self.unindexed

    def possible_matches(self, text: str) -> Sequence[int]:
        """The numbers of the expressions that may match, in order."""
        if text != self._last[0]:
            self._last = text, self._find_patterns(*_shared_grams.read(text))
        return self._last[1]

    def _find_patterns(self, lower: str, grams: frozenset[Gram]) -> Sequence[int]:
        rows: set[int] = set()
        if not grams.isdisjoint(self._grams):
            for gram in self._grams & grams:
                for needle, patterns_of_needle in self._index[gram].items():
                    if needle in lower:
                        rows.update(patterns_of_needle)
        for needle in self._short_needles:
            if needle in lower:
                rows.update(self._numbers[needle])
        return sorted(rows.union(self.unindexed)) if rows else self.unindexed


class IndexedRows(Generic[Row]):
    """Rows with a regular expression each. Few of them are searched for in a text."""

    def __init__(self, rows: Iterable[tuple[Row, str]]) -> None:
        self._rows = [(row, re.compile(pattern)) for row, pattern in rows]
        self._index = PatternIndex([pattern.pattern for _, pattern in self._rows])

    def possible_rows(self, text: str) -> list[tuple[Row, re.Pattern[str]]]:
        """The rows whose expression may match, in order."""
        return [self._rows[at] for at in self._index.possible_matches(text)]

    def has_possible_rows(self, text: str) -> bool:
        """Whether a text has a part that a row asks for. Rows that ask for none do not count."""
        return self._index.possible_matches(text) is not self._index.unindexed


class IndexedPattern:
    """A regular expression of many alternatives, which most texts cannot match."""

    def __init__(self, pattern: str, flags: re.RegexFlag = re.NOFLAG) -> None:
        self._pattern = re.compile(pattern, flags)
        self._index = PatternIndex([pattern])

    def search(self, text: str) -> re.Match[str] | None:
        """The first match in a text."""
        return self._pattern.search(text) if self._index.possible_matches(text) else None


class _AskedGrams:
    """The grams of all indexes. Several indexes are asked about one line and about its message, so
    the line is read once for all of them."""

    def __init__(self) -> None:
        self._indexed_grams: frozenset[Gram] = frozenset()
        self._text = ""
        self._grams: frozenset[Gram] = frozenset()
        self._texts: dict[str, str] = {}

    def add(self, rows: frozenset[Gram]) -> None:
        self._indexed_grams |= rows
        self._text, self._grams = "", frozenset()
        self._texts.clear()

    def read(self, text: str) -> tuple[str, frozenset[Gram]]:
        """The text in small letters, and its grams that an index has, with those of the last text
        around it."""
        lower = self._texts.get(text)
        if lower is None:
            lower = text.lower()
            if lower not in self._text:
                self._text = lower
                self._grams = frozenset().union(
                    *map(self._indexed_grams.intersection, _windows(lower))
                )
                self._texts.clear()
            self._texts[text] = lower
        return lower, self._grams


_shared_grams = _AskedGrams()


def _windows(text: str) -> list[memoryview]:
    """The parts of a text that are four characters long, by the place of the first."""
    view = memoryview(text.encode("latin-1", "replace"))
    return [
        view[at : at + (len(view) - at) // _GRAM_CHARACTERS * _GRAM_CHARACTERS].cast("I")
        for at in range(min(_GRAM_CHARACTERS, len(view)))
    ]


def _grams(text: str) -> frozenset[Gram]:
    return frozenset().union(*_windows(text))


def needles(pattern: str) -> tuple[str, ...]:
    """Small-letter texts of which each match of an expression contains at least one.

    Empty where no text of two characters is certain.
    """
    texts, _ = _alternatives(pattern, 0)
    return tuple(texts)


def _alternatives(pattern: str, at: int) -> tuple[list[str], int]:
    """The needles of alternatives from a place on, and the place of their end."""
    branches: list[list[str]] = []
    while True:
        texts, at = _sequence(pattern, at)
        branches.append(texts)
        if pattern[at : at + 1] != "|":
            break
        at += 1
    certain = all(branches)
    return ([needle for texts in branches for needle in texts] if certain else []), at


def _sequence(pattern: str, at: int) -> tuple[list[str], int]:
    """The needles of one alternative, and the place of its end."""
    sequences: list[list[str]] = []
    run = ""
    while at < len(pattern) and pattern[at] not in "|)":
        character, texts, at = _atom(pattern, at)
        quantifier = _QUANTIFIER.match(pattern, at)
        is_optional = False
        if quantifier is not None:
            at = quantifier.end()
            is_optional = quantifier[0][0] in "*?" or quantifier["least"] in ("", "0")
        if character and not is_optional:
            run += character
        if texts and not is_optional:
            sequences.append(texts)
        if not character or quantifier is not None:
            sequences.append([run])
            run = ""
    sequences.append([run])
    certain = [texts for texts in sequences if min(map(len, texts)) >= _MIN_CHARACTERS]
    return max(certain, key=lambda texts: min(map(len, texts)), default=[]), at


def _atom(pattern: str, at: int) -> tuple[str, list[str], int]:
    """One atom of an expression: its character if it is certain, the needles of a group, and the
    place of its end."""
    if pattern[at] == "\\":
        escaped = pattern[at + 1]
        return ("" if escaped.isalnum() else escaped.lower()), [], at + 2
    if pattern[at] == "[" and (char_class := _CLASS.match(pattern, at)):
        return "", [], char_class.end()
    zero_width = _ZERO_WIDTH.match(pattern, at)
    if group := zero_width or _GROUP.match(pattern, at):
        texts, end = _alternatives(pattern, group.end())
        return "", ([] if zero_width else texts), end + 1
    return ("" if pattern[at] in ".^$" else pattern[at].lower()), [], at + 1
