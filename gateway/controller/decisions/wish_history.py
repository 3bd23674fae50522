"""The states of a model's wishes, and the wish that a rollback restores. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gateway.domain.wish import WishVersion
from gateway.errors import Conflict, NotFound

WishState = Literal["in force", "underway", "refused", "former"]


def wish_states(versions: Sequence[WishVersion], *, is_underway: bool) -> list[WishState]:
    """The state of each wish.

    versions: oldest first.
    is_underway: whether the newest wish replaces the one in force, and is not yet in force.
    """
    states: list[WishState] = ["refused" if version.refused else "former" for version in versions]
    accepted_places = [place for place, state in enumerate(states) if state == "former"]
    if is_underway and accepted_places:
        states[accepted_places.pop()] = "underway"
    if accepted_places:
        states[accepted_places[-1]] = "in force"
    return states


def _check_readable(model: str, version: WishVersion) -> WishVersion:
    """The version, unless this gateway cannot read its wish. Raises Conflict."""
    if not version.is_readable:
        raise Conflict(
            f"Wish {version.number} of {model} is stored in a form that this version cannot read.",
            hint=f"Choose another wish of `fitserve history {model}`, or use `fitserve set`.",
        )
    return version


def version_to_restore(
    model: str, versions: Sequence[WishVersion], number: int | None, *, is_underway: bool
) -> WishVersion:
    """The wish with that number; None: the last former wish that differs from the one in force.
    Raises NotFound, Conflict."""
    if number is not None:
        for version in versions:
            if version.number == number:
                return _check_readable(model, version)
        raise NotFound(
            f"The history of {model} has no wish {number}.",
            hint=f"`fitserve history {model}` lists its wishes.",
        )
    states = wish_states(versions, is_underway=is_underway)
    rows = list(zip(versions, states, strict=True))
    present_wish = next((version.wish for version, state in rows if state == "in force"), None)
    for version, state in reversed(rows):
        if state == "former" and version.is_readable and version.wish != present_wish:
            return version
    raise Conflict(
        f"{model} has no former wish to go back to.",
        hint=f"`fitserve history {model}` lists its wishes.",
    )
