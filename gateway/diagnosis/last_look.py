"""What is looked at only once a log has ended and nothing else is known: the few lines of a paste,
what was warned of before a traceback that is
cut off, what an engine that stands still says last, and the stack of a crash. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from gateway.diagnosis.candidate import Candidate, Process
from gateway.diagnosis.crash import Crash
from gateway.diagnosis.lines.line_forms import CODE, COMPLAINT, DOES, HARMLESS, PYTHON, WRAPPER
from gateway.diagnosis.signature import TextSignature
from gateway.diagnosis.structure import Shape

# Of so few lines all are meant by who pastes them, also one that does not complain.
_FEW = 4
_SAID = 8
# A dump of its threads is so long at most.
_NEAR = 60
# What stands still: the watchdog of SGLang, of the threads of a process that did nothing, and a
# process of vLLM that waits for another one.
_WATCHED = ("Pyspy dump", "No available shared memory broadcast block")
# One that waits for another to start says so each ten seconds. It stands still where that is all
# there is in so many lines: no progress bar.
_WAITS, _LONG = "Waiting for ", 5
# py-spy's dump of a process, which is made of what stands still.
DUMPED = re.compile(r'Thread (?:0x[0-9A-Fa-f]+|\d+) \((?:active|idle)(?:\+gil)?\): "')
# A program calls it an error, whatever it says; one word alone is a name, and no message.
_LEVEL = re.compile(r"\W*(?:ERROR|CRITICAL|FATAL)\b(?! \w+\W*$)")
_DIGITS = re.compile(r"\d+")


class Line(NamedTuple):
    """A line as it stands in the log, and what it says. quiet: the engine goes on after it, as its
    level says."""

    said: str
    text: str
    number: int
    process: Process
    quiet: bool


class Told(Protocol):
    """What the log has told, `Findings`, as far as a last look adds to it."""

    candidates: list[Candidate]
    dying: tuple[str, int] | None
    crashed: Candidate | None
    warned: Candidate | None

    def add(self, candidate: Candidate) -> None:
        """One more that may be the failure."""

    def died(self, text: str, number: int) -> None:
        """A line that tells of an end."""

    def complain(self, candidate: Candidate) -> None:
        """A line that complains, of nothing that is known."""

    def hinted(self, candidate: Candidate | None) -> bool:
        """A line with a known text, if it has one. Whether one was seen by now."""


class LastLook:
    """`crash` reads every line that is not quiet; of all lines those are kept that may count in the
    end.

    hint: the known text of a line that is no exception, from what it says, the line, its number and
    its process.
    """

    def __init__(
        self, told: Told, hint: Callable[[str, str, int, Process], Candidate | None]
    ) -> None:
        self.crash = Crash()
        self._told = told
        self._known = hint
        self._few: list[Line] = []
        self._said: deque[Line] = deque(maxlen=_SAID)
        self._last: deque[Line] = deque(maxlen=_LONG)

    def record(self, line: Line) -> bool:
        """A line that begins a record, or a dump, whatever its level. Whether it counts if no other
        one follows."""
        self._last.append(line)
        if not line.quiet or not HARMLESS.search(line.said):
            self._said.append(line)
        return line.said.startswith(_WATCHED)

    def keep(self, line: Line) -> None:
        """A line that is no exception and belongs to none."""
        if len(self._few) < _FEW:
            self._few.append(line)

    def look(self, lines: int, processes: Iterable[Process], phase: str, *, serves: bool) -> None:
        """The log has ended, after so many lines, in this phase."""
        told = self._told
        if self.crash.number:
            shape = self.crash.shape(phase)
            told.crashed = Candidate(
                None, {}, self.crash.line, self.crash.number, phase, shape=shape
            )
        if not told.candidates and (still := self._stands_still(lines, serves=serves)) is not None:
            told.add(still)
        if told.candidates or told.dying is not None or serves:
            return
        if lines <= _FEW:
            for line in self._few:
                self._meant(line, phase)
        # Where it ends in a traceback, what was said before may be what failed.
        cut = any(one.tracing or one.cut_off for one in processes)
        known = (
            self._known(line.said, line.text, line.number, line.process) for line in self._said
        )
        told.warned = next(
            (
                one
                for one in known
                if one is not None
                and (cut or (isinstance(one.row, TextSignature) and one.row.printed_as_warning))
            ),
            None,
        )

    def _stands_still(self, lines: int, *, serves: bool) -> Candidate | None:
        """That the engine waits, where it said so last: again and again, with all its threads, or
        while it serves, when nothing compiles any more."""
        last = self._last[-1] if self._last else None
        if last is None or lines - last.number > _NEAR:
            return None
        starts = last.said.startswith(_WAITS)
        several = list(self._last)[-_LONG if starts else -2 :]
        same = len({_DIGITS.sub("", line.said) for line in several}) == 1 < len(several)
        again = same and (
            not starts or last.number - several[0].number == len(several) - 1 == _LONG - 1
        )
        found = (
            self._known(last.said, last.text, last.number, last.process)
            if again or serves or not last.quiet
            else None
        )
        return (
            found
            if found is not None and found.row is not None and found.row.kind == "hang"
            else None
        )

    def _meant(self, line: Line, phase: str) -> None:
        """One of the few lines of a paste, which may say it without the name of an exception."""
        quoted = CODE.search(line.said)
        said = quoted[1] if quoted else line.said
        if WRAPPER.match(said):
            self._told.died(line.text, line.number)
        elif self._hint(line, said) or self._last:
            return  # beside records it may be the rest of one
        elif worded := PYTHON.match(said.strip()):
            shape = Shape(worded.lastgroup or "", said.strip(), (), phase)
            self._told.add(Candidate.unproven(line.text, line.number, shape))
        elif not (DOES.match(said) or (COMPLAINT.search(line.text) and not quoted)):
            self._told.complain(
                Candidate.unproven(line.text, line.number, Shape("", said, (), phase))
            )
        elif _LEVEL.match(line.text):
            self._told.add(Candidate.unproven(line.text, line.number, Shape("", said, (), phase)))

    def _hint(self, line: Line, said: str) -> bool:
        return self._told.hinted(self._known(said, line.text, line.number, line.process))
