"""Failpoints: places where a test lets the gateway kill itself, to show that the next start
recovers.

Each effect of the loop has one before and one after it. The lists follow from its actions and from
the steps of a changed wish.
"""

from __future__ import annotations

import os
import signal
from typing import get_args

from gateway.controller.decisions.changes import Step
from gateway.controller.decisions.reconcile import Action, NoAction

FAILPOINTS = tuple(
    f"{action.__name__}.{moment}"
    for action in get_args(Action)
    if action is not NoAction
    for moment in ("before", "after")
)
CHANGE_FAILPOINTS = tuple(
    f"{step.__name__}.{moment}" for step in get_args(Step) for moment in ("before", "after")
)


class Failpoint:
    """The place at which a test lets the gateway kill itself.

    `name` is in FAILPOINTS or CHANGE_FAILPOINTS, or empty: then nothing ever happens.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def reach(self, effect: str, moment: str) -> None:
        if self._name == f"{effect}.{moment}":
            os.kill(os.getpid(), signal.SIGKILL)
