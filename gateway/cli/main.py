"""The program `fitserve`: its options before a command, and the exit codes.

Exit codes: 0 ok, 1 refused or failed, 2 usage, 3 no plan or not ready, 4 unknown. Heavy imports
stand inside the commands: `fitserve plan` must not load a web server.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from gateway.cli.client import gateway_url, not_text_error
from gateway.cli.options import TYPO_ERROR, mistyped_message
from gateway.cli.registry import SectionedGroup
from gateway.cli.terminal import print_message, say
from gateway.disk_fault import write_error
from gateway.errors import FitserveError
from gateway.version import __version__

app = typer.Typer(
    cls=SectionedGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line. Expected errors end with two sentences and their exit code."""
    try:
        sys.exit(_run(sys.argv[1:]))
    except FitserveError as error:
        print_message(f"fitserve: {error}")
        sys.exit(error.exit_code)
    except typer.Abort:
        print_message("fitserve: nothing was done.")
        sys.exit(1)
    except TYPO_ERROR as error:
        print_message(mistyped_message(error))
        sys.exit(error.exit_code)
    except UnicodeEncodeError:
        if all(map(_is_text, sys.argv)):
            raise
        refusal = not_text_error()
        print_message(f"fitserve: {refusal}")
        sys.exit(refusal.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        if (disk_refusal := write_error(error)) is None:
            raise
        print_message(f"fitserve: {disk_refusal}")
        sys.exit(disk_refusal.exit_code)


def _run(arguments: list[str]) -> int | None:
    """Run the command of these arguments, with options of engines in our form, for its exit
    code."""
    while True:
        try:
            # Typer raises usage errors here and returns exit codes because standalone mode is off.
            code: int | None = app(arguments, standalone_mode=False, prog_name="fitserve")
        except TYPO_ERROR as error:
            from gateway.cli.foreign_options import translated_arguments  # only after a mistake

            translation = translated_arguments(arguments, error)
            if translation is None:
                raise
            arguments, form = translation
            print_message(f"note: {getattr(error, 'option_name', '')} is read as {form}.")
        else:
            return code


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _print_version(is_requested: bool) -> None:
    if is_requested:
        say(__version__)
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of a remote gateway: HOST, HOST:PORT or a URL; or set FITSERVE_URL."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the gateway.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Key for the gateway. FITSERVE_KEY is safer: process lists do not show it."
        ),
    ] = None,
) -> None:
    """Serve language models on your GPUs: fitserve plans, starts, checks and repairs engines, and
    routes requests to them."""
    if host is not None or port is not None:
        os.environ["FITSERVE_URL"] = gateway_url(host, port)
    if key is not None:
        os.environ["FITSERVE_KEY"] = key
