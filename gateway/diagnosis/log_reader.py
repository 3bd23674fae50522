"""Reads a log as it grows, and finds the failure that it proves, long before the process gives up.
Pure.

An engine prints one cause many times: as the exception of the process that met it, as the exception
of each process that waited for the first, and at last as `Engine core initialization failed`. The
first proof in the log is the cause, unless it is of a kind that is mostly a consequence (`weak`).
Information and warnings are no failures: the engine went on after them, as it did after everything
before the line that says that it serves. From that line on the log holds words of users too, and of
requests that fail by themselves: only what tells that the engine itself is over counts (rows with
`over`), and with it what was raised before it and not survived.

What no text proves is told by its structure (structure.py). A log that ends is judged by less than
one that still grows: an exception without its traceback, a traceback that was cut off, a line with
a known text that was no exception.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gateway.diagnosis.candidate import MESSAGE_LINES, Candidate, Process
from gateway.diagnosis.findings import Findings
from gateway.diagnosis.last_look import DUMPED, LastLook, Line
from gateway.diagnosis.lines import records
from gateway.diagnosis.lines.carriers import Carriers
from gateway.diagnosis.lines.line_filter import ALARMS, FATAL, SERVES, LineFilter
from gateway.diagnosis.lines.line_forms import (
    ASIDE,
    ASSERT,
    BENIGN,
    CAUSED,
    COMPLAINT,
    EXCEPTION,
    FAILED,
    FRAME,
    HARMLESS,
    IGNORED,
    LAYER,
    NOT_LAYERS,
    PIPE,
    QUOTED,
    RAISE,
    REQUEST,
    STOPPED,
    TRACEBACK,
    TRACEBACK_BEGINS,
    UNDERLINE,
    WRAPPER,
)
from gateway.diagnosis.lines.log_lines import LogLine, clean
from gateway.diagnosis.progress import Progress
from gateway.diagnosis.proofs import Proofs
from gateway.diagnosis.signature import TextSignature
from gateway.diagnosis.signatures import Signatures
from gateway.diagnosis.structure import Shape
from gateway.domain import Failure

# Processes that are remembered: more than any engine needs, and bounded.
_MOST_PROCESSES = 256
# A terminal breaks a line into a few; a message that goes on for longer has lines of its own.
_MOST_BROKEN = 6


class LogReader:
    """Reads one engine's log. `feed` takes bytes as they come, `read` one line; `failure` is what
    they prove so far.

    engine: its kind, None where it is not known and every signature may hold.
    """

    def __init__(self, signatures: Signatures, engine: str | None = None) -> None:
        self._lines = LineFilter(self._raw)
        self._carriers = Carriers()
        self.progress = Progress()
        self.ready = False
        self.answered = False
        """An answer stands in the log: what proves that the engine is healthy."""
        self._signatures = signatures
        self._proofs = Proofs(signatures, engine, self.progress)
        self._processes: dict[str, Process] = {}
        self._last = ""
        self._stopped = False
        self._over = False
        self._findings = Findings(signatures, engine)
        self._last_look = LastLook(self._findings, self._proofs.hint)

    def feed(self, piece: bytes) -> None:
        """Bytes of the log, cut anywhere."""
        self._lines.feed(piece)

    def read(self, line: bytes) -> None:
        """One whole line, without its end."""
        self._lines.read(line)

    def close(self) -> None:
        """The log ends, maybe in the middle of a line."""
        self._lines.close()
        self._last_look.look(
            self._lines.number,
            self._processes.values(),
            self.progress.phase,
            serves=self.ready or self.answered,
        )

    def _raw(self, raw: bytes) -> None:
        for line in records.said(raw):
            self._line(line)

    def _line(self, raw: bytes) -> None:
        if self._stopped:
            return
        text = clean(raw)
        line = self._carriers.parse(text)
        if line.process or line.header:
            self._last = line.process
        process = self._process(self._last)
        in_trace = process.tracing or process.cut_off is not None
        if in_trace and line.text[:1] == " " and _indent(line.text) < process.indent:
            line = line._replace(text=line.text.lstrip())
        if line.native and line.quiet:
            process.open = None  # Nothing is survived by it, but a message has ended.
        elif line.quiet or (line.header and line.level is None and not WRAPPER.match(line.text)):
            self._survived(line, process)
        if line.level == "WARNING" and not self._stopped:
            self._alone(line, text, process, warned=True)
        begins = line.header or DUMPED.match(line.text)
        if begins and self._last_look.record(
            Line(line.text, text, self._lines.number, process, line.quiet)
        ):
            self._lines.attend = MESSAGE_LINES
        if line.quiet or self._stopped:
            return
        self._last_look.crash.read(line.text, text, self._lines.number)
        fatal = (line.header or process.tracing) and self._signatures.is_ending(line.text)
        if fatal:
            self._ends(text, process)
        if (
            TRACEBACK.match(line.text)
            or (fatal and "Traceback" in line.text)
            or line.text.endswith(TRACEBACK_BEGINS)
        ):
            self._lines.attend = MESSAGE_LINES
            if line.text.endswith(f", {TRACEBACK_BEGINS}"):
                # vLLM's workers say the message before the traceback, too
                # (vllm/executor/multiproc_worker_utils.py, 0.5 and 0.6).
                self._hinted(line, text, process)
            ignored = process.ignored and not process.tracing
            process.open, process.tracing, process.ignored, process.left = None, True, ignored, 0
            process.frames.clear()
            process.files.clear()
            process.layer = process.asserted = process.source = ""
        elif frame := FRAME.match(line.text):
            self._lines.attend = max(self._lines.attend, 20)
            process.open = None
            process.file, process.indent = frame["file"], len(frame["indent"])
            process.frames.append(frame["function"] or "")
            process.files.append(f"{frame['file']}:{frame['function'] or ''}")
            self._cut_off(text, process)
            if self._deaf(process) and REQUEST.search(process.files[-1]):
                self._lines.attend = 0
        elif IGNORED.match(line.text):
            process.ignored, process.tracing, process.thread = True, False, "in thread" in line.text
        elif line.text.startswith("During handling of the above exception"):
            process.replaces = True
        elif CAUSED.match(line.text):
            process.causes = True
        elif EXCEPTION.match(line.text):
            self._exception(line, text, process)
        elif self._alone(line, text, process):
            pass
        elif WRAPPER.match(line.text) and line.header:
            self._findings.died(text, self._lines.number)
        elif ASIDE.match(line.text):
            process.left = 0
        elif process.open is not None and process.left > 0:
            self._continued(line, text, process)
        elif raised := RAISE.match(line.text):
            self._cut_off(text, process, raised[1])
        elif asserted := ASSERT.match(line.text):
            process.asserted = asserted[1]
            self._cut_off(asserted[1], process, "AssertionError")
        elif not (process.tracing and line.text[:1].isspace()) and not (
            in_trace and _indent(line.text) > process.indent
        ):
            # A progress bar is no record of its own.
            self._learn(line.text)
            self._hinted(line, text, process)
        elif not UNDERLINE.match(line.text):
            process.source = line.text.strip()
            if "/models/" not in process.file and "/mamba/" not in process.file:
                return
            layer = LAYER.search(line.text)
            process.layer = layer[1] if layer and layer[1] not in NOT_LAYERS else process.layer

    def serve(self) -> None:
        """From here on users write into the log."""
        self.ready, self._findings.hint, self._findings.quoted = True, None, ()
        if not self._over:
            self._lines.anchors = FATAL if self.answered else FATAL + SERVES

    def _ends(self, text: str, process: Process) -> None:
        """The engine is over. Where it served, what was raised before and not survived may be the
        cause."""
        process.fatal, self._lines.attend, self._lines.anchors = True, MESSAGE_LINES, ALARMS
        self._findings.died(text, self._lines.number)
        if self.ready and not self._over:
            raised = [one.served for one in self._processes.values() if one.served is not None]
            for candidate in sorted(raised, key=lambda one: one.number):
                self._findings.add(candidate)
        self._over = True

    def _deaf(self, process: Process) -> bool:
        """Whether what this process says proves nothing, because the engine serves."""
        return self.ready and not (self._over or process.fatal)

    def _survived(self, line: LogLine, process: Process) -> None:
        """The process goes on: it survived the errors that it printed before, unless it called them
        fatal."""
        if process.unknown is not None and not process.fatal:
            process.unknown.survived = True
        process.close()
        if line.quiet:
            process.fatal, process.served = False, None
            if self._deaf(process):
                self._lines.attend = 0
        if (
            STOPPED.match(line.text)
            and not self._findings.candidates
            and self._findings.dying is None
        ):
            self._stopped = True
        self._learn(line.text)
        if line.level is None:
            self._hinted(line, line.text, process)

    def _learn(self, text: str) -> None:
        """Notes how far the start is, and which kernels it chose."""
        if self.answered:
            return
        for row, groups in self._signatures.match_progress(text):
            if row.is_answer:
                self.answered = True
                self._lines.anchors = (
                    FATAL if self.ready and not self._over else self._lines.anchors
                )
            if self.ready:
                continue
            if self.progress.learn(row, groups):
                self._findings.hint = None
            if row.phase == "serving":
                self.serve()
                if self._findings.dying is None:
                    self._findings.candidates.clear()

    def _alone(self, line: LogLine, text: str, process: Process, *, warned: bool = False) -> bool:
        """Whether the line proves a failure without an exception, which then is a candidate."""
        found = self._proofs.alone(line.text, process, deaf=self._deaf(process), warned=warned)
        if found:
            phase = self._proofs.phase(found[0], process)
            self._add(Candidate(found[0], found[1], text, self._lines.number, phase), process, line)
        return found is not None

    def _exception(self, line: LogLine, text: str, process: Process) -> None:
        traced, ignored, replaces, causes = (
            process.tracing,
            process.ignored,
            process.replaces,
            process.causes,
        )
        framed = traced or process.cut_off is not None
        process.close()
        if BENIGN.match(line.text):
            if (
                framed
                and not self._deaf(process)
                and process.files
                and PIPE.search(process.files[-1])
            ):
                self._findings.died(text, self._lines.number)
            # What follows says what is wrong with it, and is as benign.
            process.open, process.header, process.left = (
                Candidate(None, {}, text, self._lines.number, self.progress.phase),
                line.header,
                MESSAGE_LINES,
            )
            return
        if not self._signatures.main_loops.isdisjoint(process.frames) and not process.of_a_request:
            ignored = False
            if self._deaf(process):
                self._ends(text, process)
        name = EXCEPTION.match(line.text)
        message = line.text[name.end() :] if name else line.text
        shape = Shape(
            name["name"] if name else "",
            message or process.asserted,
            tuple(process.files),
            self._proofs.phase(None, process),
            process.source,
        )
        if ignored and process.thread and not self.ready:
            # A thread that ends ends no engine, but of a log that tells of nothing else it is the
            # failure.
            if not self._hint(line, text, process) and not self._findings.quoted:
                self._findings.quoted = (Candidate.unproven(text, self._lines.number, shape),)
            return
        if ignored or (self.ready and (not (traced or process.fatal) or process.of_a_request)):
            return
        found = self._proofs.raised(process, line.text)
        if found is None and WRAPPER.match(line.text):
            if not self._deaf(process):
                self._findings.died(text, self._lines.number)
            return
        self._lines.attend = max(self._lines.attend, 8)
        row, culprit = found or (None, {})
        if row is not None and row.while_serving and self._deaf(process):
            self._ends(text, process)
        waited = causes and process.unknown is not None and process.unknown.shape.waited
        if (
            ((row is None or row.kind == "unknown") and replaces) or waited
        ) and process.unknown in self._findings.candidates:
            self._findings.candidates.remove(process.unknown)
        phase = self._proofs.phase(row, process)
        if causes and process.unknown is not None:
            # What wraps an error is raised further out, where frames tell more of when.
            process.unknown.tell(shape.phase)
        shape = shape._replace(phase=phase)
        bare = row is None and not (traced or process.fatal)
        candidate = Candidate(
            row,
            self._proofs.culprit(row, culprit, process),
            text,
            self._lines.number,
            phase,
            shape=shape,
            bare=bare,
            said=line.text,
            columns=len(text),
            last=len(text),
        )
        self._add(candidate, process, line)

    def _continued(self, line: LogLine, text: str, process: Process) -> None:
        """One more line of the message of an exception."""
        candidate, process.left = process.open, process.left - 1
        broken = candidate is not None and self._lines.number - candidate.number < _MOST_BROKEN
        if candidate is None or (
            line.header is not process.header and not (broken and not line.header)
        ):
            process.close()
            return
        proof = partial(self._proofs.raised, process)
        alone = proof(line.text)
        found = alone if candidate.row is None else None
        at = text, self._lines.number
        clearer = False
        if found is None and broken:
            at = candidate.line, candidate.number
            found = candidate.broken(line.text.strip(), len(text), proof)
            # What the whole message proves, and neither of its parts, is nearer than what its
            # beginning did.
            clearer = (
                found is not None
                and candidate.row is not found[0]
                and (alone is None or alone[0] is not found[0])
            )
        if found is not None and candidate.row is None:
            candidate.line, candidate.number = at
            if found is alone:
                candidate.said, candidate.columns, candidate.last = line.text, len(text), len(text)
            self._lines.attend = MESSAGE_LINES
        if found is not None and (
            candidate.row is None or clearer or found[1].items() > candidate.culprit.items()
        ):
            candidate.row, candidate.culprit = (
                found[0],
                self._proofs.culprit(found[0], found[1], process),
            )
            candidate.phase = self._proofs.phase(found[0], process)
            return
        if candidate.row is not None:
            candidate.culprit |= self._signatures.read_details(candidate.row, line.text)
        self._lines.attend = max(self._lines.attend, 3)

    def _cut_off(self, text: str, process: Process, exception: str = "") -> None:
        """A traceback that goes on: where the log ends in it, what it has shown is all that there
        is."""
        of_a_request = process.of_a_handler or (self.ready and process.of_a_request)
        if not (self._deaf(process) or process.ignored or of_a_request):
            shape = Shape(exception, text, tuple(process.files), self._proofs.phase(None, process))
            process.cut_off = Candidate.unproven(text, self._lines.number, shape)

    def _hinted(self, line: LogLine, text: str, process: Process) -> None:
        """A known text in a line that is no exception: it counts where the log ends and nothing
        else is known."""
        if self._deaf(process) or HARMLESS.search(line.text):
            return
        self._last_look.keep(Line(line.text, text, self._lines.number, process, line.quiet))
        if not COMPLAINT.search(text):
            return
        shape = Shape("", line.text, tuple(process.files), self.progress.phase)
        if line.level is not None or not line.header or FAILED.search(text):
            self._findings.complain(Candidate.unproven(text, self._lines.number, shape))
        if self._hint(line, text, process):
            return
        if not self._findings.quoted and (quoted := QUOTED.search(line.text)):
            whole = Candidate.unproven(
                text, self._lines.number, shape._replace(exception=quoted["name"])
            )
            self._findings.quoted = (
                replace(whole, shape=whole.shape._replace(message=quoted["message"])),
                whole,
            )

    def _hint(self, line: LogLine, text: str, process: Process) -> bool:
        """Whether a known text is hinted at: by this line, or by one before."""
        return self._findings.hinted(
            self._proofs.hint(line.text, text, self._lines.number, process)
        )

    def _add(self, candidate: Candidate, process: Process, line: LogLine) -> None:
        if self._deaf(process) and not (
            isinstance(candidate.row, TextSignature) and candidate.row.line_start
        ):
            process.served = process.served or candidate
        else:
            self._findings.add(candidate)
        process.open, process.header, process.left = candidate, line.header, MESSAGE_LINES
        self._lines.attend = max(self._lines.attend, 8 if candidate.row is None else 20)
        if candidate.row is None:
            process.unknown = candidate

    def _process(self, name: str) -> Process:
        if name not in self._processes and len(self._processes) >= _MOST_PROCESSES:
            name = next(iter(self._processes))
        return self._processes.setdefault(name, Process())

    @property
    def failure(self) -> Failure | None:
        """The failure that is proven so far; later lines of the same message may still make it
        clearer."""
        return self._findings.failure(self.progress.settings, self.progress.phase)

    @property
    def verdict(self) -> Failure | None:
        """The failure that a log proves once it has ended. What nobody proves to be survived counts
        too, down to a line without traceback."""
        return self._findings.verdict(
            self.progress.settings, self.progress.phase, self._cut_off_traces, serves=self.ready
        )

    @property
    def diagnosis(self) -> Failure | None:
        """For who reads a log that has ended: what words speak for where the verdict names no
        cause, else the verdict."""
        return self._findings.diagnosis(
            self.progress.settings, self.progress.phase, self._cut_off_traces, serves=self.ready
        )

    @property
    def _cut_off_traces(self) -> list[Candidate]:
        return [one.cut_off for one in self._processes.values() if one.cut_off is not None]


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
