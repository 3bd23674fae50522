"""Places where the gateway can be told to die, so that tests prove that a restart makes up for it.

One before and one after every effect that the loop may perform; the list follows from the actions themselves.
"""

from __future__ import annotations

import os
import signal
from typing import get_args

from gateway.core.reconcile import Action, Rest

POINTS = tuple(
    f"{action.__name__}.{moment}" for action in get_args(Action) if action is not Rest for moment in ("before", "after")
)


class Failpoint:
    """`name` is one of POINTS, or empty: nothing ever happens."""

    def __init__(self, name: str) -> None:
        self._name = name

    def reach(self, effect: str, moment: str) -> None:
        if self._name == f"{effect}.{moment}":
            os.kill(os.getpid(), signal.SIGKILL)
