"""Tables for people."""

from __future__ import annotations

from gateway.cli.text_tables import wish_and_plan


def test_no_two_rows_of_a_change_have_one_name() -> None:
    row = {"field": "replicas", "former": "1", "present": "2"}
    gpus = {"field": "gpus", "former": "0", "present": "0, 1"}
    rows = wish_and_plan({"wish": [row], "plan": [row, gpus]})
    assert [shown_row["field"] for shown_row in rows] == ["replicas", "planned replicas", "gpus"]
