"""Steps from the models of a gateway to those of a file: requests of the admin API. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from gateway.domain import Wish
from gateway.errors import BadRequest

# Fields that the gateway sets: commits come from the Hub.
_FIXED_FIELDS = frozenset({"name", "commits"})


class Step(NamedTuple):
    """A request of the admin API. `body` may hold secrets."""

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
    views: Iterable[Mapping[str, Any]], wishes: Mapping[str, Wish], prune: Collection[str] = ()
) -> list[Step]:
    """The steps that lead from `views` to the wishes of the file.

    views: the rows of GET /admin/models.
    prune: models to remove if the file lacks them.

    Raises BadRequest if a model would have to become an endpoint.
    """
    wishes_now = {str(view["name"]): view["wish"] for view in views}
    planned_steps = [
        Step("remove", name) for name in sorted(set(prune) & wishes_now.keys() - wishes.keys())
    ]
    # A name that goes from one model to another is free before it is taken.
    owners = {
        any_name: name
        for name, wish in wishes.items()
        for any_name in (name, *wish.aliases, *wish.loras)
    }
    for name in sorted(wishes.keys() & wishes_now.keys()):
        aliases = wishes_now[name].get("aliases", [])
        free_aliases = [alias for alias in aliases if owners.get(alias, name) == name]
        if free_aliases != aliases:
            planned_steps.append(Step("change", name, {"aliases": free_aliases}))
            wishes_now[name] = {**wishes_now[name], "aliases": free_aliases}
    for name, wish in wishes.items():
        new_fields = wish.model_dump(mode="json")
        if name not in wishes_now:
            planned_steps.append(
                Step(
                    "add",
                    name,
                    {
                        key: value
                        for key, value in new_fields.items()
                        if value not in (None, {}, [])
                    },
                )
            )
            continue
        if bool(wish.source) != bool(wishes_now[name]["source"]):
            raise BadRequest(
                f"{name} cannot become {'a model' if wish.source else 'an endpoint'}.",
                hint="Remove it first (`fitserve rm`).",
            )
        # Where the file pins no commit, the gateway goes on with those that it has.
        kept_fields = _FIXED_FIELDS - ({"commits"} if wish.commits else set())
        if body := patch(
            {key: value for key, value in wishes_now[name].items() if key not in kept_fields},
            {key: value for key, value in new_fields.items() if key not in kept_fields},
        ):
            planned_steps.append(Step("change", name, body))
    return planned_steps


def patch(old_fields: Mapping[str, Any], new_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that makes one of the other; empty where they are equal."""
    changes: dict[str, Any] = dict.fromkeys(old_fields.keys() - new_fields.keys())
    for key, value in new_fields.items():
        former_value = old_fields.get(key)
        if isinstance(value, dict) and isinstance(former_value, dict):
            if inner_changes := patch(former_value, value):
                changes[key] = inner_changes
        elif value != former_value:
            changes[key] = value
    return changes
