"""`fitserve keys`: who may call the running gateway, for what, and how much."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from gateway.cli.client import call, in_path
from gateway.cli.options import Json, usage
from gateway.cli.present import table
from gateway.cli.terminal import say, told
from gateway.keys import SCOPES

_CLOSES = (
    "from now on every program needs a key, on this machine too, and this command line as well."
)

app = typer.Typer(
    no_args_is_help=True, help="Who may call, for what, and how much.", rich_markup_mode=None
)


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="By which the key is listed and removed.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="inference (the default), read or admin; repeatable.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may ask; repeatable. Default: all.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Of prompts and answers together.")
    ] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    as_json: Json = False,
) -> None:
    """Make a key and print it. It is shown once, and kept nowhere."""
    if unknown := set(scope or ()) - SCOPES:
        usage(f"There is no scope {min(unknown)}; a key may have {', '.join(sorted(SCOPES))}.")
    body: dict[str, Any] = {"name": name, "scopes": scope or ["inference"]}
    limits = {
        "models": model or None,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_in_flight": max_in_flight,
    }
    first = not call("GET", "/admin/keys")["data"]
    if first and sys.stdin.isatty() and sys.stderr.isatty():
        told(f"This is the first key: {_CLOSES}")
        typer.confirm("Make it?", abort=True, err=True)
    made = call(
        "POST",
        "/admin/keys",
        body | {key: value for key, value in limits.items() if value is not None},
    )
    say(json.dumps(made, indent=2) if as_json else made["key"])
    if first:
        told(
            f"fitserve: This was the first key: {_CLOSES} For this shell: export"
            f" FITSERVE_KEY={made['key']}"
        )


@app.command("ls")
def ls(as_json: Json = False) -> None:
    """List the keys, those of the settings first. The keys themselves are not known."""
    listing = call("GET", "/admin/keys")
    if as_json:
        say(json.dumps(listing, indent=2))
        return
    rows = [
        (key["name"], ", ".join(key["scopes"]), ", ".join(key["models"] or ("all",)), _limits(key))
        for key in listing["data"]
    ]
    table(("NAME", "SCOPES", "MODELS", "LIMITS"), rows)


@app.command("rm")
def rm(name: str, as_json: Json = False) -> None:
    """Revoke a key at once. Exit code 1 where the disk did not take that yet, so that a restart
    would bring the key back."""
    answer = call("DELETE", f"/admin/keys/{in_path(name)}")
    say(json.dumps(answer, indent=2) if as_json else f"key {name}: removed")
    if not answer["durable"]:
        told(
            "fitserve: The disk of the gateway cannot be written, so a restart would make the key"
            f" {name} good again. The gateway tries again every few seconds; free disk space or"
            " repair the permissions of FITSERVE_DATA_DIR."
        )
        raise typer.Exit(1)


def _limits(key: dict[str, Any]) -> str:
    words = (
        ("requests_per_minute", "requests/min"),
        ("tokens_per_minute", "tokens/min"),
        ("max_in_flight", "at once"),
    )
    return (
        ", ".join(f"{key[name]:,} {word}" for name, word in words if key[name] is not None)
        or "none"
    )
