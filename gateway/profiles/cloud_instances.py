"""Machines that clouds rent (profiles/instances.yaml): `g6e.12xlarge` has four L40S. Pure."""

from __future__ import annotations

import re

from gateway.domain import Value
from gateway.domain.base import Field
from gateway.errors import BadRequest

_SIZE = re.compile(r"[a-z0-9-]{1,20}")
_NAME = re.compile(r"[a-z][a-z0-9]*[._-][\w.-]+", re.IGNORECASE)


def is_instance_name(text: str) -> bool:
    """Whether the text has the form of a rented machine's name, as `g6e.12xlarge`."""
    return _NAME.fullmatch(text.strip()) is not None


class InstanceFamily(Value):
    """Machines of one kind of card.

    name: their names in small letters, with SIZE for the part that names the size.
    counts: cards by size; empty: the size begins with their number.
    """

    name: str
    card: str
    counts: dict[str, int] = Field(default_factory=dict)
    source: str

    def size_of(self, name: str) -> str | None:
        """The size that a name says; None: the name is of another family."""
        begin, _, end = self.name.partition("SIZE")
        if not (name.startswith(begin) and name.endswith(end)):
            return None
        size = name.removeprefix(begin).removesuffix(end)
        return size if _SIZE.fullmatch(size) else None


class InstanceTable(Value):
    families: tuple[InstanceFamily, ...]

    def cards_of(self, name: str) -> str | None:
        """The cards of the machine with this name, as people write them; None: an unknown name.

        Raises BadRequest for an unknown size of a known family.
        """
        short_name = name.strip().lower().removeprefix("standard_").removeprefix("ml.")
        sizes: list[str] = []
        for family in self.families:
            size = family.size_of(short_name)
            if size is None:
                continue
            if size in family.counts:
                return f"{family.counts[size]}x {family.card}"
            if not family.counts and (number := re.match(r"\d{1,2}", size)):
                return f"{int(number[0])}x {family.card}"
            sizes += family.counts
        if not sizes:
            return None
        raise BadRequest(
            f"{name[:80]} is not a size of its family: {', '.join(sizes)}.",
            hint="Write one of these sizes, or the cards, such as 4xl40s.",
            param="hardware",
        )
