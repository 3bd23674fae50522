"""`fitserve facts`: list, remove, export and import facts about engines and GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_table
from gateway.domain.units import plural
from gateway.errors import BadRequest, NotFound

FactNumber = Annotated[int, typer.Argument(help="Number of the fact in `facts ls`.")]

app = typer.Typer(
    no_args_is_help=True, help="Learned facts about engines and GPUs.", rich_markup_mode=None
)


@app.command("ls")
def ls(as_json: Json = False) -> None:
    """List the facts. Facts that ship with fitserve come first and have no number."""
    rows = _fact_rows()
    if as_json:
        say(json.dumps({"data": rows}, indent=2))
        return
    print_table(
        ("FACT", "KIND", "STATE", "WHERE"),
        [
            (
                row["id"] or "-",
                row["fact"]["kind"],
                "stale" if row["stale"] else "applied",
                _scope_text(row["fact"]),
            )
            for row in rows
        ],
    )


@app.command("show")
def show(number: FactNumber, as_json: Json = False) -> None:
    """Show a fact: its value, its scope, and the line that proves it."""
    row = next((row for row in _fact_rows() if row["id"] == number), None)
    if row is None:
        raise NotFound(f"There is no fact {number}.", hint="`fitserve facts ls` lists them.")
    if as_json:
        say(json.dumps(row, indent=2))
        return
    fact = row["fact"]
    lines: list[tuple[object, ...]] = [
        ("kind", fact["kind"]),
        ("state", row["stale"] or "applied"),
        ("proof", fact["source"]),
    ]
    lines += [("value", fact["value"])] if fact["value"] is not None else []
    lines += [(key, value) for key, value in fact["scope"].items()]
    lines += [(f"under {key}", value) for key, value in fact["under"].items()]
    lines += [("attempt", fact["attempt"])] if fact["attempt"] is not None else []
    print_table(("", ""), lines)


@app.command("rm")
def rm(number: FactNumber, as_json: Json = False) -> None:
    """Remove a fact. Plans that it ruled out become possible again."""
    answer = call("DELETE", f"/admin/facts/{number}")
    say(json.dumps(answer, indent=2) if as_json else f"fact {number}: removed")


@app.command("export")
def export(
    file: Annotated[
        Path | None, typer.Argument(help="Output file; default: standard output.")
    ] = None,
) -> None:
    """Write this machine's facts as JSON. Another machine reads them with `facts import`."""
    text = json.dumps(
        {"facts": [row["fact"] for row in _fact_rows() if row["id"] is not None]}, indent=2
    )
    if file is None:
        say(text)
    else:
        file.write_text(f"{text}\n")


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="File of `fitserve facts export`; - for standard input.")
    ],
    as_json: Json = False,
) -> None:
    """Add the facts of another gateway."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        body = json.loads(text)
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"{file} cannot be read as JSON: {error}.",
            hint="Name a file written by `fitserve facts export`.",
        ) from None
    answer = call("POST", "/admin/facts", body)
    say(json.dumps(answer, indent=2) if as_json else f"{plural(answer['added'], 'fact')} added")


def _fact_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = call("GET", "/admin/facts")["data"]
    return rows


def _scope_text(fact: dict[str, Any]) -> str:
    text = ", ".join(f"{key} {value}" for key, value in fact["scope"].items())
    return f"{text}: {fact['value']}" if fact["value"] is not None else text
