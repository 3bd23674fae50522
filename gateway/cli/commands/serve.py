"""`fitserve serve`, `fitserve demo` and `fitserve agent`: the programs that keep running."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from gateway.cli.options import usage_error
from gateway.cli.terminal import say


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


def demo(
    model: Annotated[
        list[str] | None, typer.Argument(help="NAME SOURCE, and options of `fitserve add`.")
    ] = None,
) -> None:
    """Serve a tiny model from nothing, until Ctrl-C. The command installs an engine, starts a
    gateway, serves the model (or NAME SOURCE) and prints a curl command. Needs no Docker."""
    from gateway.cli.demo.demo_server import serve_demo

    if model is not None and len(model) == 1:
        usage_error("`fitserve demo` takes a name and a source, or neither.")
    raise typer.Exit(serve_demo(tuple(model or ()), say))


def agent() -> None:
    """Run the agent, which starts engines in Docker. Its gateway has FITSERVE_HOST_KIND=agent."""
    from gateway.cli.commands.agent import run
    from gateway.logging import configure_logging
    from gateway.settings import load_settings

    settings = load_settings()
    configure_logging(settings.log_level)
    run(settings)
