"""The history of wishes in the database."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from gateway.controller.decisions.wish_history import version_to_restore
from gateway.domain import Change
from gateway.domain.wish import ChatTemplate, WishOrigin
from gateway.errors import Conflict, NotFound
from gateway.store import wish_table
from gateway.store.backup import restore_backup, write_backup
from gateway.store.store import Store
from tests.support.makers import wish


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "installation").write_text("abc")
    store = Store(tmp_path / "fitserve.db")
    yield store
    store.close()


def numbers(store: Store, model: str = "a") -> list[int]:
    return [version.number for version in store.wishes.versions(model)]


def contexts(store: Store, model: str = "a") -> list[int | None]:
    return [version.wish.context for version in store.wishes.versions(model)]


def test_each_new_wish_is_kept_with_its_author(store: Store) -> None:
    ann = WishOrigin(at=1.0, key="ann", way="command line")
    bob = WishOrigin(at=2.0, key="bob", way="page", restored=1)
    store.add_model(wish(name="a"), 1.0, ann)
    store.save_change(wish(name="a", context=5), 0, None, bob)
    store.close()
    with contextlib.closing(Store(store.path)) as second_store:
        rows = second_store.wishes.versions("a")
    assert [(row.number, row.origin, row.wish.context, row.refused) for row in rows] == [
        (1, ann, None, ""),
        (2, bob, 5, ""),
    ]


def test_a_refused_wish_is_kept_with_its_reason_and_an_enforced_one_is_added_once(
    store: Store,
) -> None:
    store.add_model(wish(name="a"), 1.0)
    for context, reason in ((5, "no memory"), (6, "")):
        change = Change(wish=wish(name="a", context=context), generation=1, at=2.0)
        store.save_change(wish(name="a"), 0, change, WishOrigin(at=2.0))
        if reason:
            store.save_change(wish(name="a"), 0, change.evolve(refusal_text=reason))
        else:
            store.save_change(change.wish, 1, None)
    rows = store.wishes.versions("a")
    assert [(row.wish.context, row.refused) for row in rows] == [
        (None, ""),
        (5, "no memory"),
        (6, ""),
    ]


def test_a_refused_addition_leaves_no_wish(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    with pytest.raises(Conflict):
        store.add_model(wish(name="a", context=5), 2.0)
    store.mark_deleting("a")
    with pytest.raises(NotFound):
        store.save_change(wish(name="a", context=6), 1, None, WishOrigin(at=3.0))
    assert contexts(store) == [None]


def test_commits_that_are_learned_later_belong_to_the_wish_in_force(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    change = Change(wish=wish(name="a", context=5), generation=1, at=2.0)
    store.save_change(wish(name="a"), 0, change, WishOrigin(at=2.0))
    store.save_change(wish(name="a"), 0, change.evolve(refusal_text="no memory"))
    commits = {"org/name": "1" * 40}
    store.save_wish(wish(name="a", commits=commits))
    assert [row.wish.commits for row in store.wishes.versions("a")] == [commits, {}]


def test_the_history_leaves_with_its_model(store: Store) -> None:
    for name in ("a", "b"):
        store.add_model(wish(name=name), 1.0)
    store.mark_deleting("a")
    store.remove_model("a")
    assert (numbers(store), numbers(store, "b")) == ([], [1])
    store.add_model(wish(name="a"), 2.0)
    assert numbers(store) == [1]


def test_the_history_is_bounded_by_count_and_keeps_the_accepted_wishes(store: Store) -> None:
    store.add_model(wish(name="a"), 1.0)
    with mock.patch.object(wish_table, "MAX_WISHES", 3):
        for context in range(1, 6):
            store.save_change(wish(name="a", context=context), context, None, WishOrigin(at=2.0))
        assert contexts(store) == [3, 4, 5]
        for context in range(6, 11):
            change = Change(wish=wish(name="a", context=context), generation=9, at=2.0)
            store.save_change(wish(name="a", context=5), 5, change, WishOrigin(at=2.0))
            store.save_change(wish(name="a", context=5), 5, change.evolve(refusal_text="no"))
        # The last refusal is pruned by the next change.
        assert contexts(store) == [4, 5, 7, 8, 9, 10]
    assert numbers(store)[-1] == 11


def test_the_history_is_bounded_by_size(store: Store) -> None:
    template = ChatTemplate(text="x" * 100_000)
    store.add_model(wish(name="a"), 1.0)
    with mock.patch.object(wish_table, "MAX_CHARACTERS", 250_000):
        for context in range(1, 6):
            large_wish = wish(name="a", context=context, chat_template=template)
            store.save_change(large_wish, context, None, WishOrigin(at=2.0))
        assert contexts(store) == [4, 5]
    with mock.patch.object(wish_table, "MAX_CHARACTERS", 1):
        store.save_change(wish(name="a", context=6), 6, None, WishOrigin(at=2.0))
    assert contexts(store) == [5, 6]


def test_a_backup_has_the_history(store: Store, tmp_path: Path) -> None:
    ann = WishOrigin(at=1.0, key="ann", way="API")
    store.add_model(wish(name="a"), 1.0, ann)
    store.save_change(wish(name="a", context=5), 0, None, ann)
    archive = tmp_path / "backup.tar.gz"
    with archive.open("wb") as output:
        write_backup(tmp_path, output, "1.2.3")
    (restored := tmp_path / "restored").mkdir()
    restore_backup(restored, archive)
    with contextlib.closing(Store(restored / "fitserve.db")) as second_store:
        assert second_store.wishes.versions("a") == store.wishes.versions("a")


def test_models_from_before_the_history_have_their_present_wish(store: Store) -> None:
    store.add_model(wish(name="a", context=5), 7.0)
    change = Change(wish=wish(name="a", context=6), generation=1, at=8.0)
    store.save_change(wish(name="a", context=5), 0, change)
    store.close()
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("DROP TABLE wishes")
        db.execute("PRAGMA user_version=17")
    for _ in range(2):
        with contextlib.closing(Store(store.path)) as second_store:
            rows = second_store.wishes.versions("a")
        assert [(row.number, row.origin, row.wish.context) for row in rows] == [
            (1, WishOrigin(at=7.0), 5),
            (2, WishOrigin(at=8.0), 6),
        ]


def test_a_changed_row_of_the_history_is_damage(store: Store) -> None:
    store.add_model(wish(name="a", source="/one"), 1.0)
    store.close()
    store.path.with_name("fitserve.db.mirror").unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute("UPDATE wishes SET wish=replace(wish, '/one', '/two')")
    with pytest.raises(Exception, match="a row of wishes"):
        Store(store.path)


def test_a_wish_of_another_form_keeps_its_place_among_the_readable_ones(store: Store) -> None:
    store.add_model(wish(name="a", context=1), 1.0)
    for context in (2, 3, 4):
        store.save_change(wish(name="a", context=context), context, None, WishOrigin(at=2.0))
    with store._database.change() as db:
        db.execute("UPDATE wishes SET wish=json_set(wish, '$.gone_field', 7) WHERE number=2")
        db.execute("UPDATE wishes SET origin='nonsense' WHERE number=3")
    rows = store.wishes.versions("a")
    assert [(row.number, row.is_readable) for row in rows] == [
        (1, True),
        (2, False),
        (3, False),
        (4, True),
    ]
    assert [rows[0].wish.context, rows[3].wish.context] == [1, 4]
    assert version_to_restore("a", rows, None, is_underway=False).number == 1
    with pytest.raises(Conflict, match="cannot read"):
        version_to_restore("a", rows, 2, is_underway=False)
