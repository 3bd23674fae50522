"""`fitserve history` and `fitserve rollback`: former wishes of a model."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from gateway.cli.client import call, model_path
from gateway.cli.commands.change import ChangeOptions, send_change
from gateway.cli.options import Json, ModelName, drop_none, expand_options
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_table

_MAX_VALUE_CHARACTERS = 60


def history(name: ModelName, as_json: Json = False) -> None:
    """List a model's wishes, with author, time and changes."""
    answer = call("GET", model_path(name, "/history"))
    if as_json:
        say(json.dumps(answer, indent=2))
        return
    print_table(
        ("N", "TIME", "BY", "STATE", "CHANGES"),
        [
            (
                version["number"],
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version["at"])),
                _author(version),
                version["state"],
                _changes(version),
            )
            for version in answer["data"]
        ],
        empty=f"The history of {name} is empty.",
    )


@expand_options
def rollback(
    name: ModelName,
    change: ChangeOptions,
    number: Annotated[
        int | None,
        typer.Argument(
            min=1,
            help="Number of the wish in `fitserve history`; without it, the last former wish.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a model back to a former wish.

    The checks are those of `fitserve set`. If the new engine fails, the old one comes back.
    """
    send_change(name, ("POST", "/rollback"), drop_none({"number": number}), change, as_json=as_json)


def _author(version: dict[str, Any]) -> str:
    """Key and program of a change."""
    key = version["key"]
    way = version["way"]
    return f"{key}, {way}" if key else str(way)


def _changes(version: dict[str, Any]) -> str:
    """The changes of a wish in one line, and why it was refused."""
    pairs = [
        f"{change['field']}: {_value(change['former'])} -> {_value(change['present'])}"
        if change["former"] is not None
        else f"{change['field']}: {_value(change['present'])}"
        for change in version["changes"]
    ]
    origin = f"as wish {version['restored']}; " if version["restored"] is not None else ""
    refusal = f" (refused: {version['refused']})" if version["refused"] else ""
    if version["problem"]:
        return f"{version['problem']}{refusal}"
    return f"{origin}{', '.join(pairs)}{refusal}"


def _value(value: str | None) -> str:
    text = value or "-"
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."
