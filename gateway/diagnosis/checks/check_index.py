"""The place of an engine's source that raised a failure, by its traceback or its message. Pure.

A frame names file and function; the message decides between the places of a function. Without a
frame the message alone has to hold enough constant words.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from gateway.diagnosis.checks.check_site import HOLE, CheckBook, CheckCondition, CheckSite
from gateway.domain.release import release

if TYPE_CHECKING:
    from gateway.diagnosis.structure import ExceptionShape

_FRAME = re.compile(r"(?:.*/|\A)(?P<path>(?:vllm|sglang)/.+\.py):(?P<name>.+)\Z")
# A raise may stand in a function that the one with the check calls.
_INNER_FRAMES = 3
_WORD = re.compile(r"[A-Za-z]{4,}")
_IDENTIFIER = re.compile(r"[a-z]\w*[a-z0-9]", re.IGNORECASE)
# Constant words that a message without a frame must have.
_MIN_WORDS = 4
_MAX_MESSAGE_CHARACTERS = 2000
# Places that one word may lead to: the rarest word of a text is in few.
_MAX_PLACES = 60
_MAX_SEARCHES = 64
# Exceptions that repeat the message of another one.
_WRAPPERS = frozenset({"", "Exception", "RuntimeError", "ValidationError"})


class CheckMatch(NamedTuple):
    """A place that raised a failure.

    is_sure: its message is that of the failure, and not only its function.
    is_own_version: the engine's version has it, as far as the version is known.
    """

    site: CheckSite
    is_sure: bool
    is_own_version: bool = True

    @property
    def has_settings(self) -> bool:
        """Whether the place reads more than the platform, which most code asks for."""
        names = (condition.name for condition in self.site.conditions)
        return any(name == "gpu.capability" or not name.startswith("gpu.") for name in names)


class _CheckTables(NamedTuple):
    """A book with its places by function, and by the rarest word of their message."""

    book: CheckBook
    functions: dict[tuple[str, str], list[int]]
    word_places: dict[str, list[int]]


class CheckIndex:
    """The places of a kind of engine, by function and by message. read: the book of all.

    The tables take some MB and are read by the first search, until they are released. Searches and
    releases may come from several threads.
    """

    def __init__(self, read: Callable[[], CheckBook] = lambda: CheckBook((), ())) -> None:
        self._read = read
        self._tables: _CheckTables | None = None
        self._find = lru_cache(_MAX_SEARCHES)(self._search)

    def release(self) -> None:
        """Free the tables. The next new search reads them once more."""
        self._tables = None

    def _open_tables(self) -> _CheckTables:
        tables = self._tables
        if tables is None:
            book = self._read()
            tables = self._tables = _CheckTables(book, _functions_of(book), _word_places_of(book))
        return tables

    def check(self, shape: ExceptionShape, version: str) -> CheckMatch | None:
        """The place that raised a failure; None where no place has its function or message.

        version: the engine's version; "" where it is unknown.
        """
        message = shape.message[:_MAX_MESSAGE_CHARACTERS]
        frames = tuple(shape.frames[-_INNER_FRAMES:])
        return self._find(shape.exception, message, frames, shape.source, version)

    def _search(
        self, exception: str, message: str, frames: Sequence[str], source: str, version: str
    ) -> CheckMatch | None:
        tables = self._open_tables()
        rows = tables.book.rows
        versions = tables.book.versions
        text = " ".join(message.split())
        in_frames = [
            at
            for frame in reversed(frames)
            if (match := _FRAME.match(frame))
            for at in tables.functions.get((match["path"], match["name"]), ())
        ]
        places = _select_by_message(rows, in_frames, text, exception)
        if not places:
            # Functions move between versions, and their messages with them.
            places = _select_by_message(rows, _find_by_words(tables, text), text, exception)
        if places:
            # The version's own place first, then the exception, the longest text and the newest.
            site, mask = max(
                (rows[at] for at in places),
                key=lambda row: (
                    _has_version(versions, row[1], version),
                    row[0].exception == exception,
                    sum(map(len, row[0].parts)),
                    row[1],
                ),
            )
            is_own_version = _has_version(versions, mask, version)
            return CheckMatch(site, is_sure=True, is_own_version=is_own_version)
        if not frames or not (last := _FRAME.match(frames[-1])):
            return None
        function_rows = [
            rows[at]
            for at in tables.functions.get((last["path"], last["name"]), ())
            if _has_version(versions, rows[at][1], version)
        ]
        return self._find_by_source(function_rows, exception, f"{source} {message}")

    @staticmethod
    def _find_by_source(
        rows: Iterable[tuple[CheckSite, int]], exception: str, source: str
    ) -> CheckMatch | None:
        """The one place of a function without a message, whose settings the line reads, with
        these settings alone."""
        words = {word.lower().replace("_", "-") for word in _IDENTIFIER.findall(source)}
        candidates = [row for row in rows if row[0].exception == exception and not row[0].parts]
        matches = [
            CheckMatch(site._replace(conditions=conditions), is_sure=False)
            for site, _ in candidates
            if (conditions := tuple(_conditions_in(site, words)))
        ]
        return matches[0] if len(matches) == 1 else None


def _functions_of(book: CheckBook) -> dict[tuple[str, str], list[int]]:
    """The places of a book by their function."""
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, (site, _) in enumerate(book.rows):
        places[site.path, site.name].append(at)
    return dict(places)


def _word_places_of(book: CheckBook) -> dict[str, list[int]]:
    """The places of a book by the rarest word of their message."""
    word_sets = [{*map(str.lower, _WORD.findall(" ".join(site.parts)))} for site, _ in book.rows]
    usage = Counter(word for words in word_sets for word in words)
    places: dict[str, list[int]] = defaultdict(list)
    for at, words in enumerate(word_sets):
        if len(words) >= _MIN_WORDS:
            rarest = min(words, key=lambda word: (usage[word], word))
            places[rarest].append(at)
    return dict(places)


def _find_by_words(tables: _CheckTables, text: str) -> list[int]:
    words = dict.fromkeys(map(str.lower, _WORD.findall(text)))
    return [at for word in words for at in tables.word_places.get(word, ())[:_MAX_PLACES]]


def _select_by_message(
    rows: Sequence[tuple[CheckSite, int]], places: Iterable[int], text: str, exception: str
) -> list[int]:
    """The places of which a text has every constant part in order."""
    return [at for at in places if _has_parts(text, rows[at][0], exception)]


def _has_version(versions: Sequence[str], mask: int, version: str) -> bool:
    """Whether a version has a place; a version that is not known has those of the next older
    one."""
    if not version:
        return True
    bits = [at for at, name in enumerate(versions) if release(name) <= release(version)]
    return bool(mask >> (bits[-1] if bits else 0) & 1)


def _conditions_in(site: CheckSite, words: Collection[str]) -> Iterator[CheckCondition]:
    """The conditions whose setting a line of code reads. An absent object is not a setting."""
    for condition in site.conditions:
        if condition.relation != "!" and condition.name.rpartition(".")[2] in words:
            yield condition


def _has_parts(text: str, site: CheckSite, exception: str) -> bool:
    """Whether a text has every constant part of a place's message, in order."""
    if site.exception and exception not in _WRAPPERS and site.exception != exception:
        return False
    at = 0
    for part in site.template.split(HOLE):
        words = part.strip()
        if not words:
            continue
        if (start := text.find(words, at)) < 0:
            return False
        at = start + len(words)
    return at > 0
