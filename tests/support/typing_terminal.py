"""A terminal with typed input. A command runs as the foreground job, and its output is read until
given words come."""

from __future__ import annotations

import os
import pty
import select
import termios
import time
from types import TracebackType

from tests.support.forked import Forked
from tests.support.patience import hang_s

AGAIN_S = 1.0


class TypingTerminal:
    """Use as a context manager. `output` is everything that the command has printed."""

    def __init__(self, *arguments: str, columns: int = 80, **environment: str) -> None:
        self._terminal, self._program_end = pty.openpty()
        termios.tcsetwinsize(self._program_end, (24, columns))
        keep = {
            name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
        }
        keep.pop("COLUMNS", None)
        streams = (self._program_end, self._program_end, self._program_end)
        self.process = Forked(
            "gateway.__main__",
            arguments,
            {**keep, "TERM": "xterm", **environment},
            streams,
            terminal=True,
        )
        os.close(self._program_end)
        self.output = ""

    def __enter__(self) -> TypingTerminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, words: str, after: int = 0) -> int:
        """Read until the words come behind the position `after`. Returns the end of the words."""
        while words not in self.output[after:]:
            assert self._read(), f"the command ended without {words!r}: {self.output[-2000:]}"
        return self.output.index(words, after) + len(words)

    def press_interrupt(self, words: str, after: int = 0) -> int:
        """Press Ctrl-C, and again where nothing comes, until the words come; where they end. The
        `input` of CPython does not hear one that comes between
        the print of its prompt and its wait."""
        began = time.monotonic()
        while words not in self.output[after:] and time.monotonic() - began < hang_s():
            self.type("\x03")
            while (
                words not in self.output[after:]
                and select.select([self._terminal], [], [], AGAIN_S)[0]
            ):
                self._read()
        return self.until(words, after)

    def wait_for_exit(self) -> int:
        """The exit code, once all is read."""
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        began = time.monotonic()
        while not select.select([self._terminal], [], [], 0.1)[0]:
            assert time.monotonic() - began < hang_s(), f"nothing more came: {self.output[-2000:]}"
        try:
            piece = os.read(self._terminal, 65536)
        except OSError:  # the last process has closed its side
            return False
        self.output += piece.decode(errors="replace")
        return bool(piece)
