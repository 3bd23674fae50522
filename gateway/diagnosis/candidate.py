"""A candidate for the failure of a log, and the message that each process is printing. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.diagnosis.lines.line_forms import HANDLER, REQUEST
from gateway.diagnosis.signature import FailureSignature, StructuralSignature, TextSignature
from gateway.diagnosis.structure import ExceptionShape
from gateway.domain import Scalar

# Lines of one message or traceback that are remembered: more than any engine needs, and bounded.
MESSAGE_LINES = 60
# The ranks of evidence, the strongest first. A broken device explains every error next to it. A
# symptom, such as an illegal memory access, can have any cause. DEATH: a line that says that a
# process died, and not why.
HARDWARE, CAUSE, SYMPTOM, CONSEQUENCE, UNKNOWN, DEATH = range(6)
# Answers with status 500 that are counted: a flood of them costs no more time.
MAX_FAILED_REQUESTS = 1000
# The phase of an engine that wakes up from sleep.
WAKE_PHASE = "waking"
_HARDWARE_KINDS = frozenset({"gpu_lost"})
_MAX_MESSAGE_CHARACTERS = 2000


@dataclass
class FailureCandidate:
    """A line that may be the failure.

    row: its proof, if any.
    phase: the phase of the start.
    """

    row: FailureSignature | None
    culprit: dict[str, Scalar]
    line: str
    number: int
    phase: str
    is_survived: bool = False
    shape: ExceptionShape = ExceptionShape("", "", (), "")
    is_bare: bool = False
    """An exception without traceback, or less: a failure only once the log has ended."""
    message: str = ""
    columns: int = 0
    last_columns: int = 0

    @classmethod
    def unproven(cls, line: str, number: int, shape: ExceptionShape) -> FailureCandidate:
        return cls(
            row=None,
            culprit={},
            line=line,
            number=number,
            phase=shape.phase,
            shape=shape,
            is_bare=True,
        )

    def set_message(self, message: str, columns: int) -> None:
        """Begin the message with a line of this many columns."""
        self.message = message
        self.columns = columns
        self.last_columns = columns

    def join(self, text: str, columns: int) -> tuple[str, str]:
        """The message with a line that a terminal may have broken off, without and with a space.

        A line that fills the terminal lost no space.
        """
        self.columns = max(columns, self.columns)
        joined_text = self.message + text
        spaced_text = f"{self.message} {text}"
        self.message = (joined_text if self.last_columns >= self.columns - 1 else spaced_text)[
            :_MAX_MESSAGE_CHARACTERS
        ]
        self.last_columns = columns
        if not self.shape.message.startswith("assert "):
            message = self.message.partition(": ")[2] or self.message
            self.shape = self.shape._replace(message=message)
        return joined_text, spaced_text

    def quote(self, proof: tuple[FailureSignature, dict[str, Scalar]], text: str) -> None:
        """Take the proof of an exception in the message, which is nearer to the cause."""
        self.row, self.culprit = proof
        self.shape = self.shape._replace(message=text)

    def set_phase(self, phase: str) -> None:
        self.phase, self.shape = phase, self.shape._replace(phase=phase)

    @property
    def kind(self) -> str:
        return self.row.kind if self.row is not None else "unknown"

    @property
    def rank(self) -> int:
        """The rank of the evidence, of HARDWARE to DEATH."""
        row = self.row
        if row is None or isinstance(row, StructuralSignature):
            return UNKNOWN
        if isinstance(row, TextSignature) and row.consequence:
            return DEATH if row.proves == "nothing" else CONSEQUENCE
        if isinstance(row, TextSignature) and row.is_symptom:
            return SYMPTOM
        return HARDWARE if row.kind in _HARDWARE_KINDS else CAUSE


@dataclass
class ProcessTrace:
    """The error message that one process is printing.

    frames, files: functions of the traceback, and `file:function`, the innermost last.
    codes: the line of code of each.
    indent: columns before its frames.
    assertion, source: its last `assert` and line of code.
    """

    frames: deque[str] = field(default_factory=lambda: deque(maxlen=MESSAGE_LINES))
    files: deque[str] = field(default_factory=lambda: deque(maxlen=MESSAGE_LINES))
    codes: deque[str] = field(default_factory=lambda: deque(maxlen=MESSAGE_LINES))
    file: str = ""
    layer: str = ""
    indent: int = 0
    assertion: str = ""
    source: str = ""
    is_in_traceback: bool = False
    is_ignored: bool = False
    """Python says that it ignores the exception."""
    ends_thread: bool = False
    """The exception is ignored because it ends a thread only."""
    replaces_former: bool = False
    """The next exception was raised while the former was handled."""
    has_cause: bool = False
    """The former exception is the direct cause of the next."""
    is_fatal: bool = False
    """The process called its error fatal."""
    message: FailureCandidate | None = None
    """The candidate to which the next lines belong."""
    has_header: bool = False
    """The lines of the message begin as records do."""
    lines_left: int = 0
    unproven_candidate: FailureCandidate | None = None
    """The last exception that no row knows."""
    cut_off: FailureCandidate | None = None
    """The traceback so far, for a log that ends in it."""
    serving_error: FailureCandidate | None = None
    """The first exception since the engine serves, unless the process went on."""
    thread_error: FailureCandidate | None = None
    """The exception that ended a thread since the engine serves, until the next record."""

    def close(self) -> None:
        """End the message."""
        self.message = self.cut_off = None
        self.is_in_traceback = self.is_ignored = self.replaces_former = self.has_cause = False
        self.lines_left = 0

    @property
    def is_in_request(self) -> bool:
        """Whether the traceback goes through request code: such an error ends no engine."""
        return any(REQUEST.search(file) for file in self.files)

    @property
    def is_in_handler(self) -> bool:
        """Whether the traceback goes through a handler, which nothing calls during a start."""
        return any(HANDLER.search(file) for file in self.files)


class EngineLine(NamedTuple):
    """A line of the log.

    message: its content without prefixes.
    is_quiet: whether its level is below that of an error.
    """

    message: str
    text: str
    number: int
    process: ProcessTrace
    is_quiet: bool
