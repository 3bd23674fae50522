"""Names of machines as people write them: `h100`, `2x 4090`, `"rtx 4090"`, `H100x8`, `3090+4090`.

A name is a sum of terms, each a count and the words of a card's name. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from gateway.domain import Value
from gateway.engines.common.kernels.cards import Card
from gateway.errors import BadRequest

_MAX_GPUS, _MAX_LETTERS = 64, 200
_COUNT_BEFORE = re.compile(r"(\d{1,3})\s*[x*]\s*")
_COUNT_BEHIND = re.compile(r"\s*[x*]\s*(\d{1,3})$")
_WORD = re.compile(r"[a-z0-9]+")
# Makers' words name no card, and people call one machine by its brand.
_MEANINGS = {"nvidia": "", "geforce": "", "tesla": "", "dgx": "", "spark": "gb10"}
_SUFFIXES = {"ti", "super"}
_MEMORY = re.compile(r"([1-9]\d{0,2})gi?b?")
_OTHER_MAKERS = {
    "AMD": re.compile(
        r"\b(amd|radeon|instinct|mi\d{2,3}[a-z]?|rx ?\d{3,4}|w\d{4}|strix|\d{4}xtx?)\b"
    ),
    "Intel": re.compile(
        r"\b(intel|arc|gaudi ?\d?|a(310|380|580|750|770)|b(50|60|570|580)|max ?1\d{3})\b"
    ),
    "Apple": re.compile(r"\b(apple|mac|macbook|m[1-9]( ?(pro|max|ultra))?)\b"),
}


class Term(Value):
    """Cards of one kind in the name of a machine.

    `count` cards, all of one kind. `alternatives`: further cards that the words could mean.
    """

    count: int
    card: Card
    alternatives: tuple[str, ...] = ()


def parse_terms(
    text: str, cards: Sequence[Card], preference: Callable[[Card], int]
) -> tuple[Term, ...] | None:
    """The cards of a machine's name; None: a term names no card of the table.

    preference: the more, the sooner a card is taken of several that the words fit.
    Raises BadRequest for cards of other makers, and for a count beyond a machine.
    """
    if len(text) > _MAX_LETTERS:
        return None
    terms = []
    for part in text.lower().split("+"):
        counts, words = _split_counts(part.strip())
        fitting_cards = _fitting_cards(words, cards)
        if not fitting_cards:
            _refuse_other_makers(text)
            return None
        best_card = min(
            fitting_cards,
            key=lambda card: (
                _compact_name(card.name.lower()) != _compact_name(words),
                -preference(card),
                len(_card_words(card)),
            ),
        )
        alternatives = tuple(card.name for card in fitting_cards if card is not best_card)
        terms.append(Term(count=math.prod(counts), card=best_card, alternatives=alternatives))
    if not 0 < sum(term.count for term in terms) <= _MAX_GPUS:
        raise BadRequest(
            f"{text} has no GPU, or more than {_MAX_GPUS}.",
            hint="Name the GPUs of one machine; several machines are written 2x(8xh100).",
            param="hardware",
        )
    return tuple(terms)


def _split_counts(term: str) -> tuple[list[int], str]:
    """The counts before and after a card's words, and the words."""
    counts = []
    if count_match := _COUNT_BEFORE.match(term):
        counts.append(int(count_match[1]))
        term = term[count_match.end() :]
    if behind := _COUNT_BEHIND.search(term):
        counts.append(int(behind[1]))
        term = term[: behind.start()]
    return counts, term


def _covers(words: frozenset[str], text: str, card: Card) -> bool:
    """Whether the text is a row of words of the card, and of its memory such as `80gb`."""
    if not text:
        return True
    if (size := _MEMORY.match(text)) and card.has_memory(int(size[1]) << 30):
        return _covers(words, text[size.end() :], card)
    return any(text.startswith(word) and _covers(words, text[len(word) :], card) for word in words)


def _fitting_cards(text: str, cards: Sequence[Card]) -> list[Card]:
    """The cards whose names hold all words of the text, which may be written together."""
    compact = _compact_name(text)
    if not compact or _MEMORY.fullmatch(compact):
        return []
    return [
        card
        for card in cards
        if _covers(words := _card_words(card), compact, card)
        # `4070 ti` is not `4070 ti super`, and `4060` is not `4060 ti`.
        and all(mark in compact for mark in _SUFFIXES & words)
    ]


def _card_words(card: Card) -> frozenset[str]:
    words = frozenset(_WORD.findall(card.name.lower()))
    return words | {"sxm" for word in words if word.startswith("sxm")}


def _compact_name(text: str) -> str:
    """The text's letters and digits without makers' words."""
    letters = "".join(_WORD.findall(text))
    for word, meaning in _MEANINGS.items():
        letters = letters.replace(word, meaning)
    return letters


def _refuse_other_makers(text: str) -> None:
    for maker, pattern in _OTHER_MAKERS.items():
        if match := pattern.search(text.lower()):
            raise BadRequest(
                f"{match[0]} is a GPU of {maker}, and fitserve plans only for NVIDIA GPUs.",
                hint="`fitserve plan --hardware list` prints the cards that fitserve knows.",
                param="hardware",
            )
