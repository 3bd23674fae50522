"""A reader of a growing log, which finds the failure long before the process gives up. Pure.

An engine prints one cause many times: as the exception of the failed process, as exceptions of the
processes that waited for it, and at last as `Engine core initialization failed`.

Information and warnings are not failures: the engine survived them, and all errors before the line
that says that it serves. From that line on, the log also holds words of users and errors of single
requests. Then only lines count that say that the engine itself ends (endings.yaml), and with them
the errors that it did not survive.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gateway.diagnosis.candidate import (
    MAX_FAILED_REQUESTS,
    MESSAGE_LINES,
    WAKE_PHASE,
    EngineLine,
    FailureCandidate,
    ProcessTrace,
)
from gateway.diagnosis.evidence import LogEvidence, Proof
from gateway.diagnosis.lines import line_forms as forms
from gateway.diagnosis.lines import records
from gateway.diagnosis.lines.carriers import Carriers
from gateway.diagnosis.lines.line_filter import (
    ALARM_WORDS,
    FATAL_WORDS,
    SERVING_WORDS,
    STATUS_WORDS,
    LineFilter,
)
from gateway.diagnosis.lines.log_lines import MAX_LINE, LogLine, clean
from gateway.diagnosis.signature import TextSignature
from gateway.diagnosis.signatures import Signatures
from gateway.diagnosis.structure import ExceptionShape
from gateway.diagnosis.verdict import LogVerdict
from gateway.domain import Failure

# A terminal breaks a line into a few; a longer message has lines of its own.
_MAX_LINE_PARTS = 6
# The prefix of a record is shorter.
_HEAD_CHARACTERS = 120
# The names of processes that compute, and read no requests.
_COMPUTING_PROCESS = re.compile(r"\(\w*(?:Worker|EngineCore)|\A[TDPE]P\d")


class _Traceback(NamedTuple):
    """The traceback of a process as it was before its exception closed it.

    is_ignored: an exception that Python only reports, as from a destructor.
    replaces_former: raised while another was handled.
    has_cause: raised from another.
    is_framed: frames were seen, maybe without the traceback's first line.
    message: the message of an exception above, which is still being read.
    """

    is_traced: bool
    is_ignored: bool
    replaces_former: bool
    has_cause: bool
    is_framed: bool
    message: FailureCandidate | None

    @classmethod
    def read_process(cls, process: ProcessTrace) -> _Traceback:
        """The traceback of a process now."""
        return cls(
            is_traced=process.is_in_traceback,
            is_ignored=process.is_ignored,
            replaces_former=process.replaces_former,
            has_cause=process.has_cause,
            is_framed=process.is_in_traceback or process.cut_off is not None,
            message=process.message if process.lines_left > 0 else None,
        )


class LogReader:
    """Reads one engine's log. `feed` takes bytes as they come, `read` one line.

    engine: KIND or KIND==VERSION; None: any row may hold.
    has_answered: the log shows an answer, which proves that the engine is healthy.
    """

    def __init__(self, signatures: Signatures, engine: str | None = None) -> None:
        self.has_answered = False
        self._evidence = LogEvidence(signatures, engine)
        self._verdict = LogVerdict(self._evidence, signatures, engine)
        self.progress = self._evidence.progress
        self._signatures = signatures
        self._lines = LineFilter(self._read_raw, self._can_match)
        self._carriers = Carriers()
        self._last_process = ""
        self._is_stopped = False

    def feed(self, piece: bytes) -> None:
        """Read bytes of the log, cut anywhere."""
        self._lines.feed(piece)

    def read(self, line: bytes) -> None:
        """Read one whole line, without its end."""
        self._lines.read(line)

    def close(self) -> None:
        """End the log, maybe in the middle of a line."""
        self._lines.close()
        self._evidence.close(self._lines.number, is_healthy=self.is_ready or self.has_answered)

    def mark_serving(self) -> None:
        """Note that the engine serves: from here on users write into the log."""
        evidence = self._evidence
        evidence.is_serving = True
        evidence.hint = None
        evidence.quoted_candidates = ()
        self._set_serving_anchors()

    def _set_serving_anchors(self) -> None:
        """Skip the lines of a serving engine that prove no failure."""
        evidence = self._evidence
        if not evidence.is_ending:
            self._lines.anchors = (
                FATAL_WORDS
                + (() if self.has_answered else SERVING_WORDS)
                + (() if evidence.failed_requests >= MAX_FAILED_REQUESTS else STATUS_WORDS)
            )

    @property
    def is_empty(self) -> bool:
        """Whether the log has no line."""
        return self._lines.number == 0

    @property
    def is_ready(self) -> bool:
        """Whether the engine has started to serve."""
        return self._evidence.is_serving

    @property
    def failed_requests(self) -> int:
        """The number of answers with status 500 since the engine serves."""
        return self._evidence.failed_requests

    @property
    def has_failure(self) -> bool:
        """Whether a failure is proven so far, without its description."""
        return self._verdict.has_failure

    @property
    def failure(self) -> Failure | None:
        """The failure that is proven so far; later lines of its message may make it clearer."""
        return self._verdict.failure

    @property
    def verdict(self) -> Failure | None:
        """The failure that a log proves once it has ended."""
        return self._verdict.verdict

    @property
    def diagnosis(self) -> Failure | None:
        """The verdict, or a likely kind where it names no cause: for a reader of the log."""
        return self._verdict.diagnosis

    def _can_match(self, raw: bytes) -> bool:
        # The level of a record stands in every one.
        head, bracket, message = raw[:MAX_LINE].partition(b"] ")
        return self._signatures.can_match(
            (message if bracket and len(head) < _HEAD_CHARACTERS else raw[:MAX_LINE]).decode(
                "utf-8", "replace"
            )
        )

    def _read_raw(self, raw: bytes) -> None:
        for line in records.carried_lines(raw):
            self._read_line(line)

    def _read_line(self, raw: bytes) -> None:
        if self._is_stopped:
            return
        text = clean(raw)
        line = self._carriers.parse(text)
        if line.process or line.is_header:
            self._last_process = line.process
        process = self._evidence.process(self._last_process)
        in_traceback = process.is_in_traceback or process.cut_off is not None
        if in_traceback and line.text[:1] == " " and _indent(line.text) < process.indent:
            line = line._replace(text=line.text.lstrip())
        if not self._evidence.is_serving:
            self._evidence.circumstances |= self._signatures.cures.line_circumstances(text)
            self._evidence.options.read(line.text)
            self._evidence.read_advice(line.text, self._lines.number)
        elif line.level == "INFO" and self._evidence.record_status(line.text):
            self._set_serving_anchors()
        self._evidence.read_kernel_check(line.text)
        if "NVRM" in text:
            self._evidence.read_last_error(
                EngineLine(line.text, text, self._lines.number, process, line.is_quiet)
            )
        self._read_level(line, text, process)
        if line.is_quiet or self._is_stopped:
            return
        self._read_message(line, text, process, is_in_traceback=in_traceback)

    def _read_message(
        self, line: LogLine, text: str, process: ProcessTrace, *, is_in_traceback: bool
    ) -> None:
        """Read a line by its form: a part of a traceback, an exception, a proof, or plain words."""
        message = line.text
        evidence = self._evidence
        if evidence.crash.read(message, text, self._lines.number) or evidence.dump.read(message):
            self._lines.attend = MESSAGE_LINES
        is_fatal = (line.is_header or process.is_in_traceback) and self._signatures.is_ending(
            message
        )
        if is_fatal:
            self._record_engine_end(text, process)
        if (
            forms.TRACEBACK.match(message)
            or (is_fatal and "Traceback" in message)
            or message.endswith(forms.TRACEBACK_START)
        ):
            self._start_traceback(line, text, process)
        elif frame := forms.FRAME.match(message):
            self._read_frame(frame, text, process)
        elif _read_mark(message, process):
            pass
        elif exception := forms.EXCEPTION.match(message):
            self._read_exception(exception, line, text, process)
        elif self._prove_line(line, text, process):
            pass
        elif line.is_header and forms.WRAPPER.match(message):
            self._evidence.add_death(text, self._lines.number)
        elif forms.SIDE_NOTE.match(message):
            process.lines_left = 0
        elif process.message is not None and process.lines_left > 0:
            self._continue_message(process.message, line, text, process)
        elif not self._read_code(message, process, text, is_in_traceback=is_in_traceback):
            # A progress bar is not a record of its own.
            self._read_progress(message)
            self._read_plain_line(line, text, process)
            self._read_transfer(line, text, process)

    def _read_level(self, line: LogLine, text: str, process: ProcessTrace) -> None:
        """Read the level of a line, and the beginning of a record."""
        if line.is_native and line.is_quiet:
            process.message = None  # Nothing is survived by it, but a message has ended.
        elif line.is_quiet or (
            line.is_header and line.level is None and not forms.WRAPPER.match(line.text)
        ):
            self._survive(line, process)
        # The level of another program says nothing of the engine.
        is_foreign = line.is_quiet and line.is_native
        if (line.level == "WARNING" or is_foreign) and not self._is_stopped:
            self._prove_line(line, text, process, is_warning=True)
        if (line.is_header or forms.THREAD_DUMP.match(line.text)) and self._evidence.add_record(
            EngineLine(line.text, text, self._lines.number, process, line.is_quiet)
        ):
            self._lines.attend = MESSAGE_LINES

    def _survive(self, line: LogLine, process: ProcessTrace) -> None:
        """Note that the process goes on: it survived its errors so far, except fatal ones."""
        if process.unproven_candidate is not None and not process.is_fatal:
            process.unproven_candidate.is_survived = True
        process.close()
        process.thread_error = None
        if line.is_quiet:
            process.is_fatal = False
            process.serving_error = None
            if self._evidence.is_ignored(process):
                self._lines.attend = 0
        if (
            forms.SHUTDOWN.match(line.text)
            and not self._evidence.candidates
            and self._evidence.death is None
        ):
            self._is_stopped = True
        self._read_progress(line.text)
        if line.level is None:
            self._read_plain_line(line, line.text, process)

    def _read_progress(self, text: str) -> None:
        """Note how far the start is, and which kernels it chose."""
        if self.has_answered:
            return
        evidence = self._evidence
        for row, groups in self._signatures.match_progress(text):
            if row.is_answer:
                self.has_answered = True
                if evidence.is_serving:
                    self._set_serving_anchors()
            if evidence.is_serving:
                continue
            if self.progress.learn(row, groups):
                evidence.hint = None
            if row.phase == "serving":
                self.mark_serving()
                if evidence.death is None:
                    evidence.candidates.clear()

    def _record_engine_end(self, text: str, process: ProcessTrace) -> None:
        process.is_fatal = True
        self._lines.attend = MESSAGE_LINES
        self._lines.anchors = ALARM_WORDS
        self._evidence.record_engine_end(text, self._lines.number)

    def _start_traceback(self, line: LogLine, text: str, process: ProcessTrace) -> None:
        self._lines.attend = MESSAGE_LINES
        if line.text.endswith(f", {forms.TRACEBACK_START}"):
            # vLLM's workers also print the message before the traceback
            # (vllm/executor/multiproc_worker_utils.py, 0.5 and 0.6).
            self._read_plain_line(line, text, process)
        process.is_ignored = process.is_ignored and not process.is_in_traceback
        process.message = None
        process.is_in_traceback = True
        process.lines_left = 0
        process.frames.clear()
        process.files.clear()
        process.codes.clear()
        process.layer = process.assertion = process.source = ""

    def _read_frame(self, frame: re.Match[str], text: str, process: ProcessTrace) -> None:
        self._lines.attend = max(self._lines.attend, 20)
        process.message = None
        process.file, process.indent = frame["file"], len(frame["indent"])
        process.frames.append(frame["function"] or "")
        process.files.append(f"{frame['file']}:{frame['function'] or ''}")
        process.codes.append("")
        self._record_cut_traceback(text, process)
        # The traceback of a request is read as long as its faults are counted.
        evidence = self._evidence
        if (
            evidence.is_ignored(process)
            and forms.REQUEST.search(process.files[-1])
            and evidence.has_faults
        ):
            self._lines.attend = 0

    def _read_exception(
        self, exception: re.Match[str], line: LogLine, text: str, process: ProcessTrace
    ) -> None:
        evidence = self._evidence
        former_traceback = _Traceback.read_process(process)
        process.close()
        if forms.BENIGN_EXCEPTION.match(line.text):
            self._read_benign(line, text, process, is_framed=former_traceback.is_framed)
            return
        if self._has_left_loop(former_traceback, process):
            former_traceback = former_traceback._replace(is_ignored=False)
            if evidence.is_ignored(process):
                self._record_engine_end(text, process)
        shape = ExceptionShape(
            exception=exception["name"],
            message=line.text[exception.end() :] or process.assertion,
            frames=tuple(process.files),
            phase=evidence.phase(None, process),
            source=process.source,
            codes=tuple(process.codes),
        )
        if not self._is_survived(former_traceback, shape, line, text, process):
            self._prove_exception(former_traceback, shape, line, text, process)

    def _has_left_loop(self, former_traceback: _Traceback, process: ProcessTrace) -> bool:
        """Whether an exception left the loop of a process, or of a thread that must go on."""
        signatures = self._signatures
        if former_traceback.is_ignored and not signatures.thread_loops.isdisjoint(process.frames):
            return process.ends_thread
        is_outside_requests = not process.is_in_request
        return is_outside_requests and not signatures.main_loops.isdisjoint(process.frames)

    def _is_survived(
        self,
        former_traceback: _Traceback,
        shape: ExceptionShape,
        line: LogLine,
        text: str,
        process: ProcessTrace,
    ) -> bool:
        """Whether the engine survives an exception, which then is noted for the end of the log."""
        evidence = self._evidence
        if former_traceback.is_ignored and process.ends_thread:
            self._record_thread_end(line, text, shape, process)
            return True
        is_bare = not (former_traceback.is_traced or process.is_fatal)
        if former_traceback.is_ignored or (
            evidence.is_serving and (is_bare or process.is_in_request)
        ):
            is_worker_fault = bool(
                is_bare and line.level == "ERROR" and _COMPUTING_PROCESS.search(line.process)
            )
            is_noted = (
                former_traceback.is_traced or is_worker_fault
            ) and not former_traceback.is_ignored
            if is_noted and evidence.is_ignored(process):
                evidence.record_fault(
                    self._unproven_candidate(text, shape), is_of_worker=is_worker_fault
                )
            return True
        return False

    def _prove_exception(
        self,
        former_traceback: _Traceback,
        shape: ExceptionShape,
        line: LogLine,
        text: str,
        process: ProcessTrace,
    ) -> None:
        """Add an exception to the candidates, with its proof; a wrapper only names a death."""
        evidence = self._evidence
        is_bare = not (former_traceback.is_traced or process.is_fatal)
        proof = evidence.prove_exception(line.text, process)
        if proof is None and forms.WRAPPER.match(line.text):
            if not evidence.is_ignored(process):
                evidence.add_death(text, self._lines.number)
            return
        self._lines.attend = max(self._lines.attend, 8)
        message = former_traceback.message
        if proof and message and not former_traceback.is_traced and _quotes_cause(message, proof):
            message.quote(proof, line.text)
            return
        if proof is not None and proof[0].while_serving and evidence.is_ignored(process):
            self._record_engine_end(text, process)
        self._replace_former(former_traceback, proof, shape, process)
        candidate = self._candidate(proof, text, process)
        candidate.shape = shape._replace(phase=candidate.phase)
        candidate.is_bare = is_bare and proof is None
        candidate.set_message(line.text, len(text))
        self._add_candidate(candidate, process, line)

    def _record_thread_end(
        self, line: LogLine, text: str, shape: ExceptionShape, process: ProcessTrace
    ) -> None:
        """Read the exception of a thread, which does not end the engine.

        The exception is the failure if nothing else is found, or if the engine ends next.
        """
        evidence = self._evidence
        if not evidence.is_serving:
            proof = evidence.prove_exception(line.text, process)
            if proof is not None and evidence.thread_failure is None:
                evidence.thread_failure = self._candidate(proof, text, process)
                evidence.thread_failure.shape = shape
            if not self._add_hint(line, text, process) and not evidence.quoted_candidates:
                evidence.quoted_candidates = (self._unproven_candidate(text, shape),)
        else:
            proof = evidence.prove_exception(line.text, process)
            process.thread_error = self._candidate(proof, text, process)
            process.thread_error.shape = shape

    def _replace_former(
        self,
        former_traceback: _Traceback,
        proof: Proof | None,
        shape: ExceptionShape,
        process: ProcessTrace,
    ) -> None:
        """Remove or update the candidate that an exception replaces or wraps."""
        former_candidate = process.unproven_candidate
        candidates = self._evidence.candidates
        timed_out = (
            former_traceback.has_cause
            and former_candidate is not None
            and former_candidate.shape.is_bare_timeout
        )
        is_vague = proof is None or proof[0].kind == "unknown"
        if (
            (is_vague and former_traceback.replaces_former) or timed_out
        ) and former_candidate in candidates:
            candidates.remove(former_candidate)
        if former_traceback.has_cause and former_candidate is not None:
            # The wrapper of an error is raised further out, where frames show the phase better.
            former_candidate.set_phase(shape.phase)

    def _read_benign(
        self, line: LogLine, text: str, process: ProcessTrace, *, is_framed: bool
    ) -> None:
        """Read an exception that is not a failure. The rest of its message is as benign."""
        number = self._lines.number
        evidence = self._evidence
        if (
            is_framed
            and not evidence.is_ignored(process)
            and process.files
            and forms.PIPE.search(process.files[-1])
        ):
            evidence.add_death(text, number)
        process.message = FailureCandidate(
            row=None, culprit={}, line=text, number=number, phase=self.progress.phase
        )
        process.has_header = line.is_header
        process.lines_left = MESSAGE_LINES

    def _continue_message(
        self, candidate: FailureCandidate, line: LogLine, text: str, process: ProcessTrace
    ) -> None:
        """Read one more line of the message of an exception."""
        process.lines_left -= 1
        may_be_broken = (
            self._lines.number - candidate.number < _MAX_LINE_PARTS
            and not forms.PROCESS_END.match(line.text)
        )
        if line.is_header is not process.has_header and (line.is_header or not may_be_broken):
            process.close()
            return
        evidence = self._evidence
        line_proof = evidence.prove_exception(line.text, process)
        if line_proof is not None and line_proof[1]:
            evidence.read_precise_line(line.text, text, self._lines.number, process)
        proof = line_proof if candidate.row is None else None
        line_and_number = text, self._lines.number
        is_clearer = False
        if proof is None and may_be_broken:
            line_and_number = candidate.line, candidate.number
            joined_text, spaced_text = candidate.join(line.text.strip(), len(text))
            proof = evidence.prove_exception(joined_text, process) or evidence.prove_exception(
                spaced_text, process
            )
            # A proof in the whole message, and in neither part, is nearer to the cause than the
            # proof in its beginning.
            is_clearer = (
                proof is not None
                and candidate.row is not proof[0]
                and (line_proof is None or line_proof[0] is not proof[0])
            )
        if proof is not None and candidate.row is None:
            candidate.line, candidate.number = line_and_number
            if proof is line_proof:
                candidate.set_message(line.text, len(text))
                candidate.shape = candidate.shape._replace(message=line.text.strip())
            self._lines.attend = MESSAGE_LINES
        if proof is not None and (
            candidate.row is None or is_clearer or proof[1].items() > candidate.culprit.items()
        ):
            if line_proof is not None and line_proof[1] and not candidate.culprit:
                candidate.line, candidate.number = text, self._lines.number
            candidate.row, candidate.culprit = proof[0], evidence.culprit_values(proof, process)
            candidate.phase = evidence.phase(proof[0], process)
            return
        if candidate.row is not None:
            candidate.culprit |= self._signatures.read_details(candidate.row, line.text)
        self._lines.attend = max(self._lines.attend, 3)

    def _read_code(
        self, text: str, process: ProcessTrace, line_text: str, *, is_in_traceback: bool
    ) -> bool:
        """Note a line of code in a traceback. Returns whether the line is one."""
        if raise_match := forms.RAISE.match(text):
            self._record_cut_traceback(line_text, process, raise_match[1])
        elif assertion_match := forms.ASSERT.match(text):
            process.assertion = assertion_match[1]
            self._record_cut_traceback(assertion_match[1], process, "AssertionError")
        elif not (process.is_in_traceback and text[:1].isspace()) and not (
            is_in_traceback and _indent(text) > process.indent
        ):
            return False
        elif forms.UNDERLINE.match(text):
            return True
        else:
            process.source = text.strip()
            if "/models/" in process.file or "/mamba/" in process.file:
                layer = forms.LAYER.search(text)
                if layer and layer[1] not in forms.NOT_LAYERS:
                    process.layer = layer[1]
        if process.codes and not process.codes[-1]:
            process.codes[-1] = text.strip()
        return True

    def _record_cut_traceback(self, text: str, process: ProcessTrace, exception: str = "") -> None:
        """Note the traceback so far: the log may end in it."""
        evidence = self._evidence
        in_request = process.is_in_handler or (evidence.is_serving and process.is_in_request)
        if not (evidence.is_ignored(process) or process.is_ignored or in_request):
            phase = evidence.phase(None, process)
            shape = ExceptionShape(exception, text, tuple(process.files), phase)
            process.cut_off = self._unproven_candidate(text, shape)

    def _read_plain_line(self, line: LogLine, text: str, process: ProcessTrace) -> None:
        """Read a line that is not an exception: it counts where the log ends without a failure."""
        evidence = self._evidence
        if evidence.is_ignored(process):
            return
        engine_line = EngineLine(line.text, text, self._lines.number, process, line.is_quiet)
        if forms.HARMLESS_TEXT.search(line.text):
            if line.level == "ERROR" and forms.TOLERATED_ERROR.search(line.text):
                evidence.record_tolerated_error(engine_line)
            return
        evidence.add_plain_line(engine_line)
        if not forms.COMPLAINT.search(text):
            return
        shape = ExceptionShape("", line.text, tuple(process.files), self.progress.phase)
        if line.level is not None or not line.is_header or forms.FAILURE_WORD.search(text):
            evidence.add_complaint(self._unproven_candidate(text, shape))
        if self._add_hint(line, text, process) or evidence.quoted_candidates:
            return
        if quotation := forms.QUOTED_EXCEPTION.search(line.text):
            shape = shape._replace(exception=quotation["name"])
            evidence.quoted_candidates = (
                self._unproven_candidate(text, shape._replace(message=quotation["message"])),
                self._unproven_candidate(text, shape),
            )

    def _read_transfer(self, line: LogLine, text: str, process: ProcessTrace) -> None:
        """Note a failed transfer of a request, which the serving engine reports in one record."""
        failure = forms.TRANSFER_FAILURE.match(line.text) if line.is_header else None
        if failure is not None and self._evidence.is_ignored(process):
            request = forms.REQUEST_ID.search(failure["request"])
            message = failure["message"] or line.text
            shape = ExceptionShape(failure["name"] or "", message, (), "serving")
            candidate = self._unproven_candidate(text, shape)
            self._evidence.record_transfer(candidate, request["id"] if request else "")

    def _add_hint(self, line: LogLine, text: str, process: ProcessTrace) -> bool:
        return self._evidence.add_hint(line.text, text, self._lines.number, process)

    def _prove_line(
        self, line: LogLine, text: str, process: ProcessTrace, *, is_warning: bool = False
    ) -> bool:
        """Add a line that proves a failure without an exception. Returns whether it does."""
        proof = self._evidence.prove_line(line.text, process, is_warning=is_warning)
        if proof is None:
            return False
        phase = self._evidence.phase(proof[0], process)
        self._add_candidate(
            FailureCandidate(*proof, text, self._lines.number, phase), process, line
        )
        return True

    def _candidate(self, proof: Proof | None, text: str, process: ProcessTrace) -> FailureCandidate:
        """The line as a candidate for the failure, with or without a proof."""
        evidence = self._evidence
        row = proof[0] if proof else None
        phase = evidence.phase(row, process)
        culprit = evidence.culprit_values(proof, process) if proof else {}
        return FailureCandidate(row, culprit, text, self._lines.number, phase)

    def _unproven_candidate(self, text: str, shape: ExceptionShape) -> FailureCandidate:
        return FailureCandidate.unproven(text, self._lines.number, shape)

    def _add_candidate(
        self, candidate: FailureCandidate, process: ProcessTrace, line: LogLine
    ) -> None:
        row = candidate.row
        evidence = self._evidence
        if evidence.is_ignored(process) and not (isinstance(row, TextSignature) and row.line_start):
            if row is None or candidate.phase != WAKE_PHASE:
                process.serving_error = process.serving_error or candidate
            evidence.record_fault(candidate)
        else:
            evidence.add(candidate)
        process.message = candidate
        process.has_header = line.is_header
        process.lines_left = MESSAGE_LINES
        self._lines.attend = max(self._lines.attend, 8 if row is None else 20)
        if row is None:
            process.unproven_candidate = candidate


def _quotes_cause(candidate: FailureCandidate, proof: Proof) -> bool:
    """Whether the message quotes an exception of the same failure kind with more detail."""
    return (
        candidate.row is not None
        and not candidate.culprit
        and candidate.kind == proof[0].kind
        and bool(proof[1])
    )


def _read_mark(text: str, process: ProcessTrace) -> bool:
    """Note Python's line on the next exception. Returns whether the line is one."""
    if forms.IGNORED_EXCEPTION.match(text):
        process.is_ignored = True
        process.is_in_traceback = False
        process.ends_thread = "in thread" in text
    elif text.startswith("During handling of the above exception"):
        process.replaces_former = True
    elif forms.CAUSE_NOTE.match(text):
        process.has_cause = True
    else:
        return False
    return True


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
