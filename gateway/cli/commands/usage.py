"""`fitserve usage`: requests and tokens by day, key and model."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.cli.client import call, stream
from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_table

_SUMS = (
    "requests",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "requests_without_usage",
    "estimated_tokens",
)
_HEADS = ("REQUESTS", "PROMPT", "COMPLETION", "CACHED", "UNCOUNTED", "ESTIMATED")


def usage(
    by: Annotated[
        str, typer.Option(help="Group rows by day, key, model; comma-separated.")
    ] = "key,model",
    first: Annotated[
        str | None,
        typer.Option("--from", help="First day (UTC), such as 2026-11-01; default: 30 days ago."),
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", help="Last day (UTC); default: today.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only this key, by name.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Json = False,
) -> None:
    """Show requests and tokens by key and model, or as --by says.

    UNCOUNTED answers have no token numbers, such as streams without include_usage; ESTIMATED are
    their tokens, from their bytes.
    """
    options = {
        "by": by,
        "from": first,
        "to": last,
        "key": key,
        "model": model,
        "format": "csv" if as_csv else None,
    }
    query = {name: value for name, value in options.items() if value is not None}
    if as_csv:
        for line in b"".join(stream("/admin/usage", query)).decode().splitlines():
            say(line)
        return
    listing: dict[str, Any] = call("GET", f"/admin/usage?{urlencode(query)}")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    parts = [
        part for part in ("day", "key", "model") if part in {name.strip() for name in by.split(",")}
    ]
    rows = [
        (*(str(row[part]) or "-" for part in parts), *(f"{row[name]:,}" for name in _SUMS))
        for row in listing["data"]
    ]
    head = (*(part.upper() for part in parts), *_HEADS)
    print_table(head, rows, empty="No request was answered in this time.")
