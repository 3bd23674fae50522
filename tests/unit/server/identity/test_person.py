"""People and their scopes."""

from __future__ import annotations

import pytest

from gateway.errors import Forbidden
from gateway.keys import SCOPES, Scope
from gateway.server.identity.person import Person, Roles, key_of_person

ROLES = Roles(
    {
        "admin": ("ann", "group:ops"),
        "read": ("group:staff", "bob"),
        "inference": ("group:staff", "cid"),
    }
)


@pytest.mark.parametrize(
    ("person", "scopes"),
    [
        (Person("ann"), SCOPES),
        (Person("x", frozenset({"ops", "staff"})), SCOPES),
        (Person("x", frozenset({"staff"})), {"read", "inference"}),
        (Person("bob"), {"read"}),
        (Person("cid", frozenset({"other"})), {"inference"}),
    ],
)
def test_scopes_are_those_of_the_name_and_the_groups(
    person: Person, scopes: frozenset[Scope]
) -> None:
    assert ROLES.scopes_of(person) == scopes


@pytest.mark.parametrize(
    "person",
    [
        Person("dan"),
        Person("Ann"),
        Person("ops"),
        Person("x", frozenset({"ann"})),
        Person("group:ops"),
        Person("*"),
        Person("x", frozenset({"*"})),
    ],
)
def test_a_user_without_a_role_is_refused_by_name(person: Person) -> None:
    with pytest.raises(Forbidden, match="FITSERVE_ROLES"):
        ROLES.scopes_of(person)


def test_a_star_is_everybody() -> None:
    assert Roles({"inference": ("*",)}).scopes_of(Person("dan")) == {"inference"}


def test_no_key_can_have_the_name_of_a_person() -> None:
    key = key_of_person(Person("admin"), frozenset({"read"}), 1e12)
    assert key.name == "user:admin"
