"""Names of machines as people write them: `dual 3090s`, `RTX 4090 x2`, `3090 + 4090`.

A name is a sum of terms, each a count and the words of a card's name. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from gateway.domain import Value
from gateway.engines.common.kernels.cards import Card
from gateway.errors import BadRequest
from gateway.profiles.card_names import matched_cards
from gateway.profiles.gpu_slices import SliceProfile, read_slice

_MAX_GPUS = 64
_MAX_LETTERS = 200
_SEPARATOR = re.compile(r"\+|,|;|&|\band\b|\bplus\b")
_COUNT_BEFORE = re.compile(r"(\d{1,3})\s*[x*]\s*|(\d{1,2})\s+(?:gpus?\s+|cards?\s+|of\s+)*(?=\S)")
_COUNT_BEHIND = re.compile(
    r"\s*[x*:]\s*(\d{1,3})$|\s(\d{1,3})\s*x$|\s(\d{1,3})\s*(?:gpus?|cards?)$"
)
_COUNT_BETWEEN = re.compile(r"\s[x*]\s*(\d{1,3})(?=\s+\d{1,3}\s*gi?b?$)")
_LINK_WIDTH = re.compile(r"\bpcie\s*(?:gen\s*)?(?:\d(?:\.0)?\s*)?x\d{1,2}\b")
_TRAY = re.compile(r"\bnvl(\d{1,2})\b")
_NUMBER_WORDS = {
    "single": 1, "dual": 2, "double": 2, "twin": 2, "two": 2, "triple": 3, "three": 3, "quad": 4,
    "four": 4, "five": 5, "six": 6, "eight": 8, "octa": 8,
}  # fmt: skip
# Systems of NVIDIA that hold eight cards with switches between them.
_SYSTEM = re.compile(r"\b[dh]gx\b")
_CARDS_OF_SYSTEM = 8
_OTHER_MAKERS = {
    "AMD": re.compile(
        r"\b(amd|radeon|instinct|mi\d{2,3}[a-z]?|rx ?\d{3,4}|w\d{4}|strix|\d{4}xtx?)\b"
    ),
    "Intel": re.compile(
        r"\b(intel|arc|gaudi ?\d?|a(310|380|580|750|770)|b(50|60|570|580)|max ?1\d{3})\b"
    ),
    "Apple": re.compile(r"\b(apple|mac|macbook|m[1-9]( ?(pro|max|ultra))?)\b"),
}
# Cards of NVIDIA before Volta, the oldest generation that an engine is compiled for.
_OLD_GENERATIONS = {
    "Pascal": re.compile(
        r"\b((gtx ?)?10[5-8]0( ?ti)?|p4|p40|p100|titan ?xp|gp100|quadro p\d{3,4})\b"
    ),
    "Maxwell": re.compile(
        r"\b(gtx ?(9[5-8]0|titan ?x)( ?ti)?|9[78]0( ?ti)?|m[46]0|quadro m\d{4})\b"
    ),
    "Kepler": re.compile(r"\b(gtx ?[67]\d0( ?ti)?|k[248]0[cmx]?|quadro k\d{4})\b"),
}


class Term(Value):
    """Cards of one kind in the name of a machine.

    count: the number of cards, all of one kind.
    alternatives: further cards that the words could mean.
    notes: assumptions about the card.
    part: the part of a card that each GPU is; None: all.
    """

    count: int
    card: Card
    alternatives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    part: SliceProfile | None = None


def parse_terms(
    text: str, cards: Sequence[Card], preference: Callable[[Card], int]
) -> tuple[Term, ...] | None:
    """The cards of a machine's name; None: a term names no card of the table.

    preference: the more, the sooner a card is taken of several that the words fit.
    Raises BadRequest for cards of other makers or before Volta, for words that fit cards of several
    generations, for a memory that no such card has, and for a count beyond a machine.
    """
    if len(text) > _MAX_LETTERS:
        return None
    terms = []
    for part in _SEPARATOR.split(plain_name(text)):
        term = _term(part.strip(), cards, preference)
        if term is None:
            _refuse_other_makers(text)
            _refuse_old_generations(split_counts(part.strip())[1])
            return None
        terms.append(term)
    if not 0 < sum(term.count for term in terms) <= _MAX_GPUS:
        raise BadRequest(
            f"{text} has no GPU, or more than {_MAX_GPUS}.",
            hint="Name the GPUs of one machine; several machines are written 2x(8xh100).",
            param="hardware",
        )
    return tuple(terms)


def plain_name(text: str) -> str:
    """The name in small letters, without brackets, signs of trademarks and the width of links."""
    letters = text.lower().replace("\u00d7", "x").replace("_", " ")
    words = _LINK_WIDTH.sub(" ", re.sub(r"[()\[\]\u00ae\u2122]", " ", letters)).split()
    return " ".join(words).removeprefix("gpu ")


def split_counts(term: str) -> tuple[list[int], str]:
    """The counts before, behind and between a card's words, and the words."""
    counts = []
    if count := _NUMBER_WORDS.get(term.partition(" ")[0]):
        counts.append(count)
        term = term.partition(" ")[2]
    elif match := _COUNT_BEFORE.match(term):
        counts.append(int(match[1] or match[2]))
        term = term[match.end() :]
    for pattern in (_COUNT_BEHIND, _COUNT_BETWEEN, _TRAY):
        if match := pattern.search(term):
            counts.append(int(next(filter(None, match.groups()), 0)))
            term = term[: match.start()] + term[match.end() :]
    return counts, term.strip()


def _term(part: str, cards: Sequence[Card], preference: Callable[[Card], int]) -> Term | None:
    """The cards of one term of a name; None: it names no card of the table."""
    counts, words = split_counts(part)
    profile, words = read_slice(words)
    matches = matched_cards(words, cards)
    if not matches:
        return None
    best_match = min(
        matches,
        key=lambda match: (-match.similarity, -preference(match.card), len(match.card.name)),
    )
    if (
        not counts
        and _SYSTEM.search(words)
        and best_match.card.is_switched
        and not best_match.card.is_joined
    ):
        counts = [_CARDS_OF_SYSTEM]
    return Term(
        count=math.prod(counts),
        card=best_match.card,
        alternatives=tuple(match.label for match in matches if match is not best_match),
        notes=best_match.notes,
        part=profile.card_part(best_match.card) if profile is not None else None,
    )


def _refuse_other_makers(text: str) -> None:
    for maker, pattern in _OTHER_MAKERS.items():
        if match := pattern.search(text.lower()):
            raise BadRequest(
                f"{match[0]} is a GPU of {maker}, and fitserve plans only for NVIDIA GPUs.",
                hint="`fitserve plan --hardware list` prints the cards that fitserve knows.",
                param="hardware",
            )


def _refuse_old_generations(words: str) -> None:
    for generation, pattern in _OLD_GENERATIONS.items():
        if match := pattern.search(words):
            raise BadRequest(
                f"{match[0]} is a card of the {generation} generation, and vLLM and SGLang need"
                " Volta (compute capability 7.0) or a later one.",
                hint="`fitserve plan --hardware list` prints the cards that fitserve knows.",
                param="hardware",
            )
