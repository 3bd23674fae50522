"""What may prove to be the failure of a log, and what each process of the engine is printing
meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.diagnosis.lines.line_forms import HANDLER, REQUEST
from gateway.diagnosis.signature import FailureSignature, StructuralSignature, TextSignature
from gateway.diagnosis.structure import Shape
from gateway.domain.value import Scalar

# Lines of one message or traceback that are remembered: more than any engine needs, and bounded.
MESSAGE_LINES = 60
_LONGEST = 2000
# The rank of what tells that a process died, and not why.
TOLD_DEAD = 3

Proof = tuple[TextSignature, dict[str, Scalar]]


@dataclass
class Process:
    """The message that one process of the engine is printing now."""

    frames: deque[str] = field(default_factory=lambda: deque(maxlen=MESSAGE_LINES))
    files: deque[str] = field(default_factory=lambda: deque(maxlen=MESSAGE_LINES))
    file: str = ""
    layer: str = ""
    indent: int = 0
    """How far the frames of its traceback are indented: with a traceback that is indented as a
    whole, its exception is too, but less."""
    asserted: str = ""
    """The `assert` that stood last in the traceback."""
    source: str = ""
    """The line of code that stood last in the traceback."""
    tracing: bool = False
    ignored: bool = False
    thread: bool = False
    """That it is a thread's end which is ignored, and nothing that was told to be."""
    replaces: bool = False
    causes: bool = False
    fatal: bool = False
    open: Candidate | None = None
    header: bool = False
    left: int = 0
    unknown: Candidate | None = None
    cut_off: Candidate | None = None
    served: Candidate | None = None
    """What it raised first while the engine served, and is not known to have survived."""

    def close(self) -> None:
        self.open, self.tracing, self.ignored, self.replaces, self.left, self.cut_off = (
            None,
            False,
            False,
            False,
            0,
            None,
        )
        self.causes = False

    @property
    def of_a_request(self) -> bool:
        """Whether its traceback goes through what handles requests: one that fails there ends no
        engine."""
        return any(REQUEST.search(file) for file in self.files)

    @property
    def of_a_handler(self) -> bool:
        """Whether its traceback goes through what answers one request, which nothing asks before
        the engine serves."""
        return any(HANDLER.search(file) for file in self.files)


@dataclass
class Candidate:
    row: FailureSignature | None
    culprit: dict[str, Scalar]
    line: str
    number: int
    phase: str
    survived: bool = False
    shape: Shape = Shape("", "", (), "")
    bare: bool = False
    """An exception without its traceback, or less: only the end of the log makes it a failure."""
    said: str = ""
    columns: int = 0
    last: int = 0

    @classmethod
    def unproven(cls, line: str, number: int, shape: Shape) -> Candidate:
        """What only the end of the log makes a failure."""
        return cls(None, {}, line, number, shape.phase, shape=shape, bare=True)

    def broken(self, rest: str, columns: int, proof: Callable[[str], Proof | None]) -> Proof | None:
        """What is proven by the message with a line that a terminal has broken off it. Where a line
        fills the terminal no space was lost."""
        self.columns = max(columns, self.columns)
        whole, spaced = self.said + rest, f"{self.said} {rest}"
        self.said = (whole if self.last >= self.columns - 1 else spaced)[:_LONGEST]
        self.last = columns
        if not self.shape.message.startswith("assert "):
            self.shape = self.shape._replace(message=self.said.partition(": ")[2] or self.said)
        return proof(whole) or proof(spaced)

    def tell(self, phase: str) -> None:
        """The phase, once it is known better."""
        self.phase, self.shape = phase, self.shape._replace(phase=phase)

    @property
    def rank(self) -> int:
        """The smaller, the nearer to the root cause: 0 known causes, 1 consequences, 2 unknown
        errors, 3 that another process died."""
        if self.row is None or isinstance(self.row, StructuralSignature):
            return 2
        if not (isinstance(self.row, TextSignature) and self.row.consequence):
            return 0
        return TOLD_DEAD if self.row.proves == "nothing" else 1
