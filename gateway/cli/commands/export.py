"""`fitserve export`: how the engine of a model is started, for who wants to start it without the
gateway."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from gateway.cli.client import call, of_model
from gateway.cli.options import Json
from gateway.cli.terminal import say


class Format(StrEnum):
    ARGV = "argv"
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"


def export(
    name: Annotated[str, typer.Argument(help="A model of the gateway that was planned.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="A command line, a Compose file, or a Deployment with its Service."
        ),
    ] = Format.ARGV,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="On which the engine listens.")
    ] = 8000,
    as_json: Json = False,
) -> None:
    """Print how a model's engine is started by its plan: image, flags, environment, GPUs and
    mounts; no keys. --json: the same as a list of words, or as JSON."""
    from gateway.wishes.export.command_line import command_line, text
    from gateway.wishes.export.compose import compose
    from gateway.wishes.export.engine_start import EngineStart
    from gateway.wishes.export.kubernetes import kubernetes

    place = "machine" if form is Format.ARGV else "container"
    start = EngineStart.model_validate(
        call("GET", of_model(name, f"/launch?port={port}&place={place}"))
    )
    if form is Format.ARGV:
        say(json.dumps(command_line(start), indent=2) if as_json else text(start))
        return
    documents = [compose(start)] if form is Format.COMPOSE else kubernetes(start)
    if as_json:
        say(json.dumps(documents[0] if form is Format.COMPOSE else documents, indent=2))
        return
    import yaml

    say(yaml.safe_dump_all(documents, sort_keys=False, width=1000).rstrip("\n"))
