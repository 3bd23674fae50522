"""What brings the models of a gateway to those of a file: requests of the admin API, of which none
is there where nothing is otherwise. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from gateway.domain import Wish
from gateway.errors import BadRequest

# The gateway's own: what was asked of the Hub once.
_KEPT = frozenset({"name", "commits"})


class Step(NamedTuple):
    """One request. `body` may hold secrets."""

    kind: Literal["add", "change", "remove"]
    name: str
    body: dict[str, Any] | None = None

    @property
    def request(self) -> tuple[str, str]:
        """Method and path."""
        path = f"/admin/models/{self.name}"
        return {
            "add": ("POST", "/admin/models"),
            "change": ("PATCH", path),
            "remove": ("DELETE", path),
        }[self.kind]


def steps(
    views: Iterable[Mapping[str, Any]], wanted: Mapping[str, Wish], prune: Collection[str] = ()
) -> list[Step]:
    """views: as GET /admin/models tells of them. prune: the models that go where they are not
    wanted. Raises BadRequest where a model would have to become an
    endpoint."""
    there = {str(view["name"]): view["wish"] for view in views}
    found = [Step("remove", name) for name in sorted(set(prune) & there.keys() - wanted.keys())]
    # A name that goes from one model to another is free before it is taken.
    owners = {
        known: name for name, wish in wanted.items() for known in (name, *wish.aliases, *wish.loras)
    }
    for name in sorted(wanted.keys() & there.keys()):
        aliases = there[name].get("aliases", [])
        kept = [alias for alias in aliases if owners.get(alias, name) == name]
        if kept != aliases:
            found.append(Step("change", name, {"aliases": kept}))
            there[name] = {**there[name], "aliases": kept}
    for name, wish in wanted.items():
        new = wish.model_dump(mode="json")
        if name not in there:
            found.append(
                Step(
                    "add",
                    name,
                    {key: value for key, value in new.items() if value not in (None, {}, [])},
                )
            )
            continue
        if bool(wish.source) != bool(there[name]["source"]):
            raise BadRequest(
                f"{name} cannot become {'a model' if wish.source else 'an endpoint'}.",
                hint="Remove it first (`fitserve rm`).",
            )
        # Where the file pins no commit, the gateway goes on with those that it has.
        own = _KEPT - ({"commits"} if wish.commits else set())
        if body := patch(
            {key: value for key, value in there[name].items() if key not in own},
            {k: v for k, v in new.items() if k not in own},
        ):
            found.append(Step("change", name, body))
    return found


def patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that makes one of the other; empty where they are equal."""
    made: dict[str, Any] = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := patch(before, value):
                made[key] = inner
        elif value != before:
            made[key] = value
    return made
