"""What engines print when they fail, as data (`profiles/failures.yaml`), and how a line is matched
against it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from gateway.diagnosis import remedy
from gateway.diagnosis.likely import KindWords, Likely, plain
from gateway.diagnosis.signature import Signature
from gateway.diagnosis.structure import Shape, Structure
from gateway.domain import Failure, Scalar

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([\d.]+) ?(B|[KMGT]iB)")


_NO_WORDS = Signature()


class Signatures:
    """All signatures, compiled. First match in file order wins. words: of each kind, for what no
    signature knows."""

    def __init__(self, rows: tuple[Signature, ...], words: tuple[KindWords, ...] = ()) -> None:
        self.rows = rows
        self.kinds = words
        self._likely = Likely(words)
        self._compiled = [
            (row, re.compile(row.pattern), re.compile(row.more) if row.more else None)
            for row in rows
            if row.pattern and not (row.structure or row.over)
        ]
        self._over = re.compile(
            "|".join(f"(?:{row.pattern})" for row in rows if row.over and row.pattern) or "(?!)"
        )
        self.loops = frozenset(row.frame for row in rows if row.over and row.frame)
        # What has no name can be anywhere; its words are those of requests.
        self._phases = {
            one.kind: one.phases for one in reversed(words) if one.phases and one.kind != "unknown"
        }
        self._structure = Structure(rows, self._phases)
        # A file of the user's goes first, and so do its words.
        self._remedies = {row.kind: row for row in reversed(rows) if row.is_remedy}
        self.frames = {row.frame: row for row in rows if row.kind is None and row.frame}

    def proof(
        self, text: str, engine: str | None, frames: frozenset[str], *, line: bool
    ) -> tuple[Signature, dict[str, Scalar]] | None:
        """The failure that `text` proves: a line of its own (`line`), or part of an exception's
        message."""
        for row, pattern, _ in self._compiled:
            if row.kind is None or row.line is not line or (row.frame and row.frame not in frames):
                continue
            if row.engines and engine is not None and engine not in row.engines:
                continue
            if found := pattern.match(text) if line else pattern.search(text):
                return row, values(found.groupdict())
        return None

    def structural(
        self, shape: Shape, engine: str | None
    ) -> tuple[Signature, dict[str, Scalar]] | None:
        """What a failure is by its structure, where no text proves it."""
        found = self._structure.row(shape, engine)
        return (found[0], values(found[1])) if found else None

    def spoken(self, shape: Shape, engine: str | None) -> Shape:
        """The shape as words are looked for in it: what Python itself says of a fault (a row of
        kind unknown) is of no field, and the line of
        code that failed is read instead."""
        found = self._structure.row(shape, engine)
        return (
            shape
            if found is None or found[0].kind != "unknown"
            else shape._replace(message=shape.source)
        )

    def likely(self, shapes: Sequence[Shape]) -> tuple[Signature, tuple[str, ...], int] | None:
        """What the words of several shapes speak for: a row that proves nothing, these words, and
        which shape has the first of them."""
        found = self._likely.kind(shapes)
        if found is None:
            return None
        kind, words = found
        at = next(
            (at for at, shape in enumerate(shapes) if plain(shape.message).find(words[0]) >= 0), 0
        )
        message = self._remedies.get(kind, _NO_WORDS).message
        message += " No known text says so, but these words: {words}."
        row = Signature(kind=kind, structure=True, proves="nothing", message=f"Likely: {message}")
        return row, words, at

    def words(self, row: Signature, known: dict[str, Scalar]) -> tuple[str, str, tuple[str, ...]]:
        """Message, advice and steps of a failure: the row's own where every value of theirs is
        known, else those of its kind."""
        kind = self._remedies.get(row.kind, _NO_WORDS)
        message = (
            remedy.filled(row.message, known)
            or remedy.filled(kind.message, known)
            or "The engine failed."
        )
        own = remedy.filled(row.advice, known)
        # What the row knows of this very case goes before what helps with every failure of its
        # kind.
        general = remedy.steps(kind.steps, known)
        steps = remedy.steps(row.steps, known) or (
            ((own,) if own and not remedy.says(general, own) else ()) + general
        )
        advice = own or remedy.filled(kind.advice, known) or next(iter(steps), "")
        return message, advice, steps or ((advice,) if advice else ())

    def cured(self, failure: Failure, known: Mapping[str, Scalar]) -> Failure:
        """The failure with the steps of its kind, where it has none: those that the gateway finds
        itself, beside a log. Its advice goes first."""
        if failure.steps:
            return failure
        own = (failure.advice,) if failure.advice else ()
        kind = self._remedies.get(failure.kind, _NO_WORDS)
        steps = dict.fromkeys(own + remedy.steps(kind.steps, {**known, **failure.culprit}))
        cured: Failure = failure.evolve(steps=tuple(steps))
        return cured

    def while_serving(self, kind: str | None) -> bool:
        """Whether a failure of this kind can come while requests are answered."""
        return "serving" in self._phases.get(kind or "", ("serving",))

    def over(self, text: str) -> bool:
        """Whether a record that begins with `text` tells that the engine itself is over."""
        return self._over.match(text) is not None

    def progress(self, text: str) -> Iterator[tuple[Signature, dict[str, Scalar]]]:
        """What a line says of a start that goes on: its phase, or a kernel that the engine
        chose."""
        for row, pattern, _ in self._compiled:
            if row.kind is None and (found := pattern.search(text)):
                yield row, values(found.groupdict())

    def more(self, row: Signature, text: str) -> dict[str, Scalar]:
        """What a line after the proof adds to it."""
        pattern = next((more for one, _, more in self._compiled if one is row), None)
        found = pattern.search(text) if pattern else None
        return values(found.groupdict()) if found else {}


def values(groups: dict[str, str | None]) -> dict[str, Scalar]:
    """Named groups as values: whole numbers, sizes in bytes, and a CUDA version that was told as
    one number (12080) as 12.8."""
    found: dict[str, Scalar] = {}
    for name, text in groups.items():
        if text is None:
            continue
        if name.endswith("_gib"):
            found[name.removesuffix("_gib") + "_bytes"] = _bytes(text, "GiB")
        elif name.endswith("_cuda") and text.isdigit():
            found[name] = f"{int(text) // 1000}.{int(text) % 1000 // 10}"
        elif name.endswith("_bytes"):
            size = _SIZE.fullmatch(text)
            found[name] = _bytes(size[1], size[2]) if size else 0
        else:
            # Names ending in a digit are other spellings of the same thing: one pattern cannot use
            # a name twice.
            found[name.rstrip("0123456789")] = (
                int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text
            )
    return found


def _bytes(number: str, unit: str) -> int:
    try:
        return int(min(float(number), 1e9) * _UNITS[unit])
    except ValueError:
        return 0
