"""`fitserve batches`: list, show and cancel the batches of a key."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from gateway.cli.client import call
from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_table
from gateway.domain.units import duration_text

BatchId = Annotated[str, typer.Argument(help="Id of the batch in `batches ls`.")]

app = typer.Typer(no_args_is_help=True, help="Batches of your key.", rich_markup_mode=None)

_MAX_ROWS = 100
# Fields of a batch with the time of a state, in their order.
_MOMENTS = (
    "created_at",
    "in_progress_at",
    "finalizing_at",
    "cancelling_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelled_at",
)
_FILES = ("input_file_id", "output_file_id", "error_file_id")


@app.command("ls")
def ls(
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=_MAX_ROWS, help="Number of batches.")
    ] = 20,
    as_json: Json = False,
) -> None:
    """List the batches of your key, the newest first, with their answered lines."""
    listing = call("GET", f"/v1/batches?{urlencode({'limit': last})}")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    print_table(
        ("BATCH", "STATE", "ANSWERED", "FAILED", "LINES", "AGE", "ENDPOINT"),
        [_batch_row(batch) for batch in listing["data"]],
        empty="Your key has no batches. docs/batches.md says how to make one.",
        optional=("ENDPOINT",),
    )
    if listing["has_more"]:
        say(f"Older batches exist. `fitserve batches ls --last {_MAX_ROWS}` lists more.")


@app.command("show")
def show(batch: BatchId, as_json: Json = False) -> None:
    """Show a batch: its lines, times, files, and the lines that the check refused."""
    _show(call("GET", f"/v1/batches/{quote(batch, safe='')}"), as_json)


@app.command("cancel")
def cancel(batch: BatchId, as_json: Json = False) -> None:
    """End a batch, and keep the answers so far."""
    _show(call("POST", f"/v1/batches/{quote(batch, safe='')}/cancel"), as_json)


def _batch_row(batch: Any) -> tuple[object, ...]:
    counts = batch["request_counts"]
    return (
        batch["id"],
        batch["status"],
        f"{counts['completed']:,}",
        f"{counts['failed']:,}",
        f"{counts['total']:,}",
        duration_text(max(0.0, time.time() - batch["created_at"])),
        batch["endpoint"],
    )


def _show(batch: Any, as_json: bool) -> None:
    if as_json:
        say(json.dumps(batch, indent=2))
        return
    counts = batch["request_counts"]
    rows: list[tuple[object, ...]] = [
        ("batch", batch["id"]),
        ("state", batch["status"]),
        (
            "lines",
            f"{counts['completed']:,} answered, {counts['failed']:,} failed,"
            f" {counts['total']:,} in all",
        ),
        ("endpoint", batch["endpoint"]),
        *((_label(name), _time_text(batch[name])) for name in _MOMENTS if batch[name]),
        ("expires", _time_text(batch["expires_at"])),
        *((_label(name), batch[name]) for name in _FILES if batch[name]),
    ]
    for error in (batch["errors"] or {"data": ()})["data"]:
        line = f"line {error['line']:,}: " if error["line"] else ""
        rows.append(("error", f"{line}{error['message']}"))
    print_table(("", ""), rows)


def _label(field: str) -> str:
    return field.removesuffix("_at").removesuffix("_id").replace("_", " ")


def _time_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
