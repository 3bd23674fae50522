"""`fitserve apply`: make the running gateway's models match a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.options import Json
from gateway.cli.tables import print_paragraph, show_changes
from gateway.cli.terminal import print_message, say
from gateway.errors import FitserveError

if TYPE_CHECKING:
    from gateway.wishes.references import References
    from gateway.wishes.steps import Step

_PAST_TENSE = {"add": "added", "change": "changed", "remove": "removed"}
_WOULD = {"add": "would be added", "change": "would be changed", "remove": "would be removed"}


def apply(
    file: Annotated[
        Path, typer.Argument(help="YAML file of models, like docs/models.example.yaml.")
    ],
    diff: Annotated[bool, typer.Option("--diff", help="Show the changes; make none.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove models that are not in the file.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make the running gateway's models match FILE. Equal models stay untouched. Exit code 1 if a
    change failed."""
    from gateway.wishes.models_file import load
    from gateway.wishes.steps import steps

    models_file = load(file)
    views = call("GET", "/admin/models")["data"]
    rows: list[dict[str, Any]] = []
    failed = False
    for step in steps(views, models_file.wishes, [view["name"] for view in views] if prune else ()):
        try:
            answer = _answer(step, diff=diff)
        except FitserveError as error:
            failed = True
            print_message(f"fitserve: {step.name}: {models_file.references.hidden(str(error))}")
            continue
        changes = answer.get("wish", []) if step.kind == "change" else []
        if step.kind == "change" and not changes:
            continue
        rows.append(
            {
                "name": step.name,
                "did": step.kind,
                "differences": _without_secrets(changes, models_file.references),
            }
        )
    if as_json:
        say(json.dumps({"data": rows, "applied": not diff}, indent=2))
    else:
        for row in rows:
            say(f"{row['name']}: {(_WOULD if diff else _PAST_TENSE)[row['did']]}")
            if row["differences"]:
                show_changes(row["differences"])
        if not rows and not failed:
            print_paragraph(f"{len(models_file.wishes)} models match {file}")
    if failed:
        raise typer.Exit(1)


def _answer(step: Step, *, diff: bool) -> Any:
    method, path = step.request
    if not diff:
        return call(method, path, step.body)
    if step.kind == "change":
        return call(method, f"{path}?dry_run=true", step.body)
    return {}


def _without_secrets(changes: list[dict[str, str]], references: References) -> list[dict[str, str]]:
    return [{key: references.hidden(value) for key, value in change.items()} for change in changes]
