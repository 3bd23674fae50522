"""`fitserve transcripts`: requests and answers that the gateway recorded."""

from __future__ import annotations

import base64
import json
import secrets
import time
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from gateway.cli.client import call, stream
from gateway.cli.options import Json
from gateway.cli.terminal import print_bytes, say
from gateway.cli.text_tables import print_table
from gateway.domain.units import format_bytes

TranscriptId = Annotated[str, typer.Argument(help="Id in `transcripts ls`.")]
Search = Annotated[str | None, typer.Option(help="Text in the request or the answer.")]
OfModel = Annotated[str | None, typer.Option("--model", help="Only requests to this model.")]
OfKey = Annotated[str | None, typer.Option("--key", help="Only requests with this key.")]

app = typer.Typer(
    no_args_is_help=True, help="Recorded requests and answers.", rich_markup_mode=None
)

_PATH = "/admin/transcripts"
_MAX_ROWS = 200
_KEY_BYTES = 32
_MOMENTS = (
    ("queued", "queued_s"),
    ("sent to the engine after", "routed_s"),
    ("first token after", "first_byte_s"),
    ("end after", "duration_s"),
)


@app.command("ls")
def ls(
    search: Search = None,
    model: OfModel = None,
    key: OfKey = None,
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=_MAX_ROWS, help="Number of transcripts.")
    ] = 20,
    last_id: Annotated[
        str | None, typer.Option("--before", help="Id of a transcript; list only older ones.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List recorded requests, the newest first. Each reading is an event with your key's name."""
    query = _query(search=search, model=model, key=key, limit=str(last), last_id=last_id)
    listing = call("GET", f"{_PATH}?{urlencode(query)}")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    print_table(
        ("ID", "TIME", "MODEL", "KEY", "STATUS", "TOKENS", "SECONDS", "REQUEST"),
        [_transcript_row(row) for row in listing["data"]],
        empty="No transcript fits. docs/transcripts.md says how to record a key or a model.",
        optional=("REQUEST", "KEY", "SECONDS"),
    )
    if listing["last_id"]:
        say(f"Older transcripts: add `--before {listing['last_id']}`.")


@app.command("show")
def show(transcript: TranscriptId, as_json: Json = False) -> None:
    """Show a request with its answer, tokens and times."""
    view = call("GET", f"{_PATH}/{quote(transcript, safe='')}")
    if as_json:
        say(json.dumps(view, indent=2))
        return
    if view["is_locked"]:
        say("No key of FITSERVE_TRANSCRIPT_KEY_FILE decrypts this transcript.")
        raise typer.Exit(1)
    print_table(("", ""), _facts(view))
    say("\nRequest")
    say(json.dumps(view["request"], indent=2, ensure_ascii=False))
    say("\nAnswer")
    say(view["answer"])


@app.command("replay")
def replay(
    transcript: TranscriptId,
    model: Annotated[str, typer.Option(help="Model that answers the request now.")],
    as_json: Json = False,
) -> None:
    """Send a recorded request to a model, and print its answer after the recorded one."""
    view = call(
        "POST",
        f"{_PATH}/{quote(transcript, safe='')}/replay",
        {"model": model},
        timeout_s=None,
    )
    if as_json:
        say(json.dumps(view, indent=2))
        return
    recorded = view["transcript"]
    say(f"{recorded['model']}, recorded: {_figures(recorded)}\n{recorded['answer']}\n")
    say(f"{view['model']}, now: {_figures(view)}\n{view['answer']}")
    if not view["is_exact"]:
        say("\nParts of the request were removed before it was recorded, so it is not the same.")
    if view["status"] >= 400:
        raise typer.Exit(1)


@app.command("export")
def export(search: Search = None, model: OfModel = None, key: OfKey = None) -> None:
    """Write recorded requests with their texts to the standard output, one line of JSON each."""
    print_bytes(stream(f"{_PATH}/export", _query(search=search, model=model, key=key)))


@app.command("rm")
def rm(
    _: Annotated[bool, typer.Option("--all", help="Delete all transcripts, which is required.")],
    as_json: Json = False,
) -> None:
    """Delete all transcripts. Recording goes on."""
    answer = call("DELETE", _PATH)
    say(
        json.dumps(answer, indent=2)
        if as_json
        else f"transcripts deleted: {format_bytes(answer['bytes_freed'])}"
    )


@app.command("new-key")
def new_key() -> None:
    """Print a new key for FITSERVE_TRANSCRIPT_KEY_FILE. Put it before former ones."""
    say(base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)).decode())


def _query(**fields: str | None) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value}


def _transcript_row(row: Any) -> tuple[object, ...]:
    if row["is_locked"]:
        return (row["id"], _time_text(row["at"]), "locked", "-", "-", "-", "-", "no key fits")
    return (
        row["id"],
        _time_text(row["at"]),
        row["model"] or "-",
        row["key"] or "-",
        row["status"] or row["outcome"],
        _tokens(row),
        f"{row['duration_s']:.2f}",
        row["excerpt"].replace("\n", " ")[:40],
    )


def _facts(view: Any) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = [
        (name.replace("_", " "), view[name])
        for name in ("id", "request_id", "key", "model", "replica", "path")
        if view[name]
    ]
    rows += [
        ("time", _time_text(view["at"])),
        ("status", f"{view['status']} {view['outcome']} {view['error']}".strip()),
        ("tokens", _tokens(view)),
    ]
    rows += [
        (label, f"{view[field]:.3f} s") for label, field in _MOMENTS if view[field] is not None
    ]
    rows += [("note", note) for note in view["notes"]]
    return rows


def _figures(view: Any) -> str:
    return f"status {view['status']}, {_tokens(view)} tokens, {view['duration_s']:.2f} s"


def _tokens(view: Any) -> str:
    """Tokens of prompt and answer, as the engine reported them."""
    counts = (view["prompt_tokens"], view["completion_tokens"])
    return " + ".join("unknown" if count is None else f"{count:,}" for count in counts)


def _time_text(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
