"""`fitserve config`: checks of settings and model files without a gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import Json, usage_error
from gateway.cli.terminal import print_message, say
from gateway.domain.units import plural

app = typer.Typer(
    no_args_is_help=True, help="Check settings and model files.", rich_markup_mode=None
)


@app.command("check")
def check(
    file: Annotated[
        Path | None, typer.Argument(help="Model file; default: FITSERVE_MODELS_FILE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this shell's settings and a model file. Mistakes are shown with line, column and the
    nearest key. Exit code 2 for a mistake."""
    from gateway.settings import load_settings
    from gateway.wishes.models_file import load

    settings = load_settings()
    path = file or settings.models_file
    if path is None:
        usage_error(
            "there is no model file: name one, or set FITSERVE_MODELS_FILE. The settings are valid."
        )
    models_file = load(path.expanduser())
    models = sorted(models_file.wishes)
    for name in models:
        source = models_file.wishes[name].source or ""
        if source.startswith("/") and not Path(source).is_dir():
            print_message(
                f"fitserve: warning: {name}: there is no folder {source} on this machine. Correct"
                " the source, or run the check where the gateway runs."
            )
    text = f"{path}: {plural(len(models), 'model')}, and the settings are valid"
    say(json.dumps({"file": str(path), "models": models}, indent=2) if as_json else text)


@app.command("schema")
def describe() -> None:
    """Print the JSON schema of a model file, for editors."""
    from gateway.wishes.models_file import schema

    say(json.dumps(schema(), indent=2))
