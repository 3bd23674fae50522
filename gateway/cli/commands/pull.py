"""`fitserve pull`: the weights of a model into the cache of the gateway's machine, with a bar;
nothing is started."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from gateway.cli.client import call, lines, reported
from gateway.cli.options import Json, Revision, absolute
from gateway.cli.present import print_paragraph
from gateway.cli.terminal import bar, say
from gateway.domain.units import words as size
from gateway.errors import BadRequest, NotReady


def pull(
    model: Annotated[
        str, typer.Argument(help="Hugging Face repository, or a model of the gateway.")
    ],
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Download the weights of MODEL to the gateway's machine, without serving it. What was cut off
    goes on where it was."""
    known = next(
        (
            one
            for one in call("GET", "/admin/models")["data"]
            if model in (one["name"], *one["wish"]["aliases"])
        ),
        None,
    )
    if known is not None:
        source = known["wish"]["source"] or ""
        revision = revision or next(
            iter(known["wish"]["commits"].values()), known["wish"]["revision"]
        )
    else:
        source = model
    if not source or (absolute(source) or "").startswith("/"):
        raise BadRequest(f"{model} has no weights on a Hub.", hint="Give a repository, org/name.")
    last = pulled(source, revision)
    if as_json:
        say(
            json.dumps(
                {"source": source, "commit": last["commit"], "bytes": last["total"]}, indent=2
            )
        )
    else:
        print_paragraph(f"{source}: {size(last['total'])} are here, at commit {last['commit']}")


def pulled(source: str, revision: str | None) -> Any:
    """The last word of a download, once all is here. Raises the gateway's own error, and NotReady
    where it broke off."""
    said: Any = None
    with bar(source) as shown:
        for line in lines("/admin/pull", {"source": source, "revision": revision}):
            said = json.loads(line)
            if "error" in said:
                raise reported(said)
            # What is looked at is here already.
            shown(said["total"] if said["checking"] else said["done"], said["total"])
    if said is None or "commit" not in said:
        raise NotReady(
            f"The download of {source} broke off.",
            hint="Give the command again: it goes on where it was.",
        )
    return said
