"""`fitserve usage`: who used what of the running gateway."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.cli.client import call, stream
from gateway.cli.options import Json
from gateway.cli.present import table
from gateway.cli.terminal import say

_SUMS = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens", "untold_requests")
_HEADS = ("REQUESTS", "PROMPT", "COMPLETION", "CACHED", "UNTOLD")


def usage(
    by: Annotated[
        str, typer.Option(help="What there is a row for: day, key, model, with commas between.")
    ] = "key,model",
    first: Annotated[
        str | None,
        typer.Option("--from", help="First day (UTC), as 2026-11-01; default: 30 days ago."),
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", help="Last day (UTC); default: today.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only of the key of this name.")] = None,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
    as_json: Json = False,
) -> None:
    """Show requests and tokens by day, key and model. UNTOLD: answers whose engine told no tokens,
    as streams without include_usage."""
    given = {
        "by": by,
        "from": first,
        "to": last,
        "key": key,
        "model": model,
        "format": "csv" if as_csv else None,
    }
    query = {name: value for name, value in given.items() if value is not None}
    if as_csv:
        for line in b"".join(stream("/admin/usage", query)).decode().splitlines():
            say(line)
        return
    listing: dict[str, Any] = call("GET", f"/admin/usage?{urlencode(query)}")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    parts = [
        part for part in ("day", "key", "model") if part in {one.strip() for one in by.split(",")}
    ]
    rows = [
        (*(str(row[part]) or "-" for part in parts), *(f"{row[name]:,}" for name in _SUMS))
        for row in listing["data"]
    ]
    table((*(part.upper() for part in parts), *_HEADS), rows)
