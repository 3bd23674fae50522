"""Plain English prompts, for engines whose speed depends on the text."""

from __future__ import annotations

import random
from itertools import product

_SUBJECTS = ("The baker", "A neighbour", "My sister", "The engineer", "Our teacher", "The captain")
_PREDICATES = (
    "repairs",
    "describes",
    "sells",
    "paints",
    "measures",
    "forgets",
    "carries",
    "explains",
)
_THINGS = (
    "an old clock",
    "the narrow bridge",
    "a basket of apples",
    "the plan of the house",
    "a letter from Lisbon",
    "the broken engine",
    "three blue chairs",
    "the map of the coast",
)
_TIMES = ("before the rain begins", "on a quiet evening", "while the others sleep", "every spring")
_SENTENCES = tuple(
    f"{' '.join(parts)}." for parts in product(_SUBJECTS, _PREDICATES, _THINGS, _TIMES)
)


def text_prompt(characters: int) -> str:
    """Random sentences, cut to this length."""
    count = max(1, characters // 40)
    sentences = random.choices(_SENTENCES, k=count + 1)  # noqa: S311 - no secret
    return " ".join(sentences)[: max(1, characters)]
