"""`fitserve apply`: make the running gateway's models match a file."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.options import Json
from gateway.cli.terminal import print_message, say
from gateway.cli.text_tables import print_paragraph, show_changes
from gateway.domain.units import plural
from gateway.errors import FitserveError

if TYPE_CHECKING:
    from gateway.wishes.references import References
    from gateway.wishes.steps import Step

_STEP_WORDS = {"add": "added", "change": "changed", "remove": "removed"}
_DRY_RUN_WORDS = {
    "add": "would be added",
    "change": "would be changed",
    "remove": "would be removed",
}


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
    has_failed = False
    leaving_names: set[str] = set()
    wishes = {view["name"]: view["wish"] for view in views}
    for step in steps(views, models_file.wishes, [view["name"] for view in views] if prune else ()):
        try:
            answer = _preview(step, leaving_names) if diff else call(*step.request, step.body)
        except FitserveError as error:
            has_failed = True
            print_message(
                f"fitserve: {step.name}: {models_file.references.hide_values(str(error))}"
            )
            continue
        finally:
            if step.kind != "add":
                leaving_names |= {*wishes[step.name]["aliases"], *wishes[step.name]["loras"]}
        changes = answer.get("wish", []) if step.kind == "change" else []
        if step.kind == "change" and not changes:
            continue
        rows.append(
            {
                "name": step.name,
                "did": step.kind,
                "differences": _hide_secrets(changes, models_file.references),
                **_refusal(answer),
            }
        )
    if as_json:
        say(json.dumps({"data": rows, "applied": not diff}, indent=2))
    else:
        for row in rows:
            say(f"{row['name']}: {(_DRY_RUN_WORDS if diff else _STEP_WORDS)[row['did']]}")
            for line in row.get("refusal", ()):
                print_paragraph(line, indent=4, first="  ")
            if row["differences"]:
                show_changes(row["differences"])
        if not rows and not has_failed:
            print_paragraph(
                f"The gateway matches {file}: {plural(len(models_file.wishes), 'model')}"
            )
    if has_failed:
        raise typer.Exit(1)


def _preview(step: Step, leaving_names: Collection[str]) -> Any:
    """The answer to the dry run of a step. leaving_names: aliases that steps before may make
    free."""
    method, path = step.request
    if step.kind == "remove":
        return {}
    body = step.body or {}
    if step.kind == "add":
        # An alias may be free only once the steps before are done.
        body = {field: value for field, value in body.items() if field != "aliases"}
        if step.name in leaving_names:
            return call(method, "/admin/plan", body)
    return call(method, f"{path}?dry_run=true", body)


def _refusal(answer: Any) -> dict[str, list[str]]:
    """The cause and the cure where a new model would have no plan."""
    has_plan = answer.get("plans", True)
    return {} if has_plan else {"refusal": ["No plan.", *answer.get("refusal", ())]}


def _hide_secrets(changes: list[dict[str, str]], references: References) -> list[dict[str, str]]:
    return [
        {key: references.hide_values(value) for key, value in change.items()} for change in changes
    ]
