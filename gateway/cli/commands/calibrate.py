"""`fitserve calibrate`: the measured speed of the GPUs."""

from __future__ import annotations

import json

import typer

from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_paragraph, print_table


def calibrate(as_json: Json = False) -> None:
    """Measure the speed of the idle GPUs, for better plans. Exit code 3 when nothing could be
    measured."""
    from gateway.cli.calibration import fact_rows, run_calibration

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
