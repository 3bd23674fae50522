"""Parts of a card as MIG names them: `3g.40gb` is three of seven units and 40 GB. Pure."""

from __future__ import annotations

import re

from gateway.domain import Value
from gateway.engines.common.kernels.cards import Card
from gateway.errors import BadRequest

_PROFILE = re.compile(r"\b([1-7])g\.(\d{1,3})gb\b")
_NOISE = re.compile(r"\b(mig|slices?|of|an?|instances?)\b")
# A card is cut into eight parts of memory, whatever the number of its units.
_MEMORY_PARTS = 8
_UNITS = (1, 2, 3, 4, 7)
_MIG_CAPABILITIES = {"8.0", "9.0", "10.0", "10.3", "12.0"}
_SAME_SIZE = 0.13  # names of profiles round the size


class SliceProfile(Value):
    """A profile of MIG.

    parts: eighths of the memory; 0: the card is open.
    """

    units: int
    gigabytes: int
    parts: int = 0

    @property
    def name(self) -> str:
        return f"{self.units}g.{self.gigabytes}gb"

    def card_part(self, card: Card) -> SliceProfile:
        """The profile with its part of the card's memory. Raises BadRequest if the card has no such
        profile."""
        size = (card.memory_mib or 0) / 1024
        parts = round(self.gigabytes * _MEMORY_PARTS / size) if size else 0
        if (
            card.capability not in _MIG_CAPABILITIES
            or "GeForce" in card.name
            or self.units not in _UNITS
            or not self.units <= parts <= _MEMORY_PARTS
            or abs(parts * size / _MEMORY_PARTS / self.gigabytes - 1) > _SAME_SIZE
        ):
            raise BadRequest(
                f"{card.name} has no part {self.name}.",
                hint="`nvidia-smi mig -lgip` lists the parts of a card; name another, or the card.",
                param="hardware",
            )
        return self.evolve(parts=parts)

    def bytes_of(self, card_bytes: int) -> int:
        return card_bytes * self.parts // _MEMORY_PARTS


def read_slice(words: str) -> tuple[SliceProfile | None, str]:
    """The profile in the words of a card, and the words without it."""
    match = _PROFILE.search(words)
    if match is None:
        return None, words
    card_words = _NOISE.sub(" ", words[: match.start()] + " " + words[match.end() :])
    return SliceProfile(units=int(match[1]), gigabytes=int(match[2])), " ".join(card_words.split())
