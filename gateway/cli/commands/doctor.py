"""`fitserve doctor`: the checks of this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_table


def doctor(
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Create the gateway's folders and close them to others; nothing else."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine for everything that the gateway needs. Exit code 1 for a failed check;
    UNKNOWN is not a failure."""
    from gateway.cli.doctor.examination import examine
    from gateway.settings import load_settings

    checks = examine(load_settings(), applies_fixes=fix)
    if as_json:
        say(json.dumps([check.fields() for check in checks], indent=2))
    else:
        rows = [
            (
                check.state.upper(),
                check.name,
                check.finding + (f" ({check.fix})" if check.fix else ""),
                check.do,
            )
            for check in checks
        ]
        print_table(("", "CHECK", "FOUND", "DO"), rows)
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)
