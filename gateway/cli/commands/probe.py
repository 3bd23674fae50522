"""`fitserve probe`: the hardware of this machine."""

from __future__ import annotations

from pathlib import Path

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
