"""The seconds of each phase of a start, by the engine's log. Pure."""

from __future__ import annotations

# A log names its first phase when the engine has been imported, and the last before it answers.
_NAMES = {"starting": "import", "serving": "prove"}


class StartClock:
    """The phases of one start: import, then those of `StartProgress`, then prove. Times are seconds
    of one clock."""

    def __init__(self, now_s: float) -> None:
        self.phase = "import"
        self._since_s = now_s
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str, now_s: float) -> None:
        """Note that a phase of a log begins. An engine may return to a phase."""
        name = _NAMES.get(phase, phase)
        if name != self.phase:
            self._seconds = self.seconds(now_s)
            self.phase = name
            self._since_s = now_s

    def elapsed_s(self, now_s: float) -> float:
        """Seconds in the present phase."""
        return self.seconds(now_s)[self.phase]

    def total_s(self, now_s: float) -> float:
        """Seconds since the start began."""
        return sum(self.seconds(now_s).values())

    def seconds(self, now_s: float) -> dict[str, float]:
        """Seconds by phase, in the order in which they began."""
        passed_s = self._seconds.get(self.phase, 0.0) + max(0.0, now_s - self._since_s)
        return {**self._seconds, self.phase: round(passed_s, 3)}
