"""Where a process crashed in compiled code: the stack that Python's fault handler or a library
prints as it dies. Pure."""

from __future__ import annotations

import re

from gateway.diagnosis.structure import Shape

# Of a stack these say what crashed; what is further out called it.
_INNERMOST = 8
_BEGINS = re.compile(r"(?:Current thread 0x[0-9a-f]+.{0,60}|Stack) \(most recent call first\):")
_OTHER = re.compile(r"Thread 0x[0-9a-f]+.{0,60} \(most recent call first\):")
_PYTHON = re.compile(r'\s*File "(?P<file>[^"]+)", line \d+ in (?P<function>[\w<>.]+)$')
# absl's, which Ray prints too: an address, the size of the frame, and its symbol.
_NATIVE = re.compile(
    r"(?:.{0,80}\.cc:\d+: )?\s*(?:PC: )?@ +0x[0-9a-f]+ +\S+ +(?P<symbol>(?!\(unknown\))\S+)"
)


class Crash:
    """The first stack of a log. `number`: the line where it begins; 0: there is none."""

    def __init__(self) -> None:
        self.number = 0
        self.line = ""
        self._frames: list[str] = []
        self._symbols: dict[str, None] = {}
        # A stack whose beginning is missing is read too.
        self._open = True

    def read(self, said: str, text: str, number: int) -> None:
        """One more line of the log, by what it says."""
        if frame := _PYTHON.match(said):
            if self._open and len(self._frames) < _INNERMOST:
                self._frames.append(f"{frame['file']}:{frame['function']}")
                self._begin(text, number)
        elif native := _NATIVE.match(said):
            self._symbols[native["symbol"]] = None
            self._begin(text, number)
        elif self._frames:
            self._open = False
        elif _BEGINS.match(said):
            self._open = True
            self._begin(text, number)
        elif _OTHER.match(said):
            self._open = False

    def _begin(self, text: str, number: int) -> None:
        if not self.number:
            self.number, self.line = number, text

    def shape(self, phase: str) -> Shape:
        """Its frames as those of a traceback, and the symbols as its message."""
        return Shape("", " ".join(self._symbols), tuple(reversed(self._frames)), phase)
