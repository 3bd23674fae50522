"""`fitserve config`: the files of settings and of models, checked without a gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import Json, usage
from gateway.cli.terminal import say

app = typer.Typer(
    no_args_is_help=True, help="The files of settings and of models.", rich_markup_mode=None
)


@app.command("check")
def check(
    file: Annotated[
        Path | None, typer.Argument(help="File of models; default: that of FITSERVE_MODELS_FILE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the settings of this shell, and a file of models: every mistake with line, column and
    the nearest key. Exit code 2 where there is one."""
    from gateway.settings import load_settings
    from gateway.wishes.models_file import load

    settings = load_settings()
    path = file or settings.models_file
    if path is None:
        usage(
            "there is no file of models: give one, or set FITSERVE_MODELS_FILE. The settings are"
            " right."
        )
    found = load(path.expanduser())
    models = sorted(found.wishes)
    text = f"{path}: {len(models)} models, and the settings are right"
    say(json.dumps({"file": str(path), "models": models}, indent=2) if as_json else text)


@app.command("schema")
def describe() -> None:
    """Print the JSON schema of a file of models, for editors."""
    from gateway.wishes.models_file import schema

    say(json.dumps(schema(), indent=2))
