"""What lines and tracebacks of one engine's log prove: the row, what failed, and when. Pure."""

from __future__ import annotations

import re

from gateway.diagnosis.candidate import Candidate, Process, Proof
from gateway.diagnosis.progress import Progress
from gateway.diagnosis.signature import FailureSignature, TextSignature
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Scalar


class Proofs:
    """engine: its kind, None where it is not known and every signature may hold."""

    def __init__(self, signatures: Signatures, engine: str | None, progress: Progress) -> None:
        self._signatures = signatures
        self._engine = engine
        self._progress = progress

    def alone(
        self, text: str, process: Process, *, deaf: bool, warned: bool = False
    ) -> Proof | None:
        """A line that proves a failure without an exception. deaf: the engine serves, and what the
        process says proves little."""
        found = self._signatures.match_text(
            text, self._engine, frozenset(process.frames), line=True
        )
        if warned and found and not found[0].printed_as_warning:
            return None
        return found if found and (found[0].while_serving or not deaf) else None

    def known(self, text: str, process: Process) -> Proof | None:
        """What a text proves, whoever says it."""
        return self._signatures.match_text(
            text, self._engine, frozenset(process.frames), line=False
        )

    def hint(self, said: str, text: str, number: int, process: Process) -> Candidate | None:
        """A known text in a line that is no exception: at the end of a log it may be the
        failure."""
        found = self.known(said, process)
        return (
            Candidate(found[0], found[1], text, number, self.phase(found[0], process), bare=True)
            if found
            else None
        )

    def raised(self, process: Process, text: str) -> Proof | None:
        """What an exception's text proves. In one that a request met nothing that only a start
        meets."""
        found = self.known(text, process)
        return (
            found
            if found
            and (self._signatures.can_fail_serving(found[0].kind) or not process.of_a_handler)
            else None
        )

    def culprit(
        self, row: TextSignature | None, found: dict[str, Scalar], process: Process
    ) -> dict[str, Scalar]:
        """The values that the message names; for a failure of a kernel or engine also kernel and
        layer from the traceback."""
        if row is None or row.proves not in ("kernel", "engine"):
            return found
        kernel, pattern = row.kernel, row.kernel_pattern
        for function in process.frames:
            if (known := self._signatures.frames.get(function)) and known.kernel:
                kernel, pattern = known.kernel, known.kernel_pattern
        named = next(
            (
                name
                for name in reversed(self._progress.kernels)
                if pattern and re.fullmatch(pattern, name)
            ),
            kernel,
        )
        own: dict[str, Scalar] = {"kernel": named} if named else {}
        own |= {"layer": process.layer} if process.layer else {}
        return own | found

    def phase(self, row: FailureSignature | None, process: Process) -> str:
        if row is not None and row.phase:
            return row.phase
        if process.of_a_handler:
            return "serving"
        named = [
            known.phase
            for function in process.frames
            if (known := self._signatures.frames.get(function)) and known.phase
        ]
        # A start computes too, to measure; what serves does not start.
        return next(
            (phase for phase in reversed(named) if phase != "serving"),
            named[-1] if named else self._progress.phase,
        )
