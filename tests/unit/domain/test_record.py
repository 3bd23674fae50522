"""gateway.domain.record: frozen records."""

from __future__ import annotations

from functools import cached_property

import pytest

from gateway.domain.record import FrozenRecord, field


class Pair(FrozenRecord, frozen=True, dict=True):
    first: int
    right: int = 2
    counts: dict[str, int] = field(default_factory=dict)

    @cached_property
    def total(self) -> int:
        return self.first + self.right


class LonelyRecord(FrozenRecord, frozen=True, eq=False):
    first: int


def test_a_record_is_equal_by_content_and_cannot_be_changed() -> None:
    assert Pair(1) == Pair(1, 2) != Pair(1, 3)
    with pytest.raises(AttributeError):
        Pair(1).first = 2  # type: ignore[misc]
    Pair(1).counts["a"] = 1
    assert Pair(1).counts == {}


def test_a_changed_copy_computes_its_properties_again() -> None:
    pair = Pair(1)
    assert pair.total == 3
    assert pair.evolve(first=5).total == 7
    assert pair.as_dict() == {"first": 1, "right": 2, "counts": {}}


def test_a_record_by_identity_is_a_key_of_its_own() -> None:
    first_record, other_record = LonelyRecord(1), LonelyRecord(1)
    assert first_record != other_record
    assert len({first_record, other_record, first_record}) == 2
