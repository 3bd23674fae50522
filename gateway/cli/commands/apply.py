"""`fitserve apply`: the models of a file on the gateway that runs, as `FITSERVE_MODELS_FILE` has
the gateway itself do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.options import Json
from gateway.cli.present import print_paragraph, show_differences
from gateway.cli.terminal import say, told
from gateway.errors import FitserveError

if TYPE_CHECKING:
    from gateway.wishes.references import References
    from gateway.wishes.steps import Step

_DONE = {"add": "added", "change": "changed", "remove": "removed"}
_WOULD = {"add": "would be added", "change": "would be changed", "remove": "would be removed"}


def apply(
    file: Annotated[Path, typer.Argument(help="YAML, as docs/models.example.yaml.")],
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what would be otherwise; change nothing.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove models that are not in the file.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring the running gateway's models to those of FILE, in place, while they serve. What is so
    already stays untouched. Exit code 1 where some of it could not
    be done."""
    from gateway.wishes.models_file import load
    from gateway.wishes.steps import steps

    found = load(file)
    views = call("GET", "/admin/models")["data"]
    rows: list[dict[str, Any]] = []
    failed = False
    for step in steps(views, found.wishes, [view["name"] for view in views] if prune else ()):
        try:
            answer = _answer(step, diff=diff)
        except FitserveError as error:
            failed = True
            told(f"fitserve: {step.name}: {found.references.hidden(str(error))}")
            continue
        differences = answer.get("wish", []) if step.kind == "change" else []
        if step.kind == "change" and not differences:
            continue
        rows.append(
            {
                "name": step.name,
                "did": step.kind,
                "differences": _hidden(differences, found.references),
            }
        )
    if as_json:
        say(json.dumps({"data": rows, "applied": not diff}, indent=2))
    else:
        for row in rows:
            say(f"{row['name']}: {(_WOULD if diff else _DONE)[row['did']]}")
            if row["differences"]:
                show_differences(row["differences"])
        if not rows and not failed:
            print_paragraph(f"{len(found.wishes)} models are as {file} has them")
    if failed:
        raise typer.Exit(1)


def _answer(step: Step, *, diff: bool) -> Any:
    method, path = step.request
    if not diff:
        return call(method, path, step.body)
    if step.kind == "change":
        return call(method, f"{path}?dry_run=true", step.body)
    return {}


def _hidden(differences: list[dict[str, str]], references: References) -> list[dict[str, str]]:
    return [{key: references.hidden(value) for key, value in one.items()} for one in differences]
