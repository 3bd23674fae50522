"""The evidence in one log: candidates for its failure, as its lines are read. Pure.

verdict.py decides which candidate is the cause.
"""

from __future__ import annotations

import re
from collections import deque

from gateway.diagnosis.candidate import (
    DEATH,
    MAX_FAILED_REQUESTS,
    WAKE_PHASE,
    EngineLine,
    FailureCandidate,
    ProcessTrace,
)
from gateway.diagnosis.crash_stack import CrashStack
from gateway.diagnosis.cures import FAULTS
from gateway.diagnosis.lines import line_forms as forms
from gateway.diagnosis.lines.thread_dump import ThreadDump
from gateway.diagnosis.options import StartOptions
from gateway.diagnosis.progress import StartProgress
from gateway.diagnosis.signature import FailureSignature, TextSignature
from gateway.diagnosis.signatures import Signatures
from gateway.diagnosis.structure import (
    ADVICE,
    ENGINE_CODE,
    FLAG,
    ExceptionShape,
    asks_for_option,
)
from gateway.domain import Scalar

# All of these are more than any engine needs, and bounded.
_MAX_PROCESSES = 256
_MAX_CANDIDATES = 64
_MAX_BARE_CANDIDATES = 8
_MAX_COMPLAINTS = 16
_RECENT_LINES = 8
# A log of at most this many lines is read whole, even lines that do not complain.
_SHORT_LINES = 4
# No dump of threads is longer.
_DUMP_LINES = 60
# Lines between the error after which a machine stands still and the end of its log.
_END_LINES = 10
# An engine that stands still: SGLang's watchdog dumps the threads of an idle process, and a process
# of vLLM waits for another.
_WATCHDOG_MESSAGES = ("Pyspy dump", "No available shared memory broadcast block")
# vLLM repeats this line every ten seconds. So many in a row without a progress bar are a hang.
_WAITS = "Waiting for "
_REPEATS = 5
# It doubles the time between lines of this kind, so two of them are a long wait.
_RARE_WAITS = "Waiting for creating a placement group"
_DIGITS = re.compile(r"\d+")
# An engine that did not get its memory back as it woke up computes on memory that is not there, so
# it fails within this many lines.
_WAKE_LINES = 500
# Faults of requests that are noted. No request decides whether the server has a template, a package
# or a permission.
_MAX_FAULTS = 16
_PROGRAM_FAULTS = FAULTS | {"ImportError", "ModuleNotFoundError", "PermissionError"}
_REQUEST_FAULTS = _PROGRAM_FAULTS | {
    "ChatTemplateResolutionError",
    "NotImplementedError",
    "RuntimeError",
    "TemplateAssertionError",
    "TemplateSyntaxError",
}
# A parser reads the text of the model, so an answer that it cannot read is not a fault of a client.
# A client may send it back, and each time it passes the same code.
_PARSER = re.compile(
    r"tool_pars|reasoning_pars|/reasoning/|_tool_parser|function_call|chat_utils\.py:"
)
_STANDARD_LIBRARY = re.compile(
    r"/python3(?:\.\d+)?/(?!(?:site|dist)-packages/)|\A<|json/decoder\.py"
)
# Lines in which an engine says how to avoid its failure: the number kept, and for how many lines.
_MAX_ADVICE = 4
_MAX_ADVICE_LINES = 40
# Code of an engine, or of a library that it calls, and none that only carries requests.
_OWN_CODE = re.compile(
    r"(?:packages/|/)(?:vllm|sglang|transformers|tokenizers|xgrammar|outlines|torch|PIL"
    r"|mistral_common)/"
)
_CARRIES = re.compile(
    r"/(?:starlette|fastapi|uvicorn|anyio|h11|httptools|aiohttp|httpx|httpcore|zmq|pydantic\w*)/"
)
# An exception that nothing caught on its way to the web server, which answers with status 500.
_UNCAUGHT = re.compile(r"/uvicorn/protocols/")

Proof = tuple[TextSignature, dict[str, Scalar]]


