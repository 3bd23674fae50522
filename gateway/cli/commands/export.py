"""`fitserve export`: the start of a model's engine without the gateway."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from gateway.cli.client import call, model_path
from gateway.cli.options import Json
from gateway.cli.terminal import say


class Format(StrEnum):
    ARGV = "argv"
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"


def export(
    name: Annotated[str, typer.Argument(help="A planned model of the gateway.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="Command line, Compose file, or Kubernetes Deployment with Service."
        ),
    ] = Format.ARGV,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the engine.")] = 8000,
    as_json: Json = False,
) -> None:
    """Print how to start a model's engine without fitserve. The output has image, flags,
    environment, GPUs and mounts, but no keys. --json prints a list of words or JSON documents."""
    from gateway.wishes.export.command_line import command_line, text
    from gateway.wishes.export.compose import compose
    from gateway.wishes.export.engine_start import EngineStart
    from gateway.wishes.export.kubernetes import kubernetes

    place = "machine" if form is Format.ARGV else "container"
    start = EngineStart.model_validate(
        call("GET", model_path(name, f"/launch?port={port}&place={place}"))
    )
    if form is Format.ARGV:
        say(json.dumps(command_line(start), indent=2) if as_json else text(start))
        return
    documents = [compose(start)] if form is Format.COMPOSE else kubernetes(start)
    if as_json:
        say(json.dumps(documents[0] if form is Format.COMPOSE else documents, indent=2))
        return
    from gateway.wishes.export.yaml_text import yaml_text

    say(yaml_text(documents))
