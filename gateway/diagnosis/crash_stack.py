"""The stack of a process that died in compiled code. Pure."""

from __future__ import annotations

from gateway.diagnosis.candidate import FailureCandidate
from gateway.diagnosis.lines import line_forms as forms
from gateway.diagnosis.structure import ExceptionShape

# The frames of a crash that matter: the outer ones only called them.
_INNER_FRAMES = 8


class CrashStack:
    """The first stack that a process printed as it died in compiled code. number 0: none yet."""

    def __init__(self) -> None:
        self.number = 0
        self.line = ""
        self._frames: list[str] = []
        self._symbols: dict[str, None] = {}
        self._libraries: dict[str, None] = {}
        self._is_open = True  # also a stack without its beginning

    def read(self, message: str, text: str, number: int) -> bool:
        """Read one more line of the log. Returns whether the next ones are a stack of compiled
        code."""
        if frame := forms.STACK_FRAME.match(message):
            if self._is_open and len(self._frames) < _INNER_FRAMES:
                self._frames.append(f"{frame['file']}:{frame['function']}")
                self._record_first_line(text, number)
        elif native := forms.NATIVE_FRAME.match(message):
            self._symbols[native["symbol"]] = None
            self._record_first_line(text, number)
        elif library := forms.LIBRARY_FRAME.match(message):
            if len(self._libraries) < _INNER_FRAMES:
                self._libraries[library["library"]] = None
        elif self._frames:
            self._is_open = False
        elif forms.STACK.match(message):
            self._is_open = True
            self._record_first_line(text, number)
        elif forms.OTHER_STACK.match(message):
            self._is_open = False
        return forms.CAUGHT.search(message) is not None

    @property
    def libraries(self) -> tuple[str, ...]:
        """The files of compiled code on the stack, the innermost first."""
        return tuple(self._libraries)

    @property
    def frames(self) -> tuple[str, ...]:
        """The functions of the program on the stack, the innermost last."""
        return tuple(reversed(self._frames))

    def _record_first_line(self, text: str, number: int) -> None:
        if not self.number:
            self.number = number
            self.line = text

    def candidate(self, phase: str) -> FailureCandidate:
        """The stack's frames as a traceback, and its symbols as the message."""
        shape = ExceptionShape("", " ".join(self._symbols), self.frames, phase)
        return FailureCandidate(
            row=None, culprit={}, line=self.line, number=self.number, phase=phase, shape=shape
        )
