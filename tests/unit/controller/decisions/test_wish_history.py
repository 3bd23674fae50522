"""States of former wishes, and the choice of a rollback."""

from __future__ import annotations

import pytest

from gateway.controller.decisions.wish_history import version_to_restore, wish_states
from gateway.domain import Wish
from gateway.domain.wish import WishOrigin, WishVersion
from gateway.errors import Conflict, NotFound


def versions(*rows: tuple[int, str]) -> list[WishVersion]:
    """Wishes by their context and the reason of a refusal, numbered from 1."""
    return [
        WishVersion(
            number=number,
            origin=WishOrigin(at=number),
            wish=Wish(name="m", source="/m", context=context),
            refused=reason,
        )
        for number, (context, reason) in enumerate(rows, 1)
    ]


def test_the_newest_accepted_wish_is_in_force() -> None:
    rows = versions((1024, ""), (2048, ""), (4096, "no memory"))
    assert wish_states(rows, is_underway=False) == ["former", "in force", "refused"]


def test_a_change_underway_leaves_the_wish_before_in_force() -> None:
    rows = versions((1024, ""), (2048, "no memory"), (4096, ""))
    assert wish_states(rows, is_underway=True) == ["in force", "refused", "underway"]


def test_no_wish_has_no_state() -> None:
    assert wish_states([], is_underway=True) == []


def test_a_rollback_takes_the_last_former_wish_that_differs() -> None:
    rows = versions((1024, ""), (2048, ""), (512, "no memory"), (4096, ""), (2048, ""), (4096, ""))
    assert version_to_restore("m", rows, None, is_underway=False).number == 5
    equal_rows = versions((1024, ""), (2048, ""), (1024, "broken"), (2048, ""))
    assert version_to_restore("m", equal_rows, None, is_underway=False).number == 1


def test_a_rollback_takes_any_wish_by_its_number() -> None:
    rows = versions((1024, ""), (2048, "no memory"), (4096, ""))
    assert version_to_restore("m", rows, 2, is_underway=False).wish.context == 2048


def test_a_missing_wish_is_refused_with_the_command_that_lists_them() -> None:
    rows = versions((1024, ""))
    with pytest.raises(NotFound, match="fitserve history m"):
        version_to_restore("m", rows, 7, is_underway=False)
    with pytest.raises(Conflict, match="no former wish"):
        version_to_restore("m", rows, None, is_underway=False)
