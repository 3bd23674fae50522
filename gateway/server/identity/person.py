"""A person, as a proxy or a provider names them, and their scopes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.errors import BadRequest, Forbidden
from gateway.keys import PERSON_PREFIX, SCOPES, Scope, hash_key
from gateway.proxy.access.auth import Key

MAX_NAME_CHARACTERS = 200
_GROUP_PREFIX = "group:"
EVERYBODY = "*"


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    groups: frozenset[str] = frozenset()

    @property
    def key_name(self) -> str:
        """The name in lists, which no key can have."""
        return f"{PERSON_PREFIX}{self.name}"


def make_person(name: str, groups: Iterable[str]) -> Person:
    """A person of that name. Raises BadRequest for a name that no list can show."""
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise BadRequest(
            f"The name of the user is empty, or has over {MAX_NAME_CHARACTERS} characters, or"
            " characters without a form.",
            hint="The operator corrects the proxy or the claim of the provider.",
        )
    return Person(name, frozenset(name for group in groups if (name := group.strip())))


class Roles:
    """The scopes of people, by names, groups (`group:NAME`) or for all (`*`)."""

    def __init__(self, members: Mapping[Scope, Iterable[str]]) -> None:
        self._members = {scope: frozenset(names) for scope, names in members.items()}

    def scopes_of(self, person: Person) -> frozenset[Scope]:
        """The scopes of a person; `admin` has all. Raises Forbidden without any."""
        # A user cannot take the name of a group or of everybody.
        is_special = person.name.startswith(_GROUP_PREFIX) or person.name == EVERYBODY
        names = {EVERYBODY, *(f"{_GROUP_PREFIX}{group}" for group in person.groups)}
        if not is_special:
            names.add(person.name)
        scopes = frozenset(
            scope for scope, members in self._members.items() if not members.isdisjoint(names)
        )
        if not scopes:
            raise Forbidden(
                f"The user {person.name} has no role at this gateway.",
                hint="The operator adds the user or a group to FITSERVE_ROLES.",
            )
        return SCOPES if "admin" in scopes else scopes


def key_of_person(person: Person, scopes: frozenset[Scope], ends_at: float) -> Key:
    """The caller of a request in the name of a person."""
    return Key(person.key_name, hash_key(person.key_name.encode()), scopes, ends_at=ends_at)
