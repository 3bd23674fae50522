"""`fitserve serve`: the gateway as a program."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def serve(
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Processes for inference requests; FITSERVE_WORKERS."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; FITSERVE_HOST.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; FITSERVE_PORT.")
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help=(
                "Replace the gateway that runs on the data folder, without refused connections or"
                " broken answers."
            ),
        ),
    ] = False,
) -> None:
    """Run the gateway."""
    options = {"WORKERS": workers, "HOST": host, "PORT": port}
    os.environ.update(
        {f"FITSERVE_{name}": str(value) for name, value in options.items() if value is not None}
    )
    # A new process image: the gateway runs for months and must not keep the command line's memory.
    os.execv(  # noqa: S606 - no shell is wanted
        sys.executable,
        [
            sys.executable,
            "-m",
            "gateway.__main__",
            "serve",
            *(["--take-over"] if take_over else []),
        ],
    )
