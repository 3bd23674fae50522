"""Problems that a repeated look has already shown."""

from __future__ import annotations

from collections.abc import Hashable


class KnownProblems:
    """The last problem of each subject, so that a look that repeats logs changes alone."""

    def __init__(self) -> None:
        self._problems: dict[Hashable, str] = {}

    def record(self, subject: Hashable, problem: str) -> bool:
        """Record the problem of a subject. Returns whether another one, or none, was known."""
        is_new = self._problems.get(subject) != problem
        self._problems[subject] = problem
        return is_new

    def forget(self, subject: Hashable) -> None:
        """Forget a subject that is well: its next problem is new."""
        self._problems.pop(subject, None)
