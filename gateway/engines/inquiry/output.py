"""Output of an inquiry, within limits: an image may print anything, without end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gateway.engines.inquiry.inquiry_document import MAX_BYTES, MAX_LINE
from gateway.engines.inquiry.script import MAX_MEMORY
from gateway.errors import HostError

_TAIL_LINES = 20
_MAX_LINE_CHARACTERS = 4096
_HINT = (
    "fitserve plans by its own rules. Check that the image or environment holds the engine that"
    " its name says, and that it works."
)
# SIGKILL, as a shell and as Python report it: Linux sends it where memory is short.
_KILL_EXIT_CODES = (137, -9)


class InquiryOutput:
    """Whole lines of standard output, and the last ones of standard error.

    A line of more than `most_line` bytes, or more than `most_bytes` on both together, is a
    HostError.
    """

    def __init__(self, most_line: int = MAX_LINE, most_bytes: int = MAX_BYTES) -> None:
        self._most_line = most_line
        self._bytes_left = most_bytes
        self._line = bytearray()
        self._words: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._unfinished_line = b""

    def add_output(self, text: bytes) -> Iterator[bytes]:
        """The lines that this piece of standard output completes, without their ends."""
        self._count_bytes(text)
        *lines, tail = text.split(b"\n")
        for piece in lines:
            yield bytes(self._line + piece)
            self._line.clear()
        self._line += tail
        if len(self._line) > self._most_line:
            raise HostError("The engine's answer has a line without an end.", hint=_HINT)

    def add_error_output(self, text: bytes) -> None:
        """A piece of standard error; a line without an end is cut."""
        self._count_bytes(text)
        *lines, tail = (self._unfinished_line + text).split(b"\n")
        self._words.extend(line[-_MAX_LINE_CHARACTERS:] for line in lines if line.strip())
        self._unfinished_line = tail[-_MAX_LINE_CHARACTERS:]

    def exit_error(self, code: int) -> HostError:
        """The error of a process that ended with this exit code. A negative code is a signal."""
        if code in _KILL_EXIT_CODES:
            limit = f"{MAX_MEMORY >> 30} GiB"
            return HostError(
                f"The engine's code could not be run: it was killed. It wanted more than {limit} of"
                " memory, or the machine has none left.",
                hint=_HINT,
            )
        text = (
            self._unfinished_line.strip()
            or (self._words[-1] if self._words else b"it printed nothing")
        ).decode(errors="replace")
        return HostError(
            f"The engine's code could not be run (exit code {code}): {text.strip()[:300]}.",
            hint=_HINT,
        )

    def _count_bytes(self, text: bytes) -> None:
        self._bytes_left -= len(text)
        if self._bytes_left < 0:
            raise HostError("The engine's answer is too long.", hint=_HINT)
