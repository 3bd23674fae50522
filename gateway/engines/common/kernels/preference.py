"""An engine's list of kernels, best first, as a GPU changes it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from gateway.domain import Value
from gateway.domain.base import Field
from gateway.engines.common.rules.check import Check
from gateway.engines.common.rules.subject import Subject


class OrderChange(Value):
    """A move of the kernel `name` where `when` holds: directly before another, first or last."""

    when: Check
    name: str
    before_kernel: str = Field("", alias="before")
    end: Literal["", "front", "back"] = Field("", alias="to")

    def has_both(self, names: Iterable[str]) -> bool:
        """Whether the list has both kernels."""
        return {self.name, self.before_kernel or self.name} <= set(names)


def sort_by_preference(
    names: Sequence[str], moves: Iterable[OrderChange], subject: Subject
) -> list[str]:
    """The list for this subject."""
    ordered_names = list(names)
    for move in moves:
        if move.when.refusal(subject) is None:
            ordered_names.remove(move.name)
            index = {"front": 0, "back": len(ordered_names)}.get(move.end)
            ordered_names.insert(
                ordered_names.index(move.before_kernel) if index is None else index, move.name
            )
    return ordered_names
