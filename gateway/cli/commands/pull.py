"""`fitserve pull`: download the weights of a model to the gateway's machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from gateway.cli.client import answer_error, call, stream_lines
from gateway.cli.options import Json, Revision, absolute_source
from gateway.cli.terminal import progress_bar, say
from gateway.cli.text_tables import print_paragraph
from gateway.domain.units import format_bytes
from gateway.errors import BadRequest, NotReady


def pull(
    model: Annotated[
        str, typer.Argument(help="Hugging Face repository, or a model of the gateway.")
    ],
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Download the weights of MODEL without serving it. They go to the gateway's machine. An
    interrupted download continues."""
    wishes = (
        view["wish"]
        for view in call("GET", "/admin/models")["data"]
        if model in (view["name"], *view["wish"]["aliases"])
    )
    if (wish := next(wishes, None)) is not None:
        source = wish["source"] or ""
        revision = revision or next(iter(wish["commits"].values()), wish["revision"])
    else:
        source = model
    if not source or (absolute_source(source) or "").startswith("/"):
        raise BadRequest(f"{model} has no weights on a Hub.", hint="Name a repository, org/name.")
    last = download(source, revision)
    if as_json:
        say(
            json.dumps(
                {"source": source, "commit": last["commit"], "bytes": last["total"]}, indent=2
            )
        )
    else:
        print_paragraph(
            f"{source}: {format_bytes(last['total'])} downloaded, at commit {last['commit']}"
        )


def download(source: str, revision: str | None) -> Any:
    """The last message of a finished download. Raises the gateway's own error, and NotReady for a
    broken download."""
    message: Any = None
    with progress_bar(source) as show_progress:
        for line in stream_lines("/admin/pull", {"source": source, "revision": revision}):
            message = json.loads(line)
            if "error" in message:
                raise answer_error(message)
            # Files that are being checked are complete.
            done_bytes = message["total"] if message["checking"] else message["done"]
            show_progress(done_bytes, message["total"])
    if message is None or "commit" not in message:
        raise NotReady(
            f"The download of {source} stopped before its end.",
            hint="Run the command again: the download continues.",
        )
    return message
