"""A wish refuses copies that cannot follow the load, with the reason and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.domain import Wish


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({}, (None, None)),
        ({"replicas": 3}, (3, 3)),
        ({"copies": "1-4"}, (1, 4)),
        ({"copies": "2-2"}, (2, 2)),
        ({"copies": "1-64"}, (1, 64)),
    ],
)
def test_a_wish_has_a_least_and_a_most_number_of_copies(
    fields: dict[str, Any], numbers: tuple[int | None, int | None]
) -> None:
    wish = Wish(name="m", source="org/m", **fields)
    assert (wish.least_copies, wish.most_copies) == numbers


REFUSED = {
    "a least number above the most": ({"copies": "4-1"}, "give 1-4"),
    "a fixed number too": ({"copies": "1-4", "replicas": 2}, "drop one of them"),
    "an engine elsewhere": (
        {"copies": "1-4", "source": None, "endpoints": ("http://127.0.0.1:9/v1",)},
        "runs elsewhere",
    ),
    "one copy on all GPUs": ({"copies": "1-4", "gpus": "all"}, "no GPU is free for another"),
    "none at least": ({"copies": "0-4"}, "two numbers from 1 to 64, as in 1-4"),
    "too many": ({"copies": "1-65"}, "two numbers from 1 to 64, as in 1-4"),
    "one number": ({"copies": "3"}, "two numbers from 1 to 64, as in 1-4"),
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_copies_that_cannot_follow_the_load_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Wish.model_validate({"name": "m", "source": "org/m", **fields})


def test_a_wish_without_copies_is_stored_as_before() -> None:
    assert "copies" not in Wish(name="m", source="org/m").model_dump()
