"""From the models of a gateway to those of a file, in as few requests as there are differences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Wish
from gateway.errors import BadRequest
from gateway.server.admin.changes.model_change import _merge
from gateway.wishes.steps import Step, patch, steps

PINNED = {"x/y": "0" * 40}


def view(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "wish": Wish(name=name, **fields).model_dump(mode="json")}


def test_only_changed_fields_are_requested() -> None:
    views = [
        view("same", source="x/y", commits=PINNED),
        view("other", source="x/y", context=8, args={"a": 1, "b": 2}),
        view("else", source="x/z"),
    ]
    wishes_by_name = {
        "same": Wish(name="same", source="x/y"),
        "other": Wish(name="other", source="x/y", args={"b": 3}, policy={"pinned": True}),
        "new": Wish(name="new", source="x/y"),
    }
    change, add = steps(views, wishes_by_name)
    assert change == Step(
        "change",
        "other",
        {"context": None, "args": {"a": None, "b": 3}, "policy": {"pinned": True}},
    )
    assert change.request == ("PATCH", "/admin/models/other")
    assert (add.kind, add.name, add.body and add.body["source"]) == ("add", "new", "x/y")
    assert steps(views, {"same": wishes_by_name["same"]}) == []
    assert steps(views, {"same": wishes_by_name["same"]}, prune=["else", "gone"]) == [
        Step("remove", "else")
    ]
    pinned_wish = Wish(name="same", source="x/y", commits={"x/y": "1" * 40})
    assert steps(views, {"same": pinned_wish}) == [
        Step("change", "same", {"commits": {"x/y": "1" * 40}})
    ]


def test_a_name_that_moves_is_free_before_it_is_taken() -> None:
    views = [
        view("a", source="x/y", aliases=["one", "both"]),
        view("b", source="x/y", aliases=["two"]),
    ]
    swapped_wishes = {
        "a": Wish(name="a", source="x/y", aliases=("both", "two")),
        "b": Wish(name="b", source="x/y", aliases=("one",)),
    }
    assert [(step.name, step.body) for step in steps(views, swapped_wishes)] == [
        ("a", {"aliases": ["both"]}),
        ("b", {"aliases": []}),
        ("a", {"aliases": ["both", "two"]}),
        ("b", {"aliases": ["one"]}),
    ]
    new = {
        "a": Wish(name="a", source="x/y", aliases=("both",)),
        "one": Wish(name="one", source="x/y"),
    }
    assert [(step.kind, step.name) for step in steps(views, new)] == [
        ("change", "a"),
        ("add", "one"),
    ]


def test_a_model_does_not_become_an_endpoint() -> None:
    with pytest.raises(BadRequest, match="cannot become an endpoint"):
        steps([view("a", source="x/y")], {"a": Wish(name="a", endpoints=("http://h/v1",))})


VALUES = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(), VALUES),
    st.dictionaries(st.text(), VALUES.filter(lambda value: value is not None)),
)
def test_the_patch_makes_one_of_the_other(old: dict[str, Any], new: dict[str, Any]) -> None:
    def whole(value: Any) -> Any:
        return (
            {
                key: whole(value_of_key)
                for key, value_of_key in value.items()
                if value_of_key is not None
            }
            if isinstance(value, dict)
            else value
        )

    assert whole(_merge(old, patch(old, new))) == whole(new)
