"""`fitserve diagnose`: the failure in an engine's log."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_paragraph


def diagnose(
    log: Annotated[str, typer.Argument(help="Log file of an engine; - for standard input.")],
    engine: Annotated[
        str | None,
        typer.Option(help="Engine that wrote the log, KIND or KIND==VERSION; default: any engine."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Machine that the cures are for: a snapshot (2x3090, a file)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Name the failure in an engine's log, with proof and cure. Exit code 1 for a failure, 4 when
    the log does not show it."""
    from gateway.cli.log_diagnosis import lines, read_log, report
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings

    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, data=settings.data)
    machine = profiles.hardware(hardware) if hardware is not None else None
    diagnosis = read_log(log, engine, profiles, machine)
    if as_json:
        say(json.dumps(report(diagnosis), indent=2))
    else:
        for line in lines(diagnosis):
            print_paragraph(line)
    if not diagnosis.is_healthy:
        raise typer.Exit(4 if diagnosis.is_healthy is None else 1)
