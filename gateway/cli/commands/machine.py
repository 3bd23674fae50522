"""`fitserve probe`, `doctor`, `calibrate` and `diagnose`: this machine and its engines' logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_paragraph, print_table


def probe(as_json: Json = False) -> None:
    """Show the hardware of this machine."""
    from gateway.machine.gpu_watch import allowed_devices
    from gateway.machine.probe import probe as probe_machine
    from gateway.planner.explain import machine
    from gateway.settings import load_settings

    settings = load_settings()
    hardware = allowed_devices(Path.cwd(), settings).mark(probe_machine(Path.cwd()))
    if as_json:
        say(hardware.model_dump_json(indent=2))
        return
    print_table(("", "", "", ""), machine(hardware))
    for note in hardware.notes:
        print_paragraph(f"note: {note}", indent=4)


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
    UNKNOWN is no failure."""
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


def calibrate(as_json: Json = False) -> None:
    """Measure the speed of the idle GPUs, for better plans. Exit code 3 when nothing could be
    measured."""
    from gateway.cli.commands.calibrate import fact_rows, run_calibration

    result = run_calibration()
    if as_json:
        say(json.dumps(result, indent=2))
    else:
        print_table(("GPU", "MEASURED", "VALUE", "BY"), fact_rows(result["facts"]))
        for uuid, reason in result["left_alone"].items():
            print_paragraph(f"not measured: {uuid}: {reason}", indent=4)
        for problem in result["problems"]:
            print_paragraph(f"note: {problem}", indent=4)
    if not result["facts"]:
        raise typer.Exit(3)


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
    the log does not tell."""
    from gateway.cli.commands.diagnose import lines, read_log, report
    from gateway.profiles.profiles import Profiles

    extra = os.environ.get("FITSERVE_PROFILES_DIR")
    profiles = Profiles(Path(extra) if extra else None)
    machine = profiles.hardware(hardware) if hardware is not None else None
    diagnosis = read_log(log, engine, profiles, machine)
    if as_json:
        say(json.dumps(report(diagnosis), indent=2))
    else:
        for line in lines(diagnosis):
            print_paragraph(line)
    if not diagnosis.is_healthy:
        raise typer.Exit(4 if diagnosis.is_healthy is None else 1)
