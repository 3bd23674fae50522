"""Cards whose names hold the words of a text, also with a memory such as `80gb`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gateway.domain import Value
from gateway.engines.common.kernels.cards import Card
from gateway.errors import BadRequest

_WORD = re.compile(r"[a-z0-9]+")
# Makers' words and words for any card name none; people write short forms of others.
_MEANINGS = {
    "nvidia": "", "geforce": "", "tesla": "", "graphics": "", "gpus": "", "gpu": "", "cards": "",
    "card": "", "nvlink": "", "desktop": "", "vram": "", "mobile": "laptop", "notebook": "laptop",
    "hgx": "", "dgx": "",
}  # fmt: skip
# Words without which a text names another card: `4070 ti` is not `4070 ti super`.
_MARKS = {"ti", "super", "laptop", "d"}
_MEMORY = re.compile(r"([1-9]\d{0,2})gi?b?")
_SOLDERED_FACTOR = 2  # shops solder twice the memory onto GeForce cards
_WHOLE_NAME = 2
_FORM = "sxm"  # the socket of a card, as people write it without a number
# Cards before the RTX cards have the same numbers: the Quadro 4000 is a chip of 2010.
_OLD_SERIES = "quadro"
_SERIES = "rtx"


class CardMatch(Value):
    """A card that a text may mean.

    similarity: 2 for its whole name; 1 if the text says the memory; else 0.
    label: its name, with its memory if two cards have the name.
    """

    card: Card
    similarity: int = 0
    notes: tuple[str, ...] = ()
    label: str = ""


def matched_cards(text: str, cards: Sequence[Card]) -> list[CardMatch]:
    """The cards that the text may mean; empty: none.

    Raises BadRequest if they are of several generations, or none has the memory that the text says.
    """
    compact = _compact_name(text)
    is_old = _OLD_SERIES in compact and _SERIES not in compact
    if not compact or is_old or _MEMORY.fullmatch(compact):
        return []
    covered_cards = _covered_cards(compact, cards)
    if not covered_cards and compact.endswith("s"):  # two 3090s
        covered_cards = _covered_cards(compact.removesuffix("s"), cards)
    matches = [
        _match(compact, card, sizes) for card, sizes in covered_cards if _has_size(card, sizes)
    ]
    if not matches:
        matches = [match for card, sizes in covered_cards if (match := _doubled_match(card, sizes))]
    if not matches and covered_cards:
        raise _memory_error(text, [card for card, _ in covered_cards])
    matches = [match for match in matches if match.similarity == _WHOLE_NAME] or matches
    if len({match.card.capability for match in matches}) > 1:
        raise BadRequest(
            f"{text} names cards of several generations:"
            f" {_labels(match.card for match in matches)}.",
            hint="Write one of these names.",
            param="hardware",
        )
    names = [match.card.name for match in matches]
    return [
        match.evolve(label=_label(match.card) if names.count(match.card.name) > 1 else match.label)
        for match in matches
    ]


def _covered_cards(compact: str, cards: Sequence[Card]) -> list[tuple[Card, set[int | None]]]:
    """The cards whose words make the text, with the memories in GB that it may say."""
    covered_cards = []
    for card in cards:
        words = _card_words(card)
        if not any(word in compact for word in _telling_words(card)):
            continue
        sizes = _sizes(words, compact)
        if sizes and not any(mark in words and _sizes(words - {mark}, compact) for mark in _MARKS):
            covered_cards.append((card, sizes))
    return covered_cards


def _sizes(words: frozenset[str], text: str) -> set[int | None]:
    """The memories in GB that the text may say (None: none), by all ways to read it as a row of
    these words; empty: there is no way."""
    sizes_by_start: list[set[int | None]] = [set() for _ in text] + [{None}]
    for start in reversed(range(len(text))):
        for word in words:
            if text.startswith(word, start):
                sizes_by_start[start] |= sizes_by_start[start + len(word)]
        size = _MEMORY.match(text, start)
        if size and sizes_by_start[size.end()]:
            sizes_by_start[start].add(int(size[1]))
    return sizes_by_start[0]


def _has_size(card: Card, sizes: set[int | None]) -> bool:
    return any(size is None or card.has_memory(size << 30) for size in sizes)


def _match(compact: str, card: Card, sizes: set[int | None]) -> CardMatch:
    is_whole = _compact_name(card.name.lower()) == compact
    return CardMatch(
        card=card,
        similarity=_WHOLE_NAME if is_whole else int(None not in sizes),
        label=card.name,
    )


def _doubled_match(card: Card, sizes: set[int | None]) -> CardMatch | None:
    """The card with twice its memory, where the text says so; None: no card is sold so."""
    if "GeForce" not in card.name or "laptop" in _card_words(card) or card.memory_mib is None:
        return None
    doubled = card.evolve(memory_mib=card.memory_mib * _SOLDERED_FACTOR, idle_mib=None)
    if not any(size is not None and doubled.has_memory(size << 30) for size in sizes):
        return None
    return CardMatch(
        card=doubled,
        label=card.name,
        notes=(
            f"{card.name} with {_gigabytes(doubled)} GB instead of {_gigabytes(card)}, as the name"
            " says",
        ),
    )


def _memory_error(text: str, cards: Sequence[Card]) -> BadRequest:
    return BadRequest(
        f"No card of the name {text} has this memory: {_labels(cards)}.",
        hint="Leave the memory out, or give a file that `fitserve probe --json` wrote.",
        param="hardware",
    )


def _labels(cards: Iterator[Card] | Sequence[Card]) -> str:
    return ", ".join(_label(card) for card in cards)


def _label(card: Card) -> str:
    return card.name if card.has_unified_memory else f"{card.name} ({_gigabytes(card)} GB)"


def _gigabytes(card: Card) -> int:
    return round((card.memory_mib or 0) / 1024)


def _telling_words(card: Card) -> frozenset[str]:
    """The words of which a text needs one to name the card: its number, or a name such as spark."""
    words = _WORD.findall(card.name.lower())
    numbers = {
        word
        for word in words
        if not word.isalpha() and not word.startswith(_FORM) and not _MEMORY.fullmatch(word)
    }
    names = {word for word in card.words if word.isalpha() and len(word) > len(_FORM)}
    return frozenset(numbers | names) or frozenset(words)


def _card_words(card: Card) -> frozenset[str]:
    words = frozenset(_WORD.findall(card.name.lower())) - {"gpu"}
    return words | {_FORM for word in words if word.startswith(_FORM)} | frozenset(card.words)


def _compact_name(text: str) -> str:
    """The text's letters and digits without makers' words."""
    letters = "".join(_WORD.findall(text))
    for word, meaning in _MEANINGS.items():
        letters = letters.replace(word, meaning)
    return letters
