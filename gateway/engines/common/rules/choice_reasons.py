"""Reasons of an engine's choice among kernels or backends, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def choice_reason(names: Sequence[str], flag: str = "") -> str:
    """The reason for the first of these names that accepts the layers.

    names: the names in the engine's order.
    flag: the flag of the command line that limits the names; "": no flag does.
    """
    if flag:
        return f"`{flag}` names it"
    if len(names) == 1:
        return "the engine has no other for these layers"
    return f"the first in the engine's order that takes these layers: {', '.join(names)}"
