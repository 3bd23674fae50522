"""The data of `profiles/failures/`, compiled, and how a line is matched against it. Pure."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from gateway.diagnosis.checks.check_site import CheckSite
from gateway.diagnosis.cures import CureRows, Cures
from gateway.diagnosis.likely import KindClassifier, KindWords, normalize
from gateway.diagnosis.lines.pattern_index import IndexedRows
from gateway.diagnosis.signature import (
    EndingLine,
    FailureSignature,
    FrameMark,
    ProgressLine,
    StructuralSignature,
    TextSignature,
)
from gateway.diagnosis.structure import ExceptionShape, Structure
from gateway.domain import Scalar

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([\d.]+) ?(B|[KMGT]iB)")


class FailureRows(NamedTuple):
    """The rows of `profiles/failures/`, by file. Of several that match the first wins."""

    texts: tuple[TextSignature, ...] = ()
    structures: tuple[StructuralSignature, ...] = ()
    cures: CureRows = CureRows()
    progress: tuple[ProgressLine, ...] = ()
    endings: tuple[EndingLine, ...] = ()
    frames: tuple[FrameMark, ...] = ()
    words: tuple[KindWords, ...] = ()


class Signatures:
    """All rows, compiled."""

    def __init__(self, rows: FailureRows) -> None:
        self.rows = rows
        texts, structures, cures, progress, endings, frames, words = rows
        self._likely = KindClassifier(words)
        self._texts = IndexedRows((row, row.pattern) for row in texts)
        self._details = {
            row.pattern: re.compile(row.detail_pattern) for row in texts if row.detail_pattern
        }
        self._progress = IndexedRows((row, row.pattern) for row in progress)
        self._endings = re.compile("|".join(f"(?:{row.pattern})" for row in endings) or "(?!)")
        self.main_loops = frozenset(row.function for row in frames if row.is_main_loop)
        self.thread_loops = frozenset(row.function for row in frames if row.is_thread_loop)
        # The words of `unknown` are those of requests: an error without a name can be anywhere.
        self._phases = {
            kind_words.kind: kind_words.phases
            for kind_words in reversed(words)
            if kind_words.phases and kind_words.kind != "unknown"
        }
        self._structure = Structure(structures, self._phases)
        self.cures = Cures(cures)
        self.frames = {row.function: row for row in reversed(frames)}

    def select_versions(self, versions: Mapping[str, tuple[str, ...]]) -> Signatures:
        """Signatures by these rows, whose cures name only these versions of each kind of engine."""
        narrowed = Signatures.__new__(Signatures)
        vars(narrowed).update(vars(self))
        narrowed.cures = self.cures.select_versions(versions)
        return narrowed

    def can_match(self, text: str) -> bool:
        """Whether a line has a part that a row of known texts, of progress or of circumstances asks
        for."""
        return (
            self._texts.has_possible_rows(text)
            or self._progress.has_possible_rows(text)
            or self.cures.reads_line(text)
        )

    def match_text(
        self, text: str, engine: str | None, frames: frozenset[str], *, is_line: bool
    ) -> tuple[TextSignature, dict[str, Scalar]] | None:
        """The failure that `text` proves: a whole line (`is_line`), or a part of a message."""
        for row, pattern in self._texts.possible_rows(text):
            if row.line_start is not is_line or (row.frame and row.frame not in frames):
                continue
            if row.engines and engine is not None and engine not in row.engines:
                continue
            if match := pattern.match(text) if is_line else pattern.search(text):
                return row, parse_groups(match.groupdict())
        return None

    def match_structure(
        self, shape: ExceptionShape, engine: str | None, circumstances: Container[str] = ()
    ) -> tuple[StructuralSignature, dict[str, Scalar]] | None:
        """The failure by its structure, where no text proves it.

        circumstances: the names of those that the lines of the start showed.
        """
        match = self._structure.match(shape, engine, circumstances)
        return (match[0], parse_groups(match[1])) if match else None

    def shape_for_words(self, shape: ExceptionShape, engine: str | None) -> ExceptionShape:
        """The shape in which words are looked for.

        Python's own message of a fault belongs to no field, so the line of code that failed is read
        instead.
        """
        match = self._structure.match(shape, engine)
        return (
            shape
            if match is None or not match[0].reads_source
            else shape._replace(message=shape.source)
        )

    def guess(
        self, shapes: Sequence[ExceptionShape]
    ) -> tuple[StructuralSignature, tuple[str, ...], int] | None:
        """The kind that the words of several shapes speak for.

        Returns a row that proves nothing, the words, and the index of the first shape with them.
        """
        guess = self._likely.guess(shapes)
        if guess is None:
            return None
        kind, words = guess
        at = next(
            (at for at, shape in enumerate(shapes) if normalize(shape.message).find(words[0]) >= 0),
            0,
        )
        row = self._likely_row(kind, "No known text says so, but these words: {words}.")
        return row, words, at

    def check_row(self, kind: str, site: CheckSite) -> StructuralSignature:
        """A row that proves nothing, for a failure that a check of the engine's source raised."""
        return self._likely_row(kind, f"The engine's own check in {site.path}:{site.name} says so.")

    def context_row(self, kind: str) -> StructuralSignature:
        """A row that proves nothing, for a failure in a part of the engine."""
        return self._likely_row(kind, "The part of the engine that failed says so.")

    def _likely_row(self, kind: str, reason: str) -> StructuralSignature:
        remedy = self.cures.remedies.get(kind)
        message = remedy.message if remedy is not None else ""
        return StructuralSignature(
            kind=kind, proves="nothing", message=f"Likely: {message} {reason}"
        )

    def can_fail_serving(self, kind: str) -> bool:
        """Whether a failure of this kind can come while requests are answered."""
        return "serving" in self._phases.get(kind, ("serving",))

    def is_ending(self, text: str) -> bool:
        """Whether a record that begins with `text` says that the whole engine ends."""
        return self._endings.match(text) is not None

    def match_progress(self, text: str) -> Iterator[tuple[ProgressLine, dict[str, Scalar]]]:
        """Rows that a line of a start matches, with their groups."""
        for row, pattern in self._progress.possible_rows(text):
            if match := pattern.search(text):
                yield row, parse_groups(match.groupdict())

    def read_details(self, row: FailureSignature, text: str) -> dict[str, Scalar]:
        """The values that a line after the proof adds to it."""
        pattern = self._details.get(row.pattern) if isinstance(row, TextSignature) else None
        match = pattern.search(text) if pattern else None
        return parse_groups(match.groupdict()) if match else {}


def parse_groups(groups: dict[str, str | None]) -> dict[str, Scalar]:
    """Named groups as values.

    Whole numbers, sizes in bytes, and a CUDA version that is one number (12080) as 12.8.
    """
    values: dict[str, Scalar] = {}
    for name, text in groups.items():
        if text is None:
            continue
        if name.endswith("_gib"):
            values[name.removesuffix("_gib") + "_bytes"] = _parse_size(text, "GiB")
        elif name.endswith("_cuda") and text.isdigit():
            values[name] = f"{int(text) // 1000}.{int(text) % 1000 // 10}"
        elif name.endswith("_bytes"):
            size = _SIZE.fullmatch(text)
            values[name] = _parse_size(size[1], size[2]) if size else 0
        else:
            # A pattern cannot use a name twice, so a digit at the end of a name is left out.
            values[name.rstrip("0123456789")] = (
                int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text
            )
    return values


def _parse_size(number: str, unit: str) -> int:
    try:
        return int(min(float(number), 1e9) * _UNITS[unit])
    except ValueError:
        return 0
