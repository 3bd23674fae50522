"""The stack of a process that waits, as py-spy prints it. Pure."""

from __future__ import annotations

from gateway.diagnosis.lines import line_forms as forms

_MAX_FRAMES = 60


class ThreadDump:
    """The first thread of a dump, which is the main one."""

    def __init__(self) -> None:
        self._frames: list[str] = []
        self._threads = 0

    def read(self, message: str) -> bool:
        """Read one more line of the log. Returns whether it begins a thread of a dump."""
        if forms.DUMP_START.match(message):
            self._threads += not self._threads or bool(self._frames)
            return True
        frame = forms.DUMP_FRAME.match(message)
        if frame and self._threads == 1 and len(self._frames) < _MAX_FRAMES:
            self._frames.append(f"{frame['file']}:{frame['function']}")
        return False

    @property
    def frames(self) -> tuple[str, ...]:
        """The functions on the stack as `file:function`, the innermost last."""
        return tuple(reversed(self._frames))
