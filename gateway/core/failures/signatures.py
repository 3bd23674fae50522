"""What engines print when they fail, as data (`profiles/failures.yaml`), and how a line is matched against it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from gateway.domain import Scalar, Value

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([\d.]+) ?(B|[KMGT]iB)")


class Signature(Value):
    """One row of failures.yaml. A row with a kind proves a failure; without one it says what a start is doing (`phase`), or
    names a kernel that the engine chose (a group `kernel`).

    pattern: searched in the message of an exception and in the lines that belong to it; with `line`, from the start of any
    line that was not printed as information or warning. Its named groups become the culprit and may be used as {group} in
    message and advice; a group `x_gib` is a number of GiB, and `x_bytes` a number with its unit.
    more: searched in the lines after the proof, as long as they belong to the same message.
    frame: a function that must stand in the traceback, or, in a row without kind, that says `phase` or `kernel`.
    like: a pattern; a kernel that the log named before and that matches it is meant instead of `kernel`.
    weak: often only a consequence: any other proof is preferred.
    warned: the engine prints this line as a warning, though it then ends.
    when: `always` also counts once the engine serves, because users cannot write this text into its log.
    proves: what is learned from it (core/facts/learn.py).
    stands: of a row without kind: once the size of the KV cache was told, this line says that the cache is made. warm: and that
        nothing more is to be made.
    """

    kind: str | None = None
    pattern: str = ""
    more: str = ""
    line: bool = False
    frame: str = ""
    kernel: str = ""
    like: str = ""
    weak: bool = False
    warned: bool = False
    when: Literal["starting", "always"] = "starting"
    phase: str | None = None
    stands: bool = False
    warm: bool = False
    proves: Literal["kernel", "context", "memory", "engine", "peers", "plan", "nothing"] = "plan"
    engines: tuple[str, ...] = ()
    message: str = ""
    advice: str = ""
    source: str = ""

    @field_validator("pattern", "more", "like")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class Signatures:
    """All signatures, compiled. First match in file order wins."""

    def __init__(self, rows: tuple[Signature, ...]) -> None:
        self.rows = rows
        self._compiled = [
            (row, re.compile(row.pattern), re.compile(row.more) if row.more else None) for row in rows if row.pattern
        ]
        self.frames = {row.frame: row for row in rows if row.kind is None and row.frame}

    def proof(
        self, text: str, engine: str | None, frames: frozenset[str], *, line: bool
    ) -> tuple[Signature, dict[str, Scalar]] | None:
        """The failure that `text` proves: a line of its own (`line`), or part of an exception's message."""
        for row, pattern, _ in self._compiled:
            if row.kind is None or row.line is not line or (row.frame and row.frame not in frames):
                continue
            if row.engines and engine is not None and engine not in row.engines:
                continue
            if found := pattern.match(text) if line else pattern.search(text):
                return row, values(found.groupdict())
        return None

    def progress(self, text: str) -> Iterator[tuple[Signature, dict[str, Scalar]]]:
        """What a line says of a start that goes on: its phase, or a kernel that the engine chose."""
        for row, pattern, _ in self._compiled:
            if row.kind is None and (found := pattern.search(text)):
                yield row, values(found.groupdict())

    def more(self, row: Signature, text: str) -> dict[str, Scalar]:
        """What a line after the proof adds to it."""
        pattern = next((more for one, _, more in self._compiled if one is row), None)
        found = pattern.search(text) if pattern else None
        return values(found.groupdict()) if found else {}


def values(groups: dict[str, str | None]) -> dict[str, Scalar]:
    """Named groups as values: whole numbers, and sizes in bytes."""
    found: dict[str, Scalar] = {}
    for name, text in groups.items():
        if text is None:
            continue
        if name.endswith("_gib"):
            found[name.removesuffix("_gib") + "_bytes"] = _bytes(text, "GiB")
        elif name.endswith("_bytes"):
            size = _SIZE.fullmatch(text)
            found[name] = _bytes(size[1], size[2]) if size else 0
        else:
            # Names ending in a digit are other spellings of the same thing: one pattern cannot use a name twice.
            found[name.rstrip("0123456789")] = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text
    return found


def _bytes(number: str, unit: str) -> int:
    try:
        return int(min(float(number), 1e9) * _UNITS[unit])
    except ValueError:
        return 0


def filled(text: str, groups: dict[str, Scalar]) -> str:
    """`text` with each {group} replaced by what was found, sizes in GiB."""

    def shown(found: re.Match[str]) -> str:
        value = groups.get(found[1], "")
        return f"{value / 2**30:.2f} GiB" if found[1].endswith("_bytes") and isinstance(value, int) else str(value)

    return re.sub(r"\{(\w+)\}", shown, text).strip(" :")
