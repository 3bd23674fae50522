"""What a log has told of its failure so far, and which part of it is the cause. Pure.

The first proof is the cause, unless it is of a kind that is mostly a consequence (`weak`); then
comes what structure tells, then what words speak for (likely.py), which proves nothing and is asked
for by itself.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.diagnosis.candidate import TOLD_DEAD, Candidate
from gateway.diagnosis.lines.line_forms import EXCEPTION, LOUD, TOLD
from gateway.diagnosis.signature import FailureSignature, StructuralSignature
from gateway.diagnosis.signatures import Signatures
from gateway.diagnosis.structure import Shape, culprit
from gateway.domain import Failure, Scalar

_CITED = 1000
# More than any engine needs, and bounded.
_MOST_CANDIDATES = 64
_MOST_BARE = 8
_MOST_COMPLAINTS = 16


class Findings:
    """candidates: what may be the failure. dying: the line, with its number, in which a process
        first told of its end. hint: a known text in a
    line that is no exception. quoted: an exception in the middle of a line, as it is
    quoted and as the whole line. complaints: lines that complain, of nothing that is known.
    crashed: the stack of a process that crashed. warned: a known text in what the engine went on
    after."""

    def __init__(self, signatures: Signatures, engine: str | None) -> None:
        self.candidates: list[Candidate] = []
        self.dying: tuple[str, int] | None = None
        self.hint: Candidate | None = None
        self.quoted: tuple[Candidate, ...] = ()
        self.complaints: list[Candidate] = []
        self.crashed: Candidate | None = None
        self.warned: Candidate | None = None
        self._signatures = signatures
        self._engine = engine

    def add(self, candidate: Candidate) -> None:
        """One more that may be the failure, as far as there is room."""
        bare = [one for one in self.candidates if one.bare] if candidate.bare else []
        if len(bare) < _MOST_BARE and len(self.candidates) < _MOST_CANDIDATES:
            self.candidates.append(candidate)

    def died(self, text: str, number: int) -> None:
        """A line that tells of an end. The first counts, unless a later one quotes what the process
        died of."""
        if self.dying is None or (TOLD.search(text) and not TOLD.search(self.dying[0])):
            self.dying = text, number

    def complain(self, candidate: Candidate) -> None:
        """One more line that complains, as far as there is room."""
        if len(self.complaints) < _MOST_COMPLAINTS:
            self.complaints.append(candidate)

    def hinted(self, candidate: Candidate | None) -> bool:
        """A line with a known text, if it has one. Whether one was seen by now: the first
        counts."""
        self.hint = self.hint or candidate
        return self.hint is not None

    def failure(self, settings: dict[str, Scalar], phase: str) -> Failure | None:
        """What is proven while the log still grows. settings: how the engine is set; phase: how far
        it came."""
        proof = self._proof(phase)
        return None if proof is None else self._failure(proof, settings)

    def verdict(
        self, settings: dict[str, Scalar], phase: str, cut_off: list[Candidate], *, serves: bool
    ) -> Failure | None:
        """What is proven once the log has ended. cut_off: tracebacks without their end. serves: the
        engine was ready."""
        cause = self._cause(phase, cut_off, serves=serves)
        return None if cause is None else self._failure(cause, settings)

    def diagnosis(
        self, settings: dict[str, Scalar], phase: str, cut_off: list[Candidate], *, serves: bool
    ) -> Failure | None:
        """What words speak for, where they speak, else the verdict."""
        cause = self._cause(phase, cut_off, serves=serves)
        told = self._likely(cause, cut_off, serves=serves) or cause
        return None if told is None else self._failure(told, settings)

    def _likely(
        self, cause: Candidate | None, cut_off: list[Candidate], *, serves: bool
    ) -> Candidate | None:
        """What the words of everything that nobody knows speak for, where the verdict names no
        cause: no proof. What serves has survived all
        but what it called fatal."""
        death = cause if cause is not None and cause.rank == TOLD_DEAD else None
        if (serves and self.dying is None) or (
            cause is not None
            and death is None
            and cause.row is not None
            and (isinstance(cause.row, StructuralSignature) or _kind(cause) != "unknown")
            and not (isinstance(cause.row, StructuralSignature) and cause.row.yields_to_words)
        ):
            return None
        raised = [*self._unknown(), *self._quoted_death(""), *cut_off, *self.quoted[:1]]
        told = {one.number for one in raised}
        loud = [
            one
            for one in self.complaints
            if one.number not in told and (not raised or LOUD.search(one.line))
        ]
        several = [*raised, *loud]
        several = [one for one in several if death is None or one.number < death.number]
        if self.crashed is not None and self._signatures.guess([self.crashed.shape]):
            several = [self.crashed]
        if cause is not None and cause.phase == "serving":
            several = [one for one in several if one.phase == "serving"]
        several += self._around
        found = self._signatures.guess(
            [self._signatures.shape_for_words(one.shape, self._engine) for one in several]
        )
        if found is None:
            return None
        row, words, at = found
        if cause is not None and row.kind == _kind(cause):
            return None
        return replace(several[at], row=row, culprit={"words": ", ".join(words)})

    def _proof(self, phase: str) -> Candidate | None:
        unproven = (
            [one for one in self.candidates if one.row is None and not (one.survived or one.bare)]
            if self.dying
            else []
        )
        proven = [one for one in self.candidates if one.row is not None] + unproven
        if not proven:
            return self._death(phase) if self.dying else None
        first = min(proven, key=lambda one: (one.rank, one.number))
        return first if first.row is not None else self._best(unproven) or first

    def _cause(self, phase: str, cut_off: list[Candidate], *, serves: bool) -> Candidate | None:
        """What the verdict is made of."""
        proven = self._proof(phase)
        if proven is not None and _kind(proven) != "unknown":
            return self._raised_before(proven) or proven
        if serves and proven is None:
            return None
        left = self._unknown()
        hinted = [self.hint] if self.hint is not None else []
        quoted = [*self.quoted[:1]]
        for several in (
            [one for one in left if not one.bare],
            hinted,
            [one for one in left if one.bare],
            cut_off,
            quoted,
        ):
            best = self._best(several)
            if best is not None and best.row is not None:
                return best
        if self._around and (best := self._best(self._around)) is not None and best.row is not None:
            return best
        if self.warned is not None and not left:
            return self.warned
        return proven or next(iter([*left, *cut_off, *quoted]), None)

    @property
    def _around(self) -> list[Candidate]:
        """The line around a quote, where the quote itself says nothing."""
        shapes = [one.shape for one in self.quoted[:1]]
        says = any(
            self._signatures.match_structure(shape, self._engine) for shape in shapes
        ) or self._signatures.guess(shapes)
        return [] if says else [*self.quoted[1:]]

    def _unknown(self) -> list[Candidate]:
        return [one for one in self.candidates if not one.survived and one.row is None]

    def _raised_before(self, told: Candidate) -> Candidate | None:
        """What was raised before a process was only told to be dead, in a traceback whose beginning
        is missing."""
        if told.rank != TOLD_DEAD:
            return None
        raised = [one for one in self._unknown() if one.shape.frames]
        best = self._best(
            [one for one in [*raised, *self._quoted_death(told.phase)] if one.number < told.number]
        )
        return best if best is not None and best.row is not None else None

    def _best(self, several: list[Candidate]) -> Candidate | None:
        """The first whose structure says what it is, with that row; else the first."""
        for one in several:
            if one.row is not None:
                return one
            if found := self._signatures.match_structure(one.shape, self._engine):
                return replace(
                    one,
                    row=found[0],
                    culprit=found[1] | culprit(one.shape),
                    phase=found[0].phase or one.phase,
                )
        return several[0] if several else None

    def _quoted_death(self, phase: str) -> list[Candidate]:
        """The error of another process that is quoted where a process tells of its death, if one
        is."""
        one = self._death(phase)
        return [one] if one.shape.message else []

    def _death(self, phase: str) -> Candidate:
        """A process that tells of its death, and of no error: with the error of another one in
        quotes, at best."""
        line, number = self.dying or ("", 0)
        told = TOLD.search(line)
        name = EXCEPTION.match(told[1]) if told else None
        message = told[1][name.end() :] if told and name else told[1] if told else ""
        shape = Shape(name["name"] if name else "", message, (), phase)
        if not message:
            return Candidate(_NOT_HERE, {}, line, number, phase)
        one = Candidate(None, {}, line, number, phase, shape=shape)
        return self._best([one]) or one

    def _failure(self, one: Candidate, settings: dict[str, Scalar]) -> Failure:
        row = one.row or _UNKNOWN
        message, advice, steps = self._signatures.describe(row, settings | one.culprit)
        return Failure(
            kind=_kind(one),
            phase=one.phase,
            message=message,
            line=one.line[:_CITED],
            line_number=one.number,
            culprit=one.culprit,
            advice=advice,
            steps=steps,
            proves=row.proves,
        )


def _kind(one: Candidate) -> str:
    return one.row.kind if one.row is not None else "unknown"


_UNKNOWN = FailureSignature(
    kind="unknown",
    message="The engine failed with an error that is not known here.",
)
# Processes that tell of the death of another one, and of nothing else.
_NOT_HERE = FailureSignature(
    kind="unknown",
    message=(
        "A process of the engine died, and this part of its log does not tell why: the cause stands"
        " further up, or in another rank's log."
    ),
    steps=(
        "Look for the first error above this line: `fitserve diagnose` finds it in the whole log.",
        "Of several machines or ranks read the log of each: the first that failed has the cause.",
        (
            "Where there is none, see `dmesg`: a process that the kernel ended for lack of memory"
            " says nothing."
        ),
    ),
)
