"""`fitserve demo`: a tiny model from nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import usage_error
from gateway.cli.terminal import say


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
