"""Rows of another form: the others are read, and a sentence counts those that are left out."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Fact, Wish
from gateway.domain.grant import Grant
from gateway.planner.service.plan_program import _read_fact
from gateway.store.measured_facts import measured_facts
from gateway.store.readable_rows import left_out_words, read_rows
from gateway.store.store import Store
from tests.support.makers import plan, wish

PROBLEM = left_out_words(1)
FACTS = [
    Fact(
        kind="machine_speed",
        scope={"gpus": "a", "what": str(number)},
        value=number,
        grade="verified",
        source="a test",
    )
    for number in (1, 2, 3)
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "fitserve.db")
    store.add_model(wish(name="a"), 1.0)
    for number in (1, 2, 3):
        store.add_attempt("a", 0, plan(), 8000 + number, float(number))
        store.add_key(Grant(name=f"k{number}"), bytes([number]), float(number))
    store.add_facts(FACTS)
    yield store
    store.close()


def damage(store: Store, statement: str) -> None:
    """Give rows another form, as another version could have written them."""
    with store._database.change() as db:
        db.execute(statement)


@pytest.mark.parametrize(
    ("statement", "read", "values"),
    [
        (
            "UPDATE facts SET fact=json_remove(fact, '$.grade') WHERE id=2",
            lambda store: store.numbered_facts(),
            [(1, FACTS[0]), (3, FACTS[2])],
        ),
        (
            "UPDATE attempts SET plan='{}' WHERE id=2",
            lambda store: [attempt.id for attempt in store.attempts("a")],
            [1, 3],
        ),
        (
            "UPDATE attempts SET failure='nonsense' WHERE id=2",
            lambda store: [attempt.id for attempt in store.attempts()],
            [1, 3],
        ),
        (
            "UPDATE keys SET may=json_set(may, '$.scopes', json('[]')) WHERE name='k2'",
            lambda store: [grant.name for grant, *_ in store.grants()],
            ["k1", "k3"],
        ),
    ],
    ids=["facts", "plans of attempts", "failures of attempts", "keys"],
)
def test_a_row_of_another_form_hides_no_other(
    store: Store, statement: str, read: Callable[[Store], Any], values: list[Any]
) -> None:
    damage(store, statement)
    assert read(store) == values


def test_the_rows_that_are_left_out_are_counted_in_a_sentence(store: Store) -> None:
    assert store.numbered_facts().problem == ""
    damage(store, "UPDATE facts SET fact=json_remove(fact, '$.grade') WHERE id=2")
    assert store.numbered_facts().problem == PROBLEM
    damage(store, "UPDATE facts SET fact=json_remove(fact, '$.kind') WHERE id=3")
    assert store.numbered_facts().problem == left_out_words(2)
    assert store.attempts().problem == ""


def test_measurements_of_another_form_hide_no_other(store: Store) -> None:
    damage(store, "UPDATE facts SET fact=json_remove(fact, '$.grade') WHERE id=2")
    store.close()
    assert measured_facts(store.path) == [FACTS[0], FACTS[2]]


def test_a_fact_of_another_form_ends_no_plan() -> None:
    assert _read_fact(FACTS[0].model_dump_json().encode()) == FACTS[0]
    assert _read_fact(b'{"kind": "of another version"}') is None
    assert _read_fact(b"nonsense") is None


def test_the_log_names_the_row_once_and_not_its_content(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [(4711, '{"name": "a", "env": {"HF_TOKEN": ["secret-7f3a"]}}')]
    for _ in range(3):
        read_rows("a table", rows, lambda row: Wish.model_validate_json(row[1]))
    (fields,) = [vars(record)["fields"] for record in caplog.records]
    assert (fields["table"], fields["row"]) == ("a table", 4711)
    assert "secret-7f3a" not in str(fields)


def test_an_error_of_the_program_is_no_row_of_another_form() -> None:
    def fail(_: object) -> None:
        raise sqlite3.ProgrammingError("closed")

    with pytest.raises(sqlite3.ProgrammingError):
        read_rows("a table", [(1,)], fail)
