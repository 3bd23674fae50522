"""A failure's structure where its text is not known: exception, frames and form of message. Pure.

The rows are data (profiles/failures/structures.yaml). Such rows teach no more than that the plan
failed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import NamedTuple

from gateway.diagnosis.signature import StructuralSignature
from gateway.domain.value import Scalar

# The innermost frames that count. Outer ones (loop, worker, runner) are the same in every failure.
_INNER_FRAMES = 8
# Beginnings of advice, flags of a command line, and paths of engines' code.
ADVICE = re.compile(
    r"\b(?:[Ww]ork ?arounds?|[Tt]o (?:avoid|fix|solve|resolve|work)|[Pp]lease (?:try|add|set|use"
    r"|pass|remove|increase|raise|decrease|lower|reduce|disable)|[Pp]ossible solutions?|[Cc]onsider"
    r"|[Yy]ou (?:can|may|should)|[Tt]ry)\b"
)
FLAG = re.compile(r"(?<![\w-])--[a-z]")
ENGINE_CODE = re.compile(r"(?:packages/|/)(?:vllm|sglang)/")


class ExceptionShape(NamedTuple):
    """The form of a failure.

    frames: `path/of/file.py:function`, the innermost last.
    phase: the phase of the start, by the lines before.
    source: the line of code that failed, if the traceback has it.
    codes: the code of each frame, or "".
    """

    exception: str
    message: str
    frames: tuple[str, ...]
    phase: str
    source: str = ""
    codes: tuple[str, ...] = ()

    @property
    def is_bare_timeout(self) -> bool:
        """Whether the error is a timeout without a message: the exception that it caused says
        more."""
        return self.message.strip() in ("", self.exception) and self.exception.endswith(
            ("Timeout", "TimeoutError")
        )


def asks_for_option(shape: ExceptionShape) -> bool:
    """Whether an error of the engine's own code asks for an option of the start.

    No other request of this kind is answered until the engine is started in another way.
    """
    begin = ADVICE.search(shape.message)
    if begin is None or FLAG.search(shape.message, begin.end()) is None:
        return False
    return any(map(ENGINE_CODE.search, shape.frames))


class Structure:
    """The structural rows, compiled. The first row of which every condition holds wins."""

    def __init__(
        self,
        rows: tuple[StructuralSignature, ...],
        phases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """phases: the phases in which a failure of each kind can occur."""
        self._phases = phases or {}
        self._rows = [
            (row, re.compile(row.exception), re.compile(row.frames), re.compile(row.pattern))
            for row in rows
        ]

    def match(
        self, shape: ExceptionShape, engine: str | None, circumstances: Container[str] = ()
    ) -> tuple[StructuralSignature, dict[str, str | None]] | None:
        """The row that the shape belongs to, with the groups of its pattern; None without a row.

        circumstances: the names of those that the start showed.
        """
        innermost = "\n".join(shape.frames[-_INNER_FRAMES:])
        for row, exception, frames, pattern in self._rows:
            if row.engines and engine is not None and engine not in row.engines:
                continue
            if row.circumstance and row.circumstance not in circumstances:
                continue
            phases = row.phases or self._phases.get(row.kind, ())
            if phases and shape.phase not in phases:
                continue
            if row.exception and not exception.fullmatch(shape.exception):
                continue
            if row.frames and not frames.search(innermost):
                continue
            if match := pattern.search(shape.message):
                return row, match.groupdict()
        return None


def culprit_values(shape: ExceptionShape) -> dict[str, Scalar]:
    """The values of a structural failure: the exception, and the frame that raised it."""
    raising_frame = shape.frames[-1] if shape.frames else ""
    return {
        name: value
        for name, value in (("exception", shape.exception), ("frame", raising_frame))
        if value
    }
