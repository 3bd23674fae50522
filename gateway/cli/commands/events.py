"""`fitserve events`: past and new events of the running gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from gateway.cli.client import call, stream
from gateway.cli.options import Json
from gateway.cli.terminal import print_message, say
from gateway.cli.text_tables import print_paragraph
from gateway.errors import NotReady

_RECENT_EVENTS = 50
_RETRY_S = 2.0
# The width of the time column.
_INDENT = 21


def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events until Ctrl-C.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Only events of this model.")] = None,
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=1000, help="Number of past events.")
    ] = _RECENT_EVENTS,
    as_json: Json = False,
) -> None:
    """Print events of models, engines, GPUs and keys. Failures come with their proof. --json prints
    one line for each event."""
    query: dict[str, Any] = {"last": last} | ({"model": model} if model is not None else {})
    if not follow:
        from urllib.parse import urlencode

        for event in call("GET", f"/admin/events?{urlencode({**query, 'follow': 'false'})}")[
            "data"
        ]:
            _print_event(event, as_json)
        return
    try:
        _follow(query, as_json)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _follow(query: dict[str, Any], as_json: bool) -> None:
    """Print events for ever, and continue with the next gateway after a restart."""
    number: int | None = None
    while True:
        next_query = {
            "after": number,
            **{name: value for name, value in query.items() if name != "last"},
        }
        try:
            for event in _events(stream("/admin/events", query if number is None else next_query)):
                if event.pop("event", None) == "resync":
                    print_message("fitserve: some events in between are no longer stored.")
                    number = event["newest"]
                else:
                    number = event["id"]
                    _print_event(event, as_json)
        except NotReady:
            if number is None:
                raise
        time.sleep(_RETRY_S)


def _events(pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, with an event's own name as `event`."""
    tail = b""
    for piece in pieces:
        *events, tail = (tail + piece).split(b"\n\n")
        for event in events:
            fields = dict(
                line.split(b": ", 1)
                for line in event.split(b"\n")
                if b": " in line and line[:1] != b":"
            )
            if b"data" in fields:
                name = {"event": fields[b"event"].decode()} if b"event" in fields else {}
                yield {**json.loads(fields[b"data"]), **name}


def _print_event(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say(json.dumps(event))
        return
    time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["at"]))
    print_paragraph(event["words"], indent=_INDENT, first=f"{time_text}  {event['kind']:<20}  ")
    failure = event["data"].get("failure") or {}
    if line := failure.get("line"):
        print_paragraph(f"proof: {line}", indent=_INDENT, first=" " * _INDENT)
    if advice := failure.get("advice"):
        print_paragraph(advice, indent=_INDENT, first=" " * _INDENT)