class LogEvidence:
    """The state of one log's evidence.

    engine: KIND or KIND==VERSION; None: any row may hold.
    circumstances: those that the lines of the start showed.
    options: those of the start.
    death: the first line that says that a process ended, with its number.
    hint: a known text in a line that is not an exception.
    thread_failure: a known exception that ended a thread of the start, which nothing restarts.
    quoted_candidates: an exception in the middle of a line, as quoted and as the whole line.
    precise_lines: the first line with a known text that names a value, by kind of failure.
    complaints: lines that complain of nothing known.
    warning: a known text of the last lines.
    last_error: the last line that counts only where the log ends next to it.
    faults: errors of requests, by exception and place, with their number.
    failed_requests: answers with status 500 since the engine serves.
    has_request_error: the traceback of a request was read since then.
    kernel_check: the first check in a kernel that failed.
    tolerated: the last error of the start that the engine said it ignores.
    is_ending: the engine itself ends.
    """

    def __init__(self, signatures: Signatures, engine: str | None) -> None:
        self.progress = StartProgress()
        self.circumstances: dict[str, Scalar] = {}
        self.options = StartOptions()
        self.is_serving = False
        self.is_ending = False
        self.processes: dict[str, ProcessTrace] = {}
        self.candidates: list[FailureCandidate] = []
        self._weakest_rank = DEATH
        """The weakest rank of a full list of candidates: an equal one finds no room."""
        self.death: tuple[str, int] | None = None
        self.hint: FailureCandidate | None = None
        self.thread_failure: FailureCandidate | None = None
        self.precise_lines: dict[str, FailureCandidate] = {}
        self.quoted_candidates: tuple[FailureCandidate, ...] = ()
        self.crash = CrashStack()
        self.dump = ThreadDump()
        self.complaints: list[FailureCandidate] = []
        self.faults: dict[tuple[str, str], tuple[FailureCandidate, int]] = {}
        self.failed_requests = 0
        self.has_request_error = False
        self.kernel_check = ""
        self.tolerated: FailureCandidate | None = None
        self._failed_transfers: set[str] = set()
        self._wake_failure: FailureCandidate | None = None
        self._advice: deque[tuple[int, str]] = deque(maxlen=_MAX_ADVICE)
        self.crashed: FailureCandidate | None = None
        self.warning: FailureCandidate | None = None
        self.last_error: FailureCandidate | None = None
        self._first: list[EngineLine] = []
        self._recent: deque[EngineLine] = deque(maxlen=_RECENT_LINES)
        self._records: deque[EngineLine] = deque(maxlen=_REPEATS)
        self._signatures = signatures
        self._engine = (engine or "").partition("==")[0] or None

    def process(self, name: str) -> ProcessTrace:
        """The process of that name; beyond a bound the first one."""
        if name not in self.processes:
            if len(self.processes) >= _MAX_PROCESSES:
                return next(iter(self.processes.values()))
            self.processes[name] = ProcessTrace()
        return self.processes[name]

    def is_ignored(self, process: ProcessTrace) -> bool:
        """Whether errors of this process prove nothing, because the engine serves."""
        return self.is_serving and not (self.is_ending or process.is_fatal)

    # Proofs

    def prove_line(
        self, text: str, process: ProcessTrace, *, is_warning: bool = False
    ) -> Proof | None:
        """The proof in a line that is not an exception."""
        proof = self._signatures.match_text(
            text, self._engine, frozenset(process.frames), is_line=True
        )
        if proof is None or (is_warning and not proof[0].printed_as_warning):
            return None
        if proof[0].is_end_only:
            return None
        return proof if proof[0].while_serving or not self.is_ignored(process) else None

    def prove_text(self, text: str, process: ProcessTrace | None = None) -> Proof | None:
        """The proof in a text, whether or not an exception says it."""
        frames = frozenset(process.frames if process is not None else ())
        return self._signatures.match_text(text, self._engine, frames, is_line=False)

    def prove_exception(self, text: str, process: ProcessTrace) -> Proof | None:
        """The proof in the text of an exception. A request meets no failure of a start."""
        proof = self.prove_text(text, process)
        possible = proof and (
            self._signatures.can_fail_serving(proof[0].kind) or not process.is_in_handler
        )
        return proof if possible else None

    def culprit_values(self, proof: Proof, process: ProcessTrace) -> dict[str, Scalar]:
        """The values of a proof, with kernel and layer where a kernel or engine failed."""
        row, groups = proof
        if row.proves not in ("kernel", "engine"):
            return groups
        kernel = row.kernel
        pattern = row.kernel_pattern
        for function in process.frames:
            if (mark := self._signatures.frames.get(function)) and mark.kernel:
                kernel = mark.kernel
                pattern = mark.kernel_pattern
        kernels = reversed(self.progress.kernels) if pattern else ()
        kernel = next((name for name in kernels if re.fullmatch(pattern, name)), kernel)
        traced: dict[str, Scalar] = {"kernel": kernel} if kernel else {}
        return traced | ({"layer": process.layer} if process.layer else {}) | groups

    def phase(self, row: FailureSignature | None, process: ProcessTrace) -> str:
        """The phase of a failure: by its row, its traceback, or the progress of the start."""
        if row is not None and row.phase:
            return row.phase
        if process.is_in_handler:
            return "serving"
        phases = [
            mark.phase
            for function in process.frames
            if (mark := self._signatures.frames.get(function)) and mark.phase
        ]
        # A start computes too, in order to measure; an engine that serves does not start.
        starting = (phase for phase in reversed(phases) if phase != "serving")
        return next(starting, phases[-1] if phases else self.progress.phase)

    # Collecting

    def add(self, candidate: FailureCandidate) -> None:
        """Add a candidate, as far as there is room."""
        bare_candidates = (
            [known_candidate for known_candidate in self.candidates if known_candidate.is_bare]
            if candidate.is_bare
            else []
        )
        if len(bare_candidates) >= _MAX_BARE_CANDIDATES:
            return
        if len(self.candidates) < _MAX_CANDIDATES:
            self.candidates.append(candidate)
            self._weakest_rank = DEATH
        elif candidate.rank < self._weakest_rank:
            # A flood of symptoms leaves room for their cause.
            weakest = max(
                self.candidates,
                key=lambda rival_candidate: (rival_candidate.rank, rival_candidate.number),
            )
            if candidate.rank < weakest.rank:
                self.candidates.remove(weakest)
                self.candidates.append(candidate)
            self._weakest_rank = max(candidate.rank for candidate in self.candidates)

    def add_death(self, text: str, number: int) -> None:
        """Add a line that says that a process ended.

        The first counts, unless a later item quotes the error of the process.
        """
        quotes = forms.RELAYED_ERROR.search
        if self.death is None or (quotes(text) and not quotes(self.death[0])):
            self.death = text, number

    def add_complaint(self, candidate: FailureCandidate) -> None:
        """Add a line that complains of nothing known, as far as there is room."""
        if len(self.complaints) < _MAX_COMPLAINTS:
            self.complaints.append(candidate)

    def add_hint(self, message: str, text: str, number: int, process: ProcessTrace) -> bool:
        """Add a known text in a line that is not an exception. Returns whether the log has a hint
        now."""
        known_text = self.read_precise_line(message, text, number, process)
        self.hint = self.hint or known_text
        return self.hint is not None

    def read_precise_line(
        self, message: str, text: str, number: int, process: ProcessTrace
    ) -> FailureCandidate | None:
        """The known text in a line, which is remembered if it names a value."""
        known_text = self._known_text(message, text, number, process)
        if known_text is not None and known_text.culprit:
            self.precise_lines.setdefault(known_text.kind, known_text)
        return known_text

    def add_record(self, line: EngineLine) -> bool:
        """Remember a line that begins a record. Returns whether it is one of an engine that
        hangs."""
        self._records.append(line)
        if not line.is_quiet or not forms.HARMLESS_TEXT.search(line.message):
            self._recent.append(line)
        return line.message.startswith(_WATCHDOG_MESSAGES)

    def read_last_error(self, line: EngineLine) -> None:
        """Remember a line that counts only where the log ends next to it."""
        proof = self._signatures.match_text(line.message, self._engine, frozenset(), is_line=True)
        if proof is not None and proof[0].is_end_only:
            phase = self.phase(proof[0], line.process)
            self.last_error = FailureCandidate(*proof, line.text, line.number, phase)

    def add_plain_line(self, line: EngineLine) -> None:
        """Remember a line that is not an exception and belongs to none."""
        if len(self._first) < _SHORT_LINES:
            self._first.append(line)

    def read_advice(self, text: str, number: int) -> None:
        """Remember a line of a start that says how to avoid a failure."""
        if "--" not in text or (begin := ADVICE.search(text)) is None:
            return
        # One expression for both would read the rest of the line once for each such word.
        if FLAG.search(text, begin.end()):
            self._advice.append((number, text))

    def advice_near(self, number: int) -> tuple[str, ...]:
        """The lines with advice that stand near a line of the log, and are not that line."""
        return tuple(text for at, text in self._advice if 0 < abs(at - number) <= _MAX_ADVICE_LINES)

    def record_engine_end(self, text: str, number: int) -> None:
        """Note that the engine ends: errors since it serves that it did not survive count now."""
        self.add_death(text, number)
        if self.is_serving and not self.is_ending:
            errors = [
                trace.serving_error or trace.thread_error for trace in self.processes.values()
            ]
            for candidate in sorted(filter(None, errors), key=lambda candidate: candidate.number):
                self.add(candidate)
            wake_failure = self._wake_failure
            if wake_failure is not None and number - wake_failure.number <= _WAKE_LINES:
                self.add(wake_failure)
        self.is_ending = True

    @property
    def has_faults(self) -> bool:
        """Whether enough faults of requests are noted."""
        return sum(number for _, number in self.faults.values()) >= _MAX_FAULTS

    def record_fault(self, candidate: FailureCandidate, *, is_of_worker: bool = False) -> None:
        """Note an error of a request that the serving engine survives.

        is_of_worker: a process that computes says so, and not the one that reads requests.
        """
        self.has_request_error = True
        shape = candidate.shape
        if candidate.phase == WAKE_PHASE and candidate.row is not None:
            self._wake_failure = candidate
        raising_frame = next(
            (f for f in reversed(shape.frames) if not _STANDARD_LIBRARY.search(f)), ""
        )
        is_fault = _is_fault(shape, raising_frame) or asks_for_option(shape)
        if self.has_faults or not (is_of_worker or is_fault):
            return
        first, number = self.faults.get((shape.exception, raising_frame), (candidate, 0))
        self.faults[shape.exception, raising_frame] = first, number + 1

    def read_kernel_check(self, message: str) -> None:
        """Note the first check in a kernel that failed."""
        if "Assertion `" in message and not self.kernel_check:
            match = forms.KERNEL_CHECK.search(message)
            self.kernel_check = match["check"] if match else ""

    def record_status(self, message: str) -> bool:
        """Note an answer with status 500, which the web server reports. Returns whether it is the
        last that is counted."""
        if self.failed_requests >= MAX_FAILED_REQUESTS or not forms.FAILED_REQUEST.match(message):
            return False
        self.failed_requests += 1
        return self.failed_requests == MAX_FAILED_REQUESTS

    def record_tolerated_error(self, line: EngineLine) -> None:
        """Note an error that a start said it ignores: a death may follow from it."""
        phase = self.progress.phase
        shape = ExceptionShape("", line.message, (), phase)
        self.tolerated = self._known_text(
            line.message, line.text, line.number, line.process
        ) or FailureCandidate.unproven(line.text, line.number, shape)

    def record_transfer(self, candidate: FailureCandidate, request: str) -> None:
        """Note a failed transfer of a request. Both sides may report it, so its name counts once.

        request: the name of the request; empty where the line has none.
        """
        if self.has_faults or request in self._failed_transfers:
            return
        if request:
            self._failed_transfers.add(request)
        self.record_fault(candidate, is_of_worker=True)

    def close(self, lines: int, *, is_healthy: bool) -> None:
        """End the log after this many lines. is_healthy: whether the engine had started."""
        phase = self.progress.phase
        if self.crash.number:
            self.crashed = self.crash.candidate(phase)
        if not self.candidates and (hang := self._hang(lines, is_healthy=is_healthy)) is not None:
            self.add(hang)
        is_unexplained = not self.candidates and self.death is None
        last_error = self.last_error
        if last_error is not None and is_unexplained and lines - last_error.number <= _END_LINES:
            self.add(last_error)
        if not is_unexplained or is_healthy:
            return
        if lines <= _SHORT_LINES:
            for line in self._first:
                self._add_pasted_line(line, phase)
        # Where the log ends in a traceback, the failure may stand before it.
        is_cut = any(trace.is_in_traceback or trace.cut_off for trace in self.processes.values())
        for line in self._recent:
            known_text = self._known_text(line.message, line.text, line.number, line.process)
            if known_text is not None and (
                is_cut
                or (isinstance(known_text.row, TextSignature) and known_text.row.printed_as_warning)
            ):
                self.warning = known_text
                return

    def _known_text(
        self, message: str, text: str, number: int, process: ProcessTrace
    ) -> FailureCandidate | None:
        proof = self.prove_text(message, process)
        if proof is None:
            return None
        phase = self.phase(proof[0], process)
        return FailureCandidate(*proof, text, number, phase, is_bare=True)

    def _hang(self, lines: int, *, is_healthy: bool) -> FailureCandidate | None:
        """The engine waits, as its last records repeat, or as one of a serving engine says."""
        last = self._records[-1] if self._records else None
        if last is None or lines - last.number > _DUMP_LINES:
            return None
        starts = last.message.startswith(_WAITS) and not last.message.startswith(_RARE_WAITS)
        records = list(self._records)[-_REPEATS if starts else -2 :]
        are_equal = len({_DIGITS.sub("", record.message) for record in records}) == 1 < len(records)
        are_consecutive = last.number - records[0].number == len(records) - 1 == _REPEATS - 1
        if not ((are_equal and (are_consecutive or not starts)) or is_healthy or not last.is_quiet):
            return None
        known_text = self._known_text(last.message, last.text, last.number, last.process)
        return known_text if known_text is not None and known_text.kind == "hang" else None

    def _add_pasted_line(self, line: EngineLine, phase: str) -> None:
        """Add one of a few pasted lines, which may lack the name of the exception."""
        code = forms.CODE.search(line.message)
        message = code[1] if code else line.message
        shape = ExceptionShape("", message, (), phase)
        if forms.WRAPPER.match(message):
            self.add_death(line.text, line.number)
        elif self.add_hint(message, line.text, line.number, line.process) or self._records:
            return  # next to records the line may be the rest of one
        elif worded := forms.PYTHON.match(message.strip()):
            shape = ExceptionShape(worded.lastgroup or "", message.strip(), (), phase)
            self.add(FailureCandidate.unproven(line.text, line.number, shape))
        elif not (
            forms.ACTIVITY.match(message) or (forms.COMPLAINT.search(line.text) and code is None)
        ):
            self.add_complaint(FailureCandidate.unproven(line.text, line.number, shape))
        elif forms.LEVEL.match(line.text):
            self.add(FailureCandidate.unproven(line.text, line.number, shape))


def _is_fault(shape: ExceptionShape, raising_frame: str) -> bool:
    """Whether an error of a request is the program's own. raising_frame: the frame that raised it.

    A request can be wrong, and a library may refuse it so; Python's own faults no request makes.
    """
    if shape.exception == "JSONDecodeError":
        return bool(_PARSER.search(raising_frame))
    if any(map(_UNCAUGHT.search, shape.frames)):
        # The web server answers with status 500, which blames the server, whatever library raised.
        return not _CARRIES.search(raising_frame) and (
            any(map(ENGINE_CODE.search, shape.frames)) or bool(_OWN_CODE.search(raising_frame))
        )
    if shape.exception in _PROGRAM_FAULTS:
        return any(map(ENGINE_CODE.search, shape.frames)) and not _CARRIES.search(raising_frame)
    return shape.exception in _REQUEST_FAULTS and bool(_OWN_CODE.search(raising_frame))
